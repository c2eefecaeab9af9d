"""The tiny Llama in 16 bit, loaded once."""

from __future__ import annotations

from typing import Any

import pytest

from quantmint.pipeline.serving.reference.model import ReferenceModel, load


@pytest.fixture(scope="session")
def llama(models: Any) -> ReferenceModel:
    return load(models("llama"), "cpu")
