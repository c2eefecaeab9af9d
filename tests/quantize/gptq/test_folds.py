"""Models whose channels are scaled before they are rounded: what they compute stays, and what is stored says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration import layers
from quantmint.calibration.replica import replica
from quantmint.pipeline.quantize.engines.algorithms import recorded_algorithms
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.formats.checkpoint import Reader as Tensors
from quantmint.pipeline.quantize.gptq.folds import study
from quantmint.pipeline.quantize.gptq.loop import quantize_layers
from quantmint.pipeline.quantize.gptq.request import GptqRequest, GptqResult, GptqSettings
from quantmint.pipeline.quantize.gptq.runner import InputSample
from quantmint.pipeline.quantize.gptq.scaling import ChannelReader, ChannelScaling, best_factors
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.serving.reference.model import load
from tests.quantize.gptq.test_loop import write_scaled

Models = Callable[..., Path]
SCALED = GptqSettings(compensation=0.5, scaling=True)


class Scaled:
    """A model, scaled and rounded in a working folder."""

    def __init__(self, folder: Path, scheme: Any, layout: Any, work: Path) -> None:
        self.source: Checkpoint = open_checkpoint(folder)
        self.structure = read_structure(folder, self.source.tensors)
        self.choice = select(self.structure, Quantization(scheme=scheme, format=layout))
        self.layout, self.work = layout, work
        self.plans = plan_shards(self.source, self.structure, self.choice, layout, shared_scales=True)
        # None is right; those of what comes out of the attention, which nothing scales, are wide enough.
        sizes = {name: 20.0 if name.endswith("o_proj") else 1e-3 for name in self.choice.schemes}
        static = {f"{name}.input_scale": torch.tensor([size]) for name, size in sizes.items()}
        self.ranges = static if scheme in ("fp8", "mxfp4_fp8") else {}

    def rounded(self, blocks: torch.Tensor, devices: int = 1) -> GptqResult:
        request = GptqRequest(
            self.plans,
            self.structure,
            self.choice,
            self.source.folder,
            list(torch.split(blocks, 8)),
            self.ranges,
            ["cpu"] * devices,
            self.work / "rounding",
            SCALED,
        )
        return quantize_layers(request)


def logits(folder: Path, blocks: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = load(folder, "cpu").model(blocks[:4, :32]).logits
        return found


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).median())


# Norms that enter linear modules, routers and stacks of experts; biases; norms between the halves of a projection;
# norms that multiply by one plus their weight, and others that nothing reads; experts of which a router scales the
# input, so that what enters them is not what their norm has put out.
@pytest.mark.parametrize(
    ("name", "expected", "left"),
    [
        ("llama", ["input", "post_attention", "up_proj"], 0),
        ("qwen2", ["input", "post_attention", "up_proj"], 0),
        ("gemma3-text", ["input", "pre_feedforward", "up_proj"], 0),
        ("qwen2-moe", ["input", "post_attention", "up_proj"], 0),
        ("deepseek-v3", ["input", "q_a", "kv_a", "post_attention", "up_proj"], 0),
        ("phi3", ["input", "post_attention"], 0),
        ("llama4-text", ["input", "up_proj"], 1),
    ],
)
def test_a_layer_is_scaled_where_it_computes_the_same(
    models: Models, blocks: torch.Tensor, name: str, expected: list[str], left: int
) -> None:
    one = replica(models(name), "cpu")
    layers = one.walkable.layers
    folds, faults = study(one, blocks)
    assert len(faults) == left
    found = [fold.weight.removesuffix(".weight").rpartition(".")[2] for fold in folds[layers[-1]]]
    assert [each.removesuffix("_layernorm").removesuffix("layernorm") for each in found] == expected
    assert all(parameter.is_meta for parameter in one.model.get_submodule(layers[-1]).parameters())


@pytest.mark.parametrize("length", [3, 31])
def test_a_short_text_shows_the_same_folds(models: Models, blocks: torch.Tensor, length: int) -> None:
    short, long = (study(replica(models("llama"), "cpu"), tokens) for tokens in (blocks[:1, :length], blocks))
    assert short == long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "layout"),
    [
        ("llama", "ptpc_fp8", "compressed-tensors"),
        ("qwen3", "fp8", "quark"),
        ("qwen2", "ptpc_fp8", "quark"),
        ("mixtral", "ptpc_fp8", "compressed-tensors"),
        ("gemma3-text", "ptpc_fp8", "quark"),
    ],
)
def test_a_scaled_model_is_stored_as_what_it_computes(
    models: Models, blocks: torch.Tensor, tmp_path: Path, name: str, scheme: str, layout: str
) -> None:
    scaled = Scaled(models(name, dtype="float32"), scheme, layout, tmp_path)
    rounded = scaled.rounded(blocks)
    assert all(".experts." in left for left in rounded.untouched)
    # What comes out of the attention is as it was.
    changed = {name for name in scaled.ranges if ".o_proj." not in name}
    assert rounded.ranges.keys() == changed
    assert all(float(largest) > 1e-2 for largest in rounded.ranges.values())
    checkpoint = write_scaled(scaled, rounded)
    assert recorded_algorithms(checkpoint) == ("awq", "gptq")
    before, after = Tensors(scaled.source), Tensors(checkpoint)
    norms = [name for name in checkpoint.tensors if name.endswith("input_layernorm.weight")]
    assert not all(torch.equal(before(norm), after(norm)) for norm in norms)
    inspection = inspect_checkpoint(checkpoint, scaled.structure, source=scaled.source)
    assert inspection.passed, inspection.summary()
    assert distance(logits(checkpoint.folder, blocks), logits(scaled.source.folder, blocks)) < 0.15


def test_factors_are_those_with_which_the_product_of_what_is_rounded_loses_the_least() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(64, 8, generator=generator), torch.randn(4, 8, generator=generator)
    rows[:, 3] *= 100
    seen = InputSample(rows, rows.abs().amax(dim=0))

    def coarse(numbers: torch.Tensor) -> torch.Tensor:
        step = numbers.abs().amax() / 7
        return (numbers / step).round() * step

    inputs = best_factors(seen, [ChannelReader(weight, lambda found, _: coarse(found), lambda found: found)])
    assert inputs[3] / inputs[0] > 10
    neither = best_factors(seen, [ChannelReader(weight, lambda found, _: found, lambda found: found)])
    assert torch.equal(neither, torch.ones(8)) or float((neither - 1).abs().max()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_run_that_scales_makes_the_same_bytes(
    models: Models, blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    whole = Scaled(models("qwen3"), "mxfp4_fp8", "quark", tmp_path / "whole")
    expected = write_scaled(whole, whole.rounded(blocks, devices))
    killed = Scaled(models("qwen3"), "mxfp4_fp8", "quark", tmp_path / "killed")
    seen: list[str] = []
    scale = ChannelScaling.scale

    def stops(scaling: ChannelScaling, layer: str, samples: Any) -> None:
        seen.append(layer)
        if len(seen) == 2:
            raise KeyboardInterrupt
        scale(scaling, layer, samples)

    monkeypatch.setattr(ChannelScaling, "scale", stops)
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        killed.rounded(blocks, devices)
    checkpoint = write_scaled(killed, killed.rounded(blocks, devices))
    assert seen == ["model.layers.0", "model.layers.1", "model.layers.1"]
    for name in ("config.json", *expected.shards):
        assert (checkpoint.folder / name).read_bytes() == (expected.folder / name).read_bytes()
