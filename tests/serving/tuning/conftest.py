"""A model for the stand-in of vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def surface(tmp_path: Path) -> Callable[..., Path]:
    """Say how the stand-in's figures follow from its knobs; returns the folder of the sweep."""

    def make(**rules: Any) -> Path:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text('{"vocab_size": 64}')
        (tmp_path / "model" / "surface.json").write_text(json.dumps(rules))
        return tmp_path

    return make
