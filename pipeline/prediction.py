"""How large things will be, before they are there: bytes on disk and on each GPU.

Exact where the layout decides (the checkpoint), an upper bound where the machine does (calibration, serving). What the
stages take to make them is in `pipeline.cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.engines.libraries.size import checkpoint_bytes
from pipeline.engines.stream.plan import plan_shards
from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint
from pipeline.model.select import select
from pipeline.model.structure import Structure
from pipeline.recipe.schema import Recipe

_OVERHEAD = 64 << 20  # bytes beside the weights: tokenizer, logs, samples, report


@dataclass(frozen=True, slots=True)
class Prediction:
    """Sizes in bytes.

    ``quantized`` and ``kept`` count linear modules; ``calibration_device`` is what a resident model takes,
    ``largest_tensor`` bounds the engine's memory, a few of which it holds; ``weights_per_gpu`` is for the candidate.
    ``kv_bytes_per_token`` is for all layers over all GPUs, None for an architecture whose cache is not plain K and V.
    """

    parameters: int
    source: int
    checkpoint: int
    quantized: int
    kept: int
    largest_tensor: int
    calibration_device: int
    weights_per_gpu: int
    kv_bytes_per_token: int | None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)


def predict(source: Checkpoint, structure: Structure, recipe: Recipe) -> Prediction:
    """Predict from headers, real or imagined. Raises `UserError` for what the recipe cannot be applied to."""
    choice = select(structure, recipe.quantization)
    layout = recipe.quantization.format
    if recipe.quantization.engine == "stream":
        checkpoint = sum(plan.nbytes for plan in plan_shards(source, structure, choice, layout))
    else:
        checkpoint = checkpoint_bytes(source, structure, choice, layout)
    return Prediction(
        parameters=structure.parameters,
        source=source.nbytes,
        checkpoint=checkpoint,
        quantized=len(choice.schemes),
        kept=len(choice.kept),
        largest_tensor=max(info.nbytes for _, info in source.tensors.values()),
        calibration_device=source.nbytes if recipe.calibration is not None else 0,
        weights_per_gpu=-(-checkpoint // recipe.target.gpus),
        kv_bytes_per_token=_kv_bytes(source.config, 1 if choice.kv_cache else 2),
    )


def disk_needed(prediction: Prediction, missing: Iterable[str], *, download: bool, copied: bool) -> dict[str, int]:
    """Bytes that the stages which are not cached will write here, by what they are for.

    ``download``: the source is fetched; ``copied``: a folder is one of the places that are published to.
    """
    stages = set(missing)
    needed: dict[str, int] = {}
    if "source" in stages and download:
        needed["download"] = prediction.source
    if "quantize" in stages:
        needed["checkpoint"] = prediction.checkpoint
    if "publish" in stages and copied:
        needed["published copy"] = prediction.checkpoint
    return {**needed, "logs and samples": _OVERHEAD} if needed else {}


def require_disk(needed: Mapping[str, int], free: int, where: str) -> None:
    """Raise `UserError` where the disk is too small for what is still to be written."""
    total = sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {count / 1e9:,.2f} GB" for name, count in needed.items())
        raise UserError(
            f"{where}: {total / 1e9:,.2f} GB are needed ({parts}), {free / 1e9:,.2f} GB are free.",
            hint="Free space, or write to another disk; `quantmint gc` removes from a store what no recent run uses.",
        )


def _kv_bytes(config: Mapping[str, Any], width: int) -> int | None:
    """2 * layers * kv heads * head_dim * bytes; the formula of vLLM for grouped-query attention."""
    text = config.get("text_config") or config
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    layers = text.get("num_hidden_layers")
    if text.get("kv_lora_rank") or not (heads and hidden and layers):
        return None
    head_dim = text.get("head_dim") or hidden // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * head_dim * width)
