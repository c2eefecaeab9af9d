"""Checkpoints that can be broken on purpose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Broken:
    """A copy of a single-file checkpoint: change ``tensors`` and ``config``, then `save`."""

    def __init__(self, original: Path, folder: Path) -> None:
        from safetensors.torch import load_file

        shutil.copytree(original, folder)
        self.folder = folder
        self.tensors: dict[str, Any] = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    @property
    def quantization(self) -> dict[str, Any]:
        """The ``quantization_config``."""
        found: dict[str, Any] = self.config["quantization_config"]
        return found

    def kept(self) -> list[str]:
        """The list of modules that stay in 16 bit, whatever the format calls it."""
        found: list[str] = self.quantization["ignore" if "ignore" in self.quantization else "exclude"]
        return found

    def save(self) -> Path:
        """Write it back."""
        from safetensors.torch import save_file

        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return self.folder


@pytest.fixture
def breakable(tmp_path: Path) -> Callable[[Path], Broken]:
    """A copy of a checkpoint to break."""
    return lambda original: Broken(original, tmp_path / "broken")
