"""How much calibration and quantization move and compute: counted from headers and the model's configuration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

from calibration.room import Mode, Need, forward_bytes
from pipeline.quantize.engines.stream.plan import Origin, ShardPlan
from pipeline.quantize.formats.checkpoint import Checkpoint
from pipeline.quantize.model.structure import Structure
from pipeline.recipe.schema import Calibration

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_FILE = 5_000_000_000  # bytes
CARRIED = "carried"
"""Stands for a kernel where numbers stay what they are, and only their largest is taken: it must be finite."""
_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")  # as DeepSeek, Mixtral and Qwen call it


@dataclass(frozen=True, slots=True)
class QuantizeVolume:
    """Bytes read, ``distinct`` without what is read twice, and bytes written; in so many ``files``, the ``largest`` of
    which has so many bytes.

    ``kernels`` are the bytes of 16-bit weight that each kernel computes; `CARRIED` are those that are only looked at.
    """

    read: int
    distinct: int
    written: int
    files: int
    largest: int
    kernels: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CalibrateVolume:
    """What one pass over the calibration set takes.

    ``need`` are the bytes on a device, ``flops`` the operations of all matrix products, ``scores`` the attention
    weights that are computed. ``states`` are the bytes of the whole set's hidden states, which layer mode keeps, in
    ``memory`` bytes of the host's where the recipe says so. ``mode`` is what the recipe asks for.
    """

    need: Need
    flops: float
    scores: float
    states: int
    mode: Mode
    memory: int | None


def quantize_volume(plans: Iterable[ShardPlan]) -> QuantizeVolume:
    """Count the planned files of a checkpoint.

    A weight whose scale needs the largest of the whole is read twice. A model that is only imagined is one file; the
    Hub's are cut at 5 GB.
    """
    plans = tuple(plans)
    kernels: Counter[str] = Counter()
    scanned: set[Origin] = set()
    for plan in plans:
        for step in plan.steps:
            kernels[step.kernel or CARRIED] += 2 * prod(step.origin.shape)
            scanned.update(step.group)
    written = sum(plan.nbytes for plan in plans)
    files = max(len(plans), -(-written // _FILE))
    distinct = sum(plan.read_bytes for plan in plans)
    return QuantizeVolume(
        read=distinct + sum(origin.nbytes for origin in scanned),
        distinct=distinct,
        written=written,
        files=files,
        largest=min(max(plan.nbytes for plan in plans), _FILE) if files > len(plans) else max(p.nbytes for p in plans),
        kernels=dict(kernels),
    )


def calibrate_volume(source: Checkpoint, structure: Structure, calibration: Calibration) -> CalibrateVolume:
    """Count a forward over the whole calibration set, without the output head.

    A product of [t, i] and [i, o] takes 2 t i o operations. Eager attention computes all L x L scores of a head, with
    4 D operations each for a head of D elements, in the product with the keys and that with the values. An expert gets
    every token once, besides those that the router sends, unless the recipe asks for the router's only.
    """
    text: Mapping[str, Any] = source.config.get("text_config") or source.config
    tokens, length = calibration.samples * calibration.sequence_length, calibration.sequence_length
    share = routed_share(text) + (1.0 if calibration.experts == "all" else 0.0)
    products = sum(
        (share if _EXPERT.search(name) else 1.0) * rows * columns for name, (rows, columns) in structure.linear.items()
    )
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    scores = float(tokens * length * heads * len(structure.attention))
    width = int(text.get("head_dim") or hidden // heads)
    layers: Counter[str] = Counter()
    for name, (_, info) in source.tensors.items():
        if found := _LAYER.search(name):
            layers[found.group(1)] += info.nbytes
    body = sum(info.nbytes for name, (_, info) in source.tensors.items() if "lm_head." not in name)
    batch = min(calibration.batch_size, calibration.samples)
    forward = forward_bytes(SimpleNamespace(**text), batch, length)
    return CalibrateVolume(
        need=Need(weights=body, layer=max(layers.values(), default=body), forward=forward),
        flops=2.0 * tokens * products + 4.0 * scores * width,
        scores=scores,
        states=2 * tokens * hidden,
        mode=calibration.mode,
        memory=None if calibration.activation_memory is None else int(calibration.activation_memory * 1e9),
    )


def routed_share(config: Mapping[str, Any]) -> float:
    """The share of a mixture's experts that a token passes through; 1 for a dense model."""
    total = next((int(config[key]) for key in _COUNTS if config.get(key)), 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    return chosen / total if total and chosen else 1.0
