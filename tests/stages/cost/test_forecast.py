"""What GPTQ and the sensitivities are expected to take, beside what they took."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.calibration.replica import replica
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.gptq.latents import LATENT_BYTES, latent_bytes
from quantmint.pipeline.quantize.gptq.weights import ModelWeights
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.recipe.load import load_recipe
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.runs.weights import forecast_weights, machine_of
from quantmint.pipeline.serving.planning.target import parse_target
from quantmint.pipeline.stages.cost import learned_weights
from quantmint.pipeline.stages.rates import known, rates_of
from quantmint.pipeline.stages.rounding_cost import expert_passes, learning_seconds

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


def tuned(samples: int = 1024, **parameters: object) -> Recipe:
    made = by_gptq().model_dump(mode="json")
    made["quantization"] |= {"algorithm": "tuned", "gptq": None, "tuned": parameters}
    made["calibration"] |= {"samples": samples, "sequence_length": 512}
    return Recipe.model_validate(made)


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
    in_fp8 = [{"modules": [r"re:model\.layers\.3\.mlp\..*"], "scheme": "ptpc_fp8"}]  # as the recipe was then
    predicted = seconds(changed(quantization={"from": ["mxfp4", "mxfp4_fp8", "ptpc_fp8"], "overrides": in_fp8}))
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


def test_learned_weights_take_time_disk_and_the_memory_of_where_they_lie() -> None:
    """7.0 billion weights of 9 bytes: 63 GB, on the GPU where half of its memory holds them with the model."""
    source, structure = imagine(CONFIGS / "Llama-3.1-8B-Instruct")
    latents = LATENT_BYTES * 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    for target in ("h100:1", "mi300x:1", "cpu"):
        machine, origin = machine_of(parse_target(target))
        where = replace(machine, memory=400 << 30), origin
        norms, weights = (
            forecast_weights(source, structure, tuned(weights=learned, steps=600), where) for learned in (False, True)
        )
        before, after = norms.stages["quantize"], weights.stages["quantize"]
        assert after.disk - before.disk == pytest.approx(latents / LATENT_BYTES * (2 + 2 * 8 + 4.25 / 8))
        assert after.seconds - before.seconds > 10 * latents * 8 / 9 / machine.rates.sync
        assert (after.memory > latents) is (target != "mi300x:1")
        assert (after.device_memory > latents) is (target == "mi300x:1")
        assert norms.cautions == weights.cautions == ()


def test_a_machine_without_room_for_learned_weights_and_few_samples_are_cautions() -> None:
    source, structure = imagine(CONFIGS / "Llama-3.1-8B-Instruct")
    machine, origin = machine_of(parse_target("h100:1"))
    small = replace(machine, memory=64 << 30), origin
    few, lack = forecast_weights(source, structure, tuned(255, weights=True), small).cautions
    assert "fits few texts by heart, and there are 255 samples" in few
    assert lack.startswith("to learn the rounding of weights takes 62.8 GB, and cpu has room for 58.4 GB: take ")
    assert forecast_weights(source, structure, tuned(256, weights=True), small).cautions == (lack,)


def test_latent_weights_in_host_memory_cross_the_link_each_step() -> None:
    def of(steps: int, *, on_host: bool) -> float:
        return learning_seconds({"mxfp4": 10**9}, steps, 0.0, known("h100"), on_host=on_host)

    assert of(100, on_host=False) - of(0, on_host=False) == pytest.approx(100 * 4 * 2e9 / 25e9)
    assert of(100, on_host=True) - of(100, on_host=False) == pytest.approx(100 * 24e9 / 9.5e9)


@pytest.mark.parametrize("name", ["lfm2_moe", "llama"])
@pytest.mark.parametrize(("scheme", "layout"), [("mxfp4", "quark"), ("w4a16", "compressed-tensors")])
def test_weights_to_learn_are_those_that_tuning_learns(zoo: Zoo, name: str, scheme: str, layout: str) -> None:
    source = open_checkpoint(zoo(name))
    structure = read_structure(source.folder, source.tensors)
    section = {"scheme": scheme, "format": layout, "algorithm": "tuned", "tuned": {"weights": True}}
    quantization = Quantization.model_validate(
        {**section, "overrides": [{"modules": ["re:.*q_proj"], "scheme": "ptpc_fp8"}]}
    )
    choice = select(structure, quantization)
    steps = [step for plan in plan_shards(source, structure, choice, layout) for step in plan.steps]
    takes = latent_bytes(ModelWeights(replica(source.folder, "cpu"), structure, steps).members)
    assert LATENT_BYTES * sum(learned_weights(structure, choice, quantization).values()) == takes > 0


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
