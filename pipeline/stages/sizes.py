"""Sizes of a model and of the checkpoint that a recipe makes of it, from tensor headers alone.

model = model_for(setting, folder)
predict(*model, setting.recipe, planned_shards(*model, setting.recipe)).checkpoint   bytes, exact for our own engine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from quantmint.pipeline.quantize.engines.libraries.job import checkpoint_bytes
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan, plan_shards
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import kept_because, select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.stages.cost import routed_share, temporary_bytes
from quantmint.pipeline.stages.setting import Setting


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted sizes of a checkpoint, in bytes unless stated otherwise.

    ``temporary`` are files of GPTQ beside it on the disk, until it is written.
    ``parameters``, ``quantized`` and ``kept`` are counts, the last two of linear modules; ``calibration_device`` is the
    size of a resident model, ``largest_tensor`` bounds the engine's memory, a few of which it holds;
    ``weights_per_gpu`` is the candidate's. ``kept_because`` and ``copied`` count, by reason, modules that stay in 16
    bit and tensors that are copied. ``kv_bytes_per_token`` is for all layers over all GPUs, None for an architecture
    whose cache is not plain K and V. ``active`` counts the parameters that a token passes through, with only its routed
    experts.
    """

    parameters: int
    source: int
    checkpoint: int
    temporary: int
    quantized: int
    kept: int
    largest_tensor: int
    calibration_device: int
    weights_per_gpu: int
    kv_bytes_per_token: int | None
    kept_because: Mapping[str, int]
    copied: Mapping[str, int]
    active: int


def planned_shards(source: Checkpoint, structure: Structure, recipe: Recipe) -> tuple[ShardPlan, ...]:
    """Return the layouts of the files that a recipe makes; none for an engine that lays them out itself.

    Raises `UserError` where the recipe cannot be applied to the model.
    """
    quantization = recipe.quantization
    if quantization.engine != "stream":
        return ()
    choice, untouched = select(structure, quantization), quantization.algorithm == "none"
    shared = quantization.shared_scales
    return plan_shards(source, structure, choice, quantization.format, shared_scales=shared, untouched=untouched)


def predict(
    source: Checkpoint, structure: Structure, recipe: Recipe, plans: tuple[ShardPlan, ...] | None = None
) -> Prediction:
    """Predict a checkpoint's sizes from tensor headers, real or computed from config.json.

    ``plans`` are the `planned_shards`, which take seconds for a model of many experts (None: they are made here).
    Raises `UserError` where the recipe cannot be applied to the model.
    """
    choice = select(structure, recipe.quantization)
    plans = planned_shards(source, structure, recipe) if plans is None else plans
    if recipe.quantization.engine == "stream":
        checkpoint = sum(plan.nbytes for plan in plans)
    else:
        checkpoint = checkpoint_bytes(source, structure, choice, recipe.quantization.format)
    return Prediction(
        parameters=structure.parameters,
        source=source.nbytes,
        checkpoint=checkpoint,
        temporary=temporary_bytes(plans, structure, recipe.quantization),
        quantized=len(choice.schemes),
        kept=len(choice.kept),
        largest_tensor=max(info.nbytes for _, info in source.tensors.values()),
        calibration_device=source.nbytes if recipe.calibration is not None else 0,
        weights_per_gpu=-(-checkpoint // recipe.target.gpus),
        kv_bytes_per_token=_kv_bytes(source.config, 1 if choice.kv_cache else 2),
        kept_because=kept_because(structure, choice, recipe.quantization),
        copied=structure.copied,
        active=round(_active(structure, routed_share(source.config.get("text_config") or source.config))),
    )


def model_for(setting: Setting, folder: Path) -> tuple[Checkpoint, Structure]:
    """Return the tensor headers of ``folder`` and the model's structure; without weights, computed from config.json."""
    trust = setting.recipe.trust_remote_code
    if any(folder.glob("*.safetensors")):
        source = open_checkpoint(folder)
        return source, read_structure(folder, source.tensors, trust_remote_code=trust)
    files = ((path, path.stat()) for path in sorted(folder.iterdir()))
    return _imagined(folder, trust, tuple((path, state.st_size, state.st_mtime_ns) for path, state in files))


@lru_cache(maxsize=1)  # plans of one model on several machines, or of several recipes, imagine it once
def _imagined(folder: Path, trust: bool, files: tuple[tuple[Path, int, int], ...]) -> tuple[Checkpoint, Structure]:
    return imagine(folder, trust_remote_code=trust)


def _active(structure: Structure, share: float) -> float:
    experts = sum(rows * columns for name, (rows, columns) in structure.linear.items() if ".experts." in name)
    return structure.parameters - (1 - share) * experts


def _kv_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """Return 2 * layers * kv heads * head_dim * ``width``, vLLM's formula for grouped-query attention.

    ``width`` is the bytes of an element. None for latent attention, for DeepSeek V4's compressed entries, and where the
    config lacks a size.
    """
    text = config.get("text_config") or config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    layers = text.get("num_hidden_layers")
    if text.get("kv_lora_rank") or text.get("o_lora_rank") or not (heads and hidden and layers):
        return None
    head_dim = text.get("head_dim") or hidden // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * head_dim * width)
