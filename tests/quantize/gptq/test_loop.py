"""A checkpoint whose layers calibration rounds: read back, held against what was said of it, gone on with."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration import layers
from quantmint.calibration.errors import CalibrationError
from quantmint.pipeline.base.schemes import MxScales
from quantmint.pipeline.quantize.engines.algorithms import recorded_algorithms
from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan, plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, Reader, open_checkpoint
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.gptq import loop
from quantmint.pipeline.quantize.gptq.loop import quantize_layers
from quantmint.pipeline.quantize.gptq.request import GptqRequest, GptqResult, GptqSettings
from quantmint.pipeline.quantize.gptq.runner import GptqRunner
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.quantize.schemes.registry import dequantize
from quantmint.pipeline.recipe.quantization import Quantization

SETTINGS = GptqSettings(compensation=0.5)
Models = Callable[..., Path]


def write_plans(
    made: Any, plans: tuple[ShardPlan, ...], ranges: Mapping[str, torch.Tensor], algorithms: tuple[str, ...], name: str
) -> Checkpoint:
    """Write a checkpoint as the stage does, in the folder ``name`` of what was made."""
    checkpoint_plan = CheckpointPlan(
        made.source, plans, made.choice, ranges, checkpoint_format=made.layout, algorithms=algorithms
    )
    write_checkpoint(checkpoint_plan, made.work / name, manifest=made.work / f"{name}.jsonl")
    return open_checkpoint(made.work / name)


def write_scaled(made: Any, result: GptqResult) -> Checkpoint:
    """Write the checkpoint of a result whose norms are others, and whose ranges may be."""
    return write_plans(made, result.plans, {**made.ranges, **result.ranges}, ("awq", "gptq"), "out")


class Made:
    """A model with its plans, and what is made of it in a folder."""

    def __init__(self, folder: Path, scheme: Any, layout: Any, work: Path) -> None:
        self.source: Checkpoint = open_checkpoint(folder)
        self.structure: Structure = read_structure(folder, self.source.tensors)
        self.choice: Choice = select(self.structure, Quantization(scheme=scheme, format=layout))
        self.layout, self.work = layout, work
        self.plans: tuple[ShardPlan, ...] = plan_shards(
            self.source, self.structure, self.choice, layout, shared_scales=True
        )
        static = {f"{name}.input_scale": torch.tensor([9.0]) for name in self.choice.schemes}
        self.ranges: Mapping[str, torch.Tensor] = static if scheme in ("fp8", "mxfp4_fp8") else {}

    def rounded(
        self,
        blocks: torch.Tensor,
        devices: int = 1,
        batch: int = 8,
        settings: GptqSettings = SETTINGS,
        mx_scales: MxScales = "even",
        **more: Any,
    ) -> GptqResult:
        request = GptqRequest(
            self.plans,
            self.structure,
            self.choice,
            self.source.folder,
            list(torch.split(blocks, batch)),
            self.ranges,
            ["cpu"] * devices,
            self.work / "rounding",
            settings,
            mx_scales=mx_scales,
        )
        return quantize_layers(request, **more)

    def written(self, plans: tuple[ShardPlan, ...], algorithm: str = "gptq") -> Checkpoint:
        return write_plans(self, plans, self.ranges, () if algorithm == "none" else (algorithm,), algorithm)


CASES = [
    ("mxfp4", "compressed-tensors"),
    ("mxfp4", "quark"),
    ("mxfp4_weight_only", "compressed-tensors"),
    ("mxfp4_fp8", "quark"),
    ("ptpc_fp8", "compressed-tensors"),
    ("fp8", "quark"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "layout"), CASES)
def test_a_checkpoint_holds_what_was_made_of_its_layers(
    models: Models, blocks: torch.Tensor, tmp_path: Path, scheme: str, layout: str
) -> None:
    made = Made(models("llama"), scheme, layout, tmp_path)
    rounded = made.rounded(blocks)
    assert rounded.untouched == ()
    assert rounded.gains.keys() == made.choice.schemes.keys()
    assert all(gain.fault is None and gain.tokens == blocks.numel() for gain in rounded.gains.values())
    assert sum(gain.after for gain in rounded.gains.values()) < 0.8 * sum(
        gain.before for gain in rounded.gains.values()
    )
    checkpoint, nearest = made.written(rounded.plans), made.written(made.plans, "none")
    assert recorded_algorithms(checkpoint) == ("gptq",)
    assert recorded_algorithms(nearest) == ()
    assert checkpoint.nbytes == nearest.nbytes
    inspection = inspect_checkpoint(checkpoint, made.structure, source=made.source)
    assert inspection.passed, inspection.summary()
    # The last thing that a layer computes with is what the server will read.
    for step in (step for plan in rounded.plans for step in plan.steps if step.made is not None):
        stored = {out.role: Reader(checkpoint)(out.name) for out in step.outputs if out.role != "input_scale"}
        other = {out.role: Reader(nearest)(out.name) for out in step.outputs if out.role != "input_scale"}
        assert not torch.equal(dequantize(scheme, stored), dequantize(scheme, other))


def test_a_layer_s_original_weights_count_once(
    models: Models, blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[Any] = []

    def measure(need: Any, *_: Any) -> bool:
        needs.append(need)
        raise CalibrationError("measured")

    monkeypatch.setattr(loop, "require_rounding_room", measure)
    made = Made(models("llama"), "mxfp4", "quark", tmp_path)
    for compensation in (0.0, 0.5):
        with pytest.raises(CalibrationError, match="measured"):
            made.rounded(blocks, settings=GptqSettings(compensation=compensation))
    alone, compared = needs
    assert compared.forward - alone.forward == alone.layer > 0


def test_no_tensor_waits_for_the_garbage_collector(models: Models, blocks: torch.Tensor, tmp_path: Path) -> None:
    """It counts objects and not their bytes: on a GPU with 24 GB ten of them waited, and 8B did not fit."""
    waiting: list[Any] = []

    def advance(_: int) -> None:
        gc.collect()
        waiting.extend(left for left in gc.garbage if isinstance(left, torch.Tensor) and left.ndim > 1)
        gc.garbage.clear()

    made = Made(models("llama"), "mxfp4", "quark", tmp_path)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        made.rounded(blocks, bar=lambda *_: nullcontext(advance))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [tuple(tensor.shape) for tensor in waiting]


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp4_weight_only"])
def test_inputs_are_rounded_as_the_target_rounds_them(
    models: Models, blocks: torch.Tensor, tmp_path: Path, scheme: str
) -> None:
    """Weights make up for what rounded inputs lose, so another rounding of them leads to other weights."""

    def weights(mx_scales: MxScales) -> dict[str, torch.Tensor]:
        made = Made(models("llama"), scheme, "compressed-tensors", tmp_path / mx_scales)
        plans = made.rounded(blocks[:2], mx_scales=mx_scales).plans
        steps = [step for plan in plans for step in plan.steps if step.made is not None]
        read = Reader(made.written(plans))
        return {out.name: read(out.name) for step in steps for out in step.outputs}

    even, up = weights("even"), weights("up")
    assert even.keys() == up.keys()
    same = [torch.equal(even[name], up[name]) for name in even]
    assert all(same) if scheme == "mxfp4_weight_only" else not all(same)


@pytest.mark.parametrize(
    ("scheme", "layout", "devices"), [("ptpc_fp8", "compressed-tensors", 1), ("mxfp4", "quark", 2)]
)
def test_experts_are_rounded_for_the_tokens_that_reach_them(
    models: Models, blocks: torch.Tensor, tmp_path: Path, scheme: str, layout: str, devices: int
) -> None:
    made = Made(models("mixtral"), scheme, layout, tmp_path)
    rounded = made.rounded(blocks, devices)
    experts = {name: gain for name, gain in rounded.gains.items() if ".experts." in name}
    assert experts
    assert all(".experts." in name for name in rounded.untouched), "that no token reached"
    assert rounded.gains.keys() == made.choice.schemes.keys() - set(rounded.untouched)
    assert sum(gain.after for gain in experts.values()) < 0.9 * sum(gain.before for gain in experts.values())
    assert sum(gain.tokens for gain in experts.values()) < len(experts) * blocks.numel()
    checkpoint = made.written(rounded.plans)
    nearest = made.written(made.plans, "none")
    assert inspect_checkpoint(checkpoint, made.structure, source=made.source).passed
    step = next(step for plan in rounded.plans for step in plan.steps if step.name in experts)
    out = step.outputs[0].name
    assert not torch.equal(Reader(checkpoint)(out).view(torch.uint8), Reader(nearest)(out).view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_however_many_devices_make_the_same_bytes(
    models: Models,
    blocks: torch.Tensor,
    tmp_path: Path,
    name: str,
    devices: int,
) -> None:
    settings = replace(SETTINGS, scaling=name == "llama")
    alone, shared = (Made(models(name), "mxfp4", "quark", tmp_path / each) for each in ("alone", "shared"))
    expected = alone.written(alone.rounded(blocks, batch=2, settings=settings).plans)
    checkpoint = shared.written(shared.rounded(blocks, devices, batch=2, settings=settings).plans)
    for shard in expected.shards:
        assert (checkpoint.folder / shard).read_bytes() == (expected.folder / shard).read_bytes()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_killed_run_makes_the_same_bytes(
    models: Models, blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = Made(models(name), "mxfp4", "quark", tmp_path / "whole")
    expected = whole.written(whole.rounded(blocks).plans)
    made = Made(models(name), "mxfp4", "quark", tmp_path / "killed")
    seen: list[int] = []
    collect = GptqRunner.collect

    def stops(runner: GptqRunner, step: Any) -> Any:
        seen.append(step.layer)
        if len(seen) == 6:  # in the second layer's second step
            raise KeyboardInterrupt
        return collect(runner, step)

    monkeypatch.setattr(GptqRunner, "collect", stops)
    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        made.rounded(blocks)
    done = next((tmp_path / "killed" / "rounding" / "made").glob("*.safetensors"))
    stale = done.with_suffix(".0123abcd.partial")  # as a kill leaves it while a file is written
    stale.write_bytes(b"half a layer")
    checkpoint = made.written(made.rounded(blocks).plans)
    assert not stale.exists()
    assert seen[:7] == [0, 0, 0, 0, 1, 1, 1]
    for shard in expected.shards:
        assert (checkpoint.folder / shard).read_bytes() == (expected.folder / shard).read_bytes()


_STREAMS = ("altup_projections.0", "altup_unembed_projections.0")
HYBRIDS = {
    "bamba": (),
    "falcon_h1": (),
    # Those outside of the layers are left.
    "gemma3n_text": tuple(f"model.{name}" for name in (*_STREAMS, "per_layer_model_projection")),
    "gemma4_text": ("model.per_layer_model_projection",),
    "glm_moe_dsa": (),
    "kimi_linear": (),
    "lfm2": (),
    "minimax": (),
    "nemotron_h": (),
    "qwen3_next": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_several_kinds_are_rounded(
    zoo: Callable[[str], Path], blocks: torch.Tensor, tmp_path: Path, name: str
) -> None:
    made = Made(zoo(name), "ptpc_fp8", "compressed-tensors", tmp_path)
    rounded = made.rounded(blocks)
    assert rounded.untouched == HYBRIDS[name]
    assert rounded.gains.keys() == made.choice.schemes.keys() - set(rounded.untouched)
    assert all(gain.fault is None for gain in rounded.gains.values())
    assert sum(gain.after for gain in rounded.gains.values()) < 0.9 * sum(
        gain.before for gain in rounded.gains.values()
    )
    inspection = inspect_checkpoint(made.written(rounded.plans), made.structure, source=made.source)
    assert inspection.passed, inspection.summary()


@pytest.mark.parametrize(("name", "reason"), [("zamba2", "its layers share weights"), ("mllama", "it skips layer 1")])
def test_layers_that_cannot_be_walked_are_refused_before_any_work(
    zoo: Callable[[str], Path], blocks: torch.Tensor, tmp_path: Path, name: str, reason: str
) -> None:
    made = Made(zoo(name), "ptpc_fp8", "compressed-tensors", tmp_path)
    with pytest.raises(CalibrationError, match=f"{name}: its layers cannot be run one at a time: {reason}"):
        made.rounded(blocks)


@pytest.mark.slow
def test_a_run_that_carries_keys_and_values_on_is_gone_on_with(
    zoo: Callable[[str], Path], blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo("gemma3n_text")
    whole = Made(folder, "ptpc_fp8", "quark", tmp_path / "whole")
    expected = whole.written(whole.rounded(blocks).plans)
    made = Made(folder, "ptpc_fp8", "quark", tmp_path / "killed")
    collect = GptqRunner.collect

    def stops(runner: GptqRunner, step: Any) -> Any:
        if step.layer == 3:  # which uses what the second layer has made
            raise KeyboardInterrupt
        return collect(runner, step)

    monkeypatch.setattr(layers, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(GptqRunner, "collect", stops)
    with pytest.raises(KeyboardInterrupt):
        made.rounded(blocks)
    monkeypatch.setattr(GptqRunner, "collect", collect)
    checkpoint = made.written(made.rounded(blocks).plans)
    for shard in expected.shards:
        assert (checkpoint.folder / shard).read_bytes() == (expected.folder / shard).read_bytes()


def test_a_bar_counts_the_samples_of_each_layer(models: Models, blocks: torch.Tensor, tmp_path: Path) -> None:
    made, advances, totals = Made(models("llama"), "mxfp4", "quark", tmp_path), list[int](), list[int]()

    def bar(total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        totals.append(total)
        return nullcontext(advances.append)

    made.rounded(blocks, bar=bar)
    assert totals == [2 * len(blocks)]
    assert sum(advances) == totals[0]
