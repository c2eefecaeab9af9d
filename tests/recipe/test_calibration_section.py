"""Valid and invalid values of the section `calibration`, and of the granularity of cache scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.calibration.observers import Observation
from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.stages.checks import check

Load = Callable[[str], LoadedRecipe]
CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
HEAD = "name: r\nsource: {repo: org/model}\n"
DATA = "calibration: {set: ultrachat}\n"


def observation(load: Load, fields: str) -> Observation:
    section = load(f"{HEAD}quantization: {{scheme: fp8}}\ncalibration: {{set: ultrachat{fields}}}\n").recipe.calibration
    assert section is not None
    return section.observation


def test_the_cache_follows_the_inputs_unless_it_has_its_own(load: Load) -> None:
    assert observation(load, ", observer: mse").cache == "mse"
    both = observation(load, ", observer: mse, kv_observer: percentile, percentile: 99.5, kv_floor: 0.5")
    assert (both.inputs, both.cache, both.percentile, both.kv_floor) == ("mse", "percentile", 99.5, 0.5)


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("observer: minmax", 'observer: found "minmax", expected one of amax, percentile, mse'),
        ("percentile: 101.0", "percentile: found 101.0, expected a number above 0, up to 100"),
        ("kv_floor: 0.0", "kv_floor: found 0.0, expected a number above 0"),
        ("experts: some", 'experts: found "some", expected one of all, routed'),
        ("min_expert_tokens: 0", "min_expert_tokens: found 0, expected a whole number of at least 1"),
        ("mode: layers", 'mode: found "layers", expected one of auto, resident, layer (did you mean "layer"?)'),
    ],
)
def test_wrong_values(load: Load, field: str, found: str) -> None:
    with pytest.raises(RecipeError) as error:
        observation(load, f", {field}")
    assert found in str(error.value)


def faults(load: Load, quantization: str, model: str | None = None) -> list[str]:
    config = None if model is None else json.loads((CONFIGS / model / "config.json").read_text())
    loaded = load(f"{HEAD}quantization: {{{quantization}}}\n{DATA}")
    return [str(fault) for fault in check(loaded, config=config) if "kv_cache" in str(fault)]


def test_scales_by_head(load: Load) -> None:
    fine = "scheme: ptpc_fp8, kv_cache: fp8, kv_cache_granularity: head"
    assert faults(load, fine) == []
    without_cache = "scheme: ptpc_fp8, kv_cache_granularity: head"
    for wrong in (f"{fine}, format: quark", without_cache, f"{fine}, engine: llmcompressor"):
        (fault,) = faults(load, wrong)
        assert "kv_cache_granularity: found head, expected tensor, or kv_cache fp8 in format" in fault


def test_a_latent_cache_in_fp8_is_for_our_engine_and_for_vllm(load: Load) -> None:
    assert faults(load, "scheme: ptpc_fp8, kv_cache: fp8", "DeepSeek-R1-0528") == []
    (fault,) = faults(load, "scheme: ptpc_fp8, kv_cache: fp8, engine: llmcompressor", "DeepSeek-R1-0528")
    assert "found fp8 for latent attention (kv_lora_rank 512) with engine llmcompressor, expected auto" in fault
    (fault,) = faults(load, "scheme: ptpc_fp8, kv_cache: fp8, kv_cache_granularity: head", "DeepSeek-R1-0528")
    assert "found head for latent attention (kv_lora_rank 512), expected tensor" in fault
    assert faults(load, "scheme: ptpc_fp8", "DeepSeek-R1-0528") == []
    assert faults(load, "scheme: ptpc_fp8, kv_cache: fp8", "Qwen3-30B-A3B") == []
