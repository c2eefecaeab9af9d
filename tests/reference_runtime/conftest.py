"""The tiny Llama in 16 bit, loaded once, and its words."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.reference.model import Loaded, load
from pipeline.reference.text import Text


@pytest.fixture(scope="session")
def llama(models: Any) -> Loaded:
    return load(models("llama"), "cpu")


@pytest.fixture(scope="session")
def text(models: Any, llama: Loaded) -> Text:
    return Text.of(models("llama"), llama.model.config)
