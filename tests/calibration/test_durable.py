"""A file is there whole or not at all, and an attempt that fails leaves nothing on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from quantmint.calibration.activations import save_whole
from quantmint.calibration.durable import whole


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's file is gigabytes: one for each try would fill the disk that the next try needs."""
    import torch

    path = tmp_path / "layer-00007.safetensors"
    save_whole(path, {"weight": torch.zeros(4)}, {"try": "first"})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            save_whole(path, {"weight": torch.ones(4)}, {"try": "again"})
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(path.name, before)]


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("half", [b"", b"half"])
def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path, fault: BaseException, half: bytes) -> None:
    def write() -> None:
        with whole(tmp_path / "layer-00007.safetensors") as partial:
            if half:
                partial.write_bytes(half)
            raise fault

    with pytest.raises(type(fault)):
        write()
    assert list(tmp_path.iterdir()) == []
