"""What GPTQ and the sensitivities are expected to take, beside what they took."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.calibration.replica import replica
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.gptq.weights import ModelWeights
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.runs.weights import forecast_weights, machine_of
from quantmint.pipeline.serving.planning.target import parse_target
from quantmint.pipeline.stages.rates import known, rates_of
from quantmint.pipeline.stages.rounding_cost import expert_passes

Zoo = Callable[..., Path]
CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
TINY = Path(__file__).parents[3] / "recipes" / "tiny" / "model"


def by_gptq(**parameters: object) -> Recipe:
    quantization = {"scheme": "mxfp4", "algorithm": "gptq", "kv_cache": "auto", "format": "quark"}
    return Recipe.model_validate(
        {
            "name": "r",
            "source": {"repo": "a/b"},
            "quantization": {**quantization, "gptq": parameters},
            "calibration": {"set": "tiny", "samples": 128, "sequence_length": 2048},
        }
    )


def seconds(recipe: Recipe, target: str = "cpu") -> dict[str, float]:
    """Seconds by stage, of a recipe with its schemes still to be chosen, on a machine of the table."""
    source = open_checkpoint(TINY)
    made = recipe.model_dump(mode="json")
    made["quantization"] |= {"scheme": "mxfp4"}
    made["quantization"] = {name: value for name, value in made["quantization"].items() if name not in ("from", "bits")}
    chosen = Recipe.model_validate(made)
    where = machine_of(parse_target(target))
    stages = forecast_weights(source, read_structure(TINY, source.tensors), chosen, where, written=recipe).stages
    return {name: cost.seconds for name, cost in stages.items()}


def changed(**sections: dict[str, object]) -> Recipe:
    data = load_recipe("tiny-mxfp4-auto").recipe.model_dump(mode="json")
    for name, section in sections.items():
        data[name] |= section
    return Recipe.model_validate(data)


def test_the_embedded_model_takes_what_it_took() -> None:
    """27 s and 18 s on two cores of an AMD EPYC, 2026-11-26; the reference computes in float32."""
    predicted = seconds(changed())
    assert predicted["sensitivity"] == pytest.approx(27.2, rel=0.5)
    assert predicted["quantize"] == pytest.approx(17.6, rel=0.5)


@pytest.mark.parametrize(
    ("parameters", "least", "most"),
    [({}, 77.3, 96.3), ({"compensation": 0, "scaling": False}, 57.0, 57.0)],
    ids=["whole", "alone"],
)
def test_gptq_of_an_8b_shape_takes_what_was_measured(parameters: dict[str, object], least: float, most: float) -> None:
    """docs/notes/measurements.md, "In what time": 128 x 2048 tokens on one H100, less the start of the process."""
    recipe = by_gptq(**parameters)
    source, structure = imagine(CONFIGS / "Llama-3.1-8B-Instruct")
    stages = forecast_weights(source, structure, recipe, machine_of(parse_target("h100:1"))).stages
    assert least / 1.5 < stages["quantize"].seconds < most * 1.5


def test_gptq_runs_layers_again_for_their_experts(tmp_path: Path) -> None:
    """A second layer of R1's shape took 57.3 s on one H100: 184.6 s for two, 127.3 s for one (docs/benchmarks.md)."""
    config = json.loads((CONFIGS / "DeepSeek-R1-0528" / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 0, "first_k_dense_replace": 0, "quantization_config": None}
    took = []
    for layers in (1, 2):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        source, structure = imagine(tmp_path)
        stages = forecast_weights(source, structure, by_gptq(), machine_of(parse_target("h100:1"))).stages
        took.append(stages["quantize"].seconds)
    assert took[1] - took[0] == pytest.approx(57.3, rel=0.1)


@pytest.mark.parametrize("name", ["lfm2_moe", "gpt_oss", "ernie4_5_vl_moe", "step3p7", "llama"])
def test_a_pass_is_forecast_for_each_stack_of_experts_that_gptq_rounds(zoo: Zoo, name: str) -> None:
    """Where all experts of a stack fit. Step 3.7 has stacks of gate and up that no rule takes apart."""
    source = open_checkpoint(zoo(name))
    structure = read_structure(source.folder, source.tensors)
    unclaimed = tuple(f"re:{re.escape(tensor)}" for tensor in structure.unclaimed)
    choice = select(structure, Quantization(scheme="mxfp4", format="quark", algorithm="gptq", exclude=unclaimed))
    steps = [step for plan in plan_shards(source, structure, choice, "quark") for step in plan.steps]
    rounded = ModelWeights(replica(source.folder, "cpu"), structure, steps).experts
    stacks = {product.rpartition(".")[0] for product in rounded}
    shapes = {module: structure.linear[module] for module in choice.schemes}
    assert expert_passes(structure, shapes, 1 << 40, on_gpu=False) == len(stacks)
    assert bool(stacks) == (name != "llama")


@pytest.mark.parametrize("target", ["cpu", "mi300x:8"])
def test_more_to_compute_takes_longer(target: str) -> None:
    few = seconds(changed(), target)
    samples = seconds(changed(calibration={"samples": 320}), target)
    assert samples["quantize"] > few["quantize"]
    assert samples["sensitivity"] == few["sensitivity"], "of sixteen samples at most"
    schemes = seconds(changed(quantization={"from": ["mxfp4", "ptpc_fp8"]}), target)
    assert schemes["sensitivity"] < few["sensitivity"]
    rounded = seconds(changed(quantization={"algorithm": "none", "gptq": None}), target)
    assert rounded["quantize"] < few["quantize"]
    assert rounded["sensitivity"] < few["sensitivity"]


def test_a_data_sheet_scales_what_was_measured() -> None:
    rates, origin = rates_of("mi300x")
    assert origin == "data sheet"
    assert rates.flops / known("h100").flops == pytest.approx(1307.4 / 989.4)
    assert rates.kernels["fp8"] / known("h100").kernels["fp8"] == pytest.approx(5.3 / 3.35)
    assert rates.hash == known("h100").hash
    assert rates_of("h100") == (known("h100"), "table")
