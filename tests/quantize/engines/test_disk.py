"""A growing file is compared with what was written: flushed first, its pages dropped, then read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.engines.stream import disk

PARTS = [bytes([number]) * (40_000 + 4096 * number) for number in range(6)]


def grown(path: Path, harmed: int | None = None) -> disk.ReadBack:
    """A file that was written part by part; a byte of the part ``harmed`` is another than was summed."""
    read_back, offset = disk.ReadBack(path), 0
    with path.open("wb") as file:
        for number, part in enumerate(PARTS):
            file.write(part[:-1] + b"!" if number == harmed else part)
            file.flush()
            read_back.add(disk.Sum(offset, len(part), disk.sum_of(memoryview(part))))
            offset += len(part)
        os.fsync(file.fileno())
    return read_back


@pytest.mark.parametrize("batch", [1, 100_000, 1 << 30])
def test_a_byte_that_differs_is_found_in_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(disk, "_BATCH", batch)
    assert grown(tmp_path / "file").finish()
    for number in range(len(PARTS)):
        assert not grown(tmp_path / "file", harmed=number).finish(), number


def test_parts_are_flushed_dropped_and_read_while_the_file_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_BATCH", 1)
    steps: list[str] = []

    def watch(module: Any, name: str, step: str, advice: int | None = None) -> None:
        original = getattr(module, name)

        def watched(*given: Any) -> Any:
            if advice is None or given[-1] == advice:
                steps.append(step)
            return original(*given)

        monkeypatch.setattr(module, name, watched)

    watch(disk, "wait_flushed", "flush")
    watch(os, "posix_fadvise", "drop", os.POSIX_FADV_DONTNEED)
    watch(os, "preadv", "read")
    read_back = grown(tmp_path / "file")
    assert read_back.finish()
    assert steps == ["flush", "drop", "read"] * (len(PARTS) - 1) + ["drop", "read"]


def test_where_a_file_system_cannot_flush_a_range_all_is_compared_after_the_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_BATCH", 1)
    monkeypatch.setattr(disk, "_sync_file_range", lambda *_: errno.ENOSYS)
    read: list[int] = []
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: read.append(1) or original(*given))
    read_back = grown(tmp_path / "file", harmed=0)
    assert not read
    assert not read_back.finish()
    assert grown(tmp_path / "file").finish()


def test_a_disk_that_refuses_a_part_is_an_error_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a failed write once: what the range's flush was told, the fsync is not told again."""
    monkeypatch.setattr(disk, "_BATCH", 1)
    monkeypatch.setattr(disk, "_sync_file_range", lambda *_: errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        grown(tmp_path / "file").finish()
