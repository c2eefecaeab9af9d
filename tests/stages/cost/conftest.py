"""Volumes of published models, counted from their configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.calibration import Calibration
from quantmint.pipeline.stages.cost import CalibrateVolume, QuantizeVolume, calibrate_volume, quantize_volume

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
MODELS = {
    "8b": "Llama-3.1-8B-Instruct",
    "70b": "Llama-3.1-70B-Instruct",
    "405b": "Llama-3.1-405B-Instruct",
    "mixtral": "Mixtral-8x7B-Instruct-v0.1",
}


@cache
def _imagined(name: str) -> tuple[Checkpoint, Structure]:
    return imagine(CONFIGS / MODELS[name])


@pytest.fixture(scope="session")
def imagined() -> Callable[[str], tuple[Checkpoint, Structure]]:
    return _imagined


@pytest.fixture(scope="session")
def quantized() -> Callable[[str, str], QuantizeVolume]:
    @cache
    def count(name: str, scheme: str) -> QuantizeVolume:
        source, structure = _imagined(name)
        choice = Choice(dict.fromkeys(structure.linear, scheme), structure.kept, False)
        return quantize_volume(plan_shards(source, structure, choice, "compressed-tensors"))

    return count


@pytest.fixture(scope="session")
def calibrated() -> Callable[..., CalibrateVolume]:
    def count(name: str, **options: Any) -> CalibrateVolume:
        return calibrate_volume(*_imagined(name), Calibration(set="tiny", **options))

    return count
