"""Models that are changed before they are rounded: what they compute stays, and what is stored says it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.base.errors import StageError
from pipeline.quantize.engines.algorithms import recorded_algorithms
from pipeline.quantize.engines.stream import layerwise
from pipeline.quantize.engines.stream.engine import write_checkpoint
from pipeline.quantize.engines.stream.layerwise import Rounded, folds_of, round_layers
from pipeline.quantize.engines.stream.plan import plan_shards
from pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from pipeline.quantize.formats.layout import Choice
from pipeline.quantize.inspection.inspect import inspect_checkpoint
from pipeline.quantize.model.structure import read_structure, select
from pipeline.recipe.schema import Quantization
from pipeline.serving.reference.model import load

Models = Callable[..., Path]
ALL = {
    "dampening": 0.01,
    "activation_order": True,
    "compensation": 0.5,
    "rotation": True,
    "scaling": True,
    "permutation": True,
}


class Folded:
    """A model, changed and rounded in a working folder."""

    def __init__(self, folder: Path, scheme: Any, layout: Any, work: Path, parameters: dict[str, Any] = ALL) -> None:
        self.source: Checkpoint = open_checkpoint(folder)
        self.structure = read_structure(folder, self.source.tensors)
        self.choice = Choice({}, tuple(self.structure.linear), kv_cache=False)
        if scheme is not None:
            self.choice = select(self.structure, Quantization(scheme=scheme, format=layout))
        self.parameters, self.layout, self.work = parameters, layout, work
        own_head = bool(parameters.get("rotation"))
        self.plans = plan_shards(
            self.source, self.structure, self.choice, layout, shared_scales=True, own_head=own_head
        )
        static = {f"{name}.input_scale": torch.tensor([1e-3]) for name in self.choice.schemes}
        self.ranges = static if scheme in ("fp8", "mxfp4_fp8") else {}

    def rounded(self, blocks: torch.Tensor, **more: Any) -> Rounded:
        return round_layers(
            self.plans,
            self.structure,
            self.choice,
            self.source.folder,
            list(torch.split(blocks, 8)),
            self.ranges,
            device="cpu",
            work=self.work / "rounding",
            parameters=self.parameters,
            **more,
        )

    def written(self, rounded: Rounded) -> Checkpoint:
        write_checkpoint(
            self.source,
            rounded.plans,
            self.choice,
            {**self.ranges, **rounded.ranges},
            self.work / "out",
            checkpoint_format=self.layout,
            manifest=self.work / "manifest.jsonl",
            algorithms=(*folds_of(self.parameters), "gptq"),
        )
        return open_checkpoint(self.work / "out")

    def unquantized(self, rounded: Rounded) -> Path:
        """The folder of a model of which nothing is rounded."""
        found = {}
        for step in (step for plan in rounded.plans for step in plan.steps):
            file = step.made or self.source.folder / step.origin.place.shard
            with safe_open(file, "pt") as stored:
                found[step.name] = stored.get_tensor(f"{step.name}.copy" if step.made else step.name)
        folder = self.work / "unquantized"
        shutil.copytree(self.source.folder, folder)
        save_file(found, folder / "model.safetensors", {"format": "pt"})
        config = {**self.source.config, "tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


def logits(folder: Path, blocks: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = load(folder, "cpu").model(blocks[:4, :32]).logits
        return found


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).median())


# Grouped attention; one tensor for embedding and head; biases; latent attention; experts beside a shared one.
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "deepseek-v3", "qwen2-moe"])
def test_a_turned_model_computes_what_it_did(models: Models, blocks: torch.Tensor, tmp_path: Path, name: str) -> None:
    folded = Folded(models(name, dtype="float32"), None, "quark", tmp_path)
    rounded = folded.rounded(blocks)
    made = [step for plan in rounded.plans for step in plan.steps if step.made is not None]
    assert len(made) > 0.7 * sum(len(plan.steps) for plan in rounded.plans)
    before, after = folded.source.folder, folded.unquantized(rounded)
    assert distance(logits(after, blocks), logits(before, blocks)) < 1e-4
    norms = {name: part for name, part in load_file(after / "model.safetensors").items() if "input_layernorm" in name}
    assert all(bool((part == 1).all()) for part in norms.values())


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
    # Gemma's norms behind its projections let nobody turn it.
    parameters = {**ALL, "rotation": name != "gemma3-text"}
    folded = Folded(models(name, dtype="float32"), scheme, layout, tmp_path, parameters)
    rounded = folded.rounded(blocks)
    assert all(".experts." in left for left in rounded.left)
    assert rounded.ranges.keys() == folded.ranges.keys()
    assert all(float(largest) > 1e-2 for largest in rounded.ranges.values())
    checkpoint = folded.written(rounded)
    assert recorded_algorithms(checkpoint) == (*folds_of(parameters), "gptq")
    assert checkpoint.nbytes == sum(plan.nbytes - len(plan.header) for plan in folded.plans)
    inspection = inspect_checkpoint(
        checkpoint, folded.structure, source=folded.source, expected_bytes=checkpoint.nbytes
    )
    assert inspection.passed, inspection.summary()
    assert distance(logits(checkpoint.folder, blocks), logits(folded.source.folder, blocks)) < 0.15


@pytest.mark.parametrize(
    ("name", "why"), [("gemma3-text", "post_attention_layernorm"), ("llama4", "multi_modal_projector")]
)
def test_a_model_that_cannot_be_turned_is_refused_by_name(
    models: Models, blocks: torch.Tensor, tmp_path: Path, name: str, why: str
) -> None:
    with pytest.raises(StageError, match=f"rotation: .*{why}"):
        Folded(models(name), "mxfp4", "quark", tmp_path).rounded(blocks)


def test_values_whose_cache_has_measured_ranges_are_left(models: Models, blocks: torch.Tensor, tmp_path: Path) -> None:
    folded = Folded(models("llama"), "mxfp4", "quark", tmp_path)
    folded.choice = Choice(folded.choice.schemes, folded.choice.kept, kv_cache=True)
    assert folded.rounded(blocks).unchanged == tuple(f"model.layers.{n}.self_attn.v_proj" for n in range(2))


def test_a_killed_run_that_changes_its_model_makes_the_same_bytes(
    models: Models, blocks: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Folded(models("qwen3"), "mxfp4_fp8", "quark", tmp_path / "whole")
    expected = whole.written(whole.rounded(blocks))
    killed = Folded(models("qwen3"), "mxfp4_fp8", "quark", tmp_path / "killed")
    seen: list[int] = []
    fold = layerwise._Layers.fold

    def stops(layers: Any, number: int, look: Any) -> None:
        seen.append(number)
        if len(seen) == 2:
            raise KeyboardInterrupt
        fold(layers, number, look)

    monkeypatch.setattr(layerwise._Layers, "fold", stops)
    with pytest.raises(KeyboardInterrupt):
        killed.rounded(blocks, commit_seconds=0)
    checkpoint = killed.written(killed.rounded(blocks, commit_seconds=0))
    assert seen == [0, 1, 1]
    for name in ("config.json", *expected.shards):
        assert (checkpoint.folder / name).read_bytes() == (expected.folder / name).read_bytes()
