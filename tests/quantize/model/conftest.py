"""Structures of the tiny models, and a source in DeepSeek's FP8 blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import SINGLE_NAME, open_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.structure import Structure

StructureOf = Callable[[Path], Structure]


@pytest.fixture(scope="session")
def structure_of() -> StructureOf:
    """The structure of a folder."""
    return lambda folder: read_structure(folder, open_checkpoint(folder).tensors)


@pytest.fixture
def rewritten(tmp_path: Path) -> Callable[..., Path]:
    """``rewritten(folder, change)``: a copy in one file, whose tensors (a dictionary) ``change`` has edited."""
    from safetensors.torch import load_file, save_file

    def rewrite(folder: Path, change: Callable[..., None], **config: object) -> Path:
        tensors = load_file(folder / SINGLE_NAME)
        change(tensors)
        target = tmp_path / "rewritten"
        target.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / SINGLE_NAME)
        original = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (target / "config.json").write_text(json.dumps(original | config), encoding="utf-8")
        return target

    return rewrite
