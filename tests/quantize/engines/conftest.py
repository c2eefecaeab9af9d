"""Shards that look like a model's to the engine, written without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from quantmint.pipeline.quantize.engines.stream.engine import CheckpointPlan, write_checkpoint
from quantmint.pipeline.quantize.engines.stream.plan import plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    encode_header,
    open_checkpoint,
    tensor_bytes,
)
from quantmint.pipeline.quantize.formats.choice import Choice
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.structure import Structure

Shape = tuple[int, ...]
Shards = Mapping[str, Mapping[str, tuple[str, Shape]]]
Run = Callable[..., dict[str, bytes]]


@pytest.fixture
def write_model() -> Callable[[Path, Shards], Checkpoint]:
    """Write shards of random 16-bit numbers, in the order given, with an index where there are several."""

    def write(folder: Path, shards: Shards) -> Checkpoint:
        import torch

        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(3)
        weight_map = {}
        for shard, tensors in shards.items():
            with (folder / shard).open("wb") as stream:
                stream.write(encode_header((name, dtype, shape) for name, (dtype, shape) in tensors.items()))
                for name, (dtype, shape) in tensors.items():
                    count = tensor_bytes(dtype, shape)
                    numbers = torch.randn(-(-count // 2), generator=generator)
                    kind = torch.float16 if dtype == "F16" else torch.bfloat16
                    stream.write(bytes(numbers.to(kind).view(torch.uint8).numpy())[:count])
                    weight_map[name] = shard
        if len(shards) > 1:
            (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        return open_checkpoint(folder)

    return write


@pytest.fixture
def small(tmp_path: Path, write_model: Callable[[Path, Shards], Checkpoint]) -> Checkpoint:
    """Four layers, a file each: 131,072 bytes of 16-bit matrices and 256 of norm in every one."""
    return write_model(tmp_path / "source", layers(4, 128))


def _plain(modules: Iterable[str], attention: tuple[str, ...] = ()) -> Structure:
    weights = {module: WeightSource(f"{module}.weight") for module in modules}
    return Structure(dict.fromkeys(weights, (0, 0)), (), attention, 0, weights)


@pytest.fixture
def plain() -> Callable[..., Structure]:
    """``plain(modules, attention=())``: a structure whose weights are tensors of their own."""
    return _plain


def layers(count: int, width: int) -> Shards:
    return {
        f"model-{layer + 1:05}-of-{count:05}.safetensors": {
            f"model.layers.{layer}.input_layernorm.weight": ("BF16", (width,)),
            **{
                f"model.layers.{layer}.self_attn.{part}.weight": ("BF16", (width, width))
                for part in ("k_proj", "o_proj", "q_proj", "v_proj")
            },
        }
        for layer in range(count)
    }


@pytest.fixture
def run() -> Run:
    """Quantize every ``*_proj.weight`` of a model into a working folder; the bytes of every file of the result."""

    def run(
        source: Checkpoint,
        work: Path,
        *,
        checkpoint_format: str = "compressed-tensors",
        ranges: Mapping[str, float] | None = None,
        advance: Callable[[int], None] = lambda _: None,
        scheme: str = "ptpc_fp8",
        shared_scales: bool = False,
        devices: tuple[str, ...] = ("cpu",),
    ) -> dict[str, bytes]:
        modules = [name.removesuffix(".weight") for name in source.tensors if name.endswith("_proj.weight")]
        kv_cache = any("k_scale" in name or "output_scale" in name for name in ranges or {})
        choice = Choice(dict.fromkeys(modules, scheme), ("lm_head",), kv_cache)
        attention = ("model.layers.0.self_attn",) if kv_cache else ()
        plans = plan_shards(source, _plain(modules, attention), choice, checkpoint_format, shared_scales=shared_scales)
        written = write_checkpoint(
            CheckpointPlan(source, plans, choice, ranges or {}, checkpoint_format=checkpoint_format),
            work / "checkpoint",
            manifest=work / "manifest.jsonl",
            advance=advance,
            devices=devices,
        )
        made = {path.name: path.read_bytes() for path in sorted((work / "checkpoint").iterdir()) if path.is_file()}
        assert {shard.name: shard.size for shard in written.shards} == {plan.name: plan.nbytes for plan in plans}
        assert {plan.name: len(made[plan.name]) for plan in plans} == {plan.name: plan.nbytes for plan in plans}
        return made

    return run
