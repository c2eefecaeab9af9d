"""What was asked of a model once is known without it, as long as nothing that it follows from has changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model import reader as module
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.structure import Structure


class AskedError(Exception):
    """Somebody built the model."""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Structure]:
    """Read a structure with a cache of one's own; ``known`` where the model must not be built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build = module.meta_model

    def refuse(*_: Any, **__: Any) -> None:
        raise AskedError

    def read(folder: Path, *, known: bool = False, **trust: bool) -> Structure:
        monkeypatch.setattr(module, "meta_model", refuse if known else build)
        return read_structure(folder, open_checkpoint(folder).tensors, **trust)

    return read


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3", "phi3"])
def test_an_answer_is_kept_whole(models: Callable[..., Path], ask: Callable[..., Structure], name: str) -> None:
    folder = models(name)
    assert asdict(ask(folder)) == asdict(ask(folder, known=True))
    # Order is that of the tensors on disk, by which files are laid out.
    assert list(ask(folder).weights) == list(ask(folder, known=True).weights)


def test_another_configuration_is_another_question(
    models: Callable[..., Path], ask: Callable[..., Structure], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models("llama"), folder)
    ask(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    with pytest.raises(AskedError):
        ask(folder, known=True)


def test_models_with_code_of_their_own_are_always_asked(
    models: Callable[..., Path], ask: Callable[..., Structure]
) -> None:
    ask(models("llama"))
    with pytest.raises(AskedError):
        ask(models("llama"), known=True, trust_remote_code=True)


def test_a_cache_that_is_damaged_is_none(
    models: Callable[..., Path], ask: Callable[..., Structure], tmp_path: Path
) -> None:
    before = ask(models("llama"))
    (kept,) = (tmp_path / "cache" / "quantmint" / "structures").iterdir()
    kept.write_text(kept.read_text()[:100])
    assert ask(models("llama")) == before
    assert ask(models("llama"), known=True) == before
