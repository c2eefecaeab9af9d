"""Integer weights: INT4 in groups of 128 (w4a16), INT8 per output channel (int8_w8a8)."""

from __future__ import annotations

from collections.abc import Mapping

from quantmint.calibration.elements import unpack_int4
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.schemes.elements import pack_int4, unpack_int4_transposed
from quantmint.pipeline.quantize.schemes.scales import INT4_GROUP, INT4_MAX, INT8_MAX, amax, int4_scale, int8_scale
from quantmint.pipeline.quantize.schemes.scheme import Grid, Kernel, Parts, WeightScheme

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of the scale to the nearest that GPTQ tries: a scale that clips the largest number leaves the others finer."""


def w4a16(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as INT4 in groups of 128 along the input, each with a scale in the weight's dtype.

    Activations stay in 16 bit. Return ``weight_packed`` int32 [O, I/8], see `pack_int4`, and ``weight_scale`` [O,
    I/128]. I must be divisible by 128. The scale is the largest magnitude / 7.5, so that an element may be clipped by
    half a step.
    """
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)
    scale = int4_scale(amax(groups, dim=2))
    numbers = (groups / scale.unsqueeze(2)).round_().clamp_(-INT4_MAX - 1, INT4_MAX)
    return {"weight_packed": pack_int4(numbers.view(weight.shape)), "weight_scale": scale}


def int8(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as INT8 with one scale for each output channel; activations are scaled per token at run time.

    The scale is the largest magnitude / 127.5. Return ``weight`` int8 [O, I] and ``weight_scale`` [O].
    """
    scale = int8_scale(amax(weight, dim=1))
    numbers = (weight / scale.unsqueeze(1)).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}


def _decode_int4(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 [O, I] with scales [O, I/128], or [I/128, O] in Quark's transposed layout."""
    scale = parts["weight_scale"]
    if "weight_packed" in parts:
        numbers = unpack_int4(parts["weight_packed"])
    else:
        numbers, scale = unpack_int4_transposed(parts["weight"]), scale.t()
    return numbers * scale.float().repeat_interleave(INT4_GROUP, dim=1)


def _decode_int8(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 [O, I] with scales [O] or [O, 1]."""
    return parts["weight"].float() * parts["weight_scale"].float().reshape(-1, 1)


def _int4_candidates(target: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales that GPTQ tries for groups [..., 128, O]: float32 [..., n, O], each exact in ``dtype``."""
    largest = target.abs().amax(dim=-2)
    return torch.stack([int4_scale((largest * share).to(dtype)) for share in _SHARES], dim=-2).float()


_INT4 = Kernel(
    "w4a16",
    w4a16,
    _decode_int4,
    grid=Grid(
        2,  # below 4 all are subnormal: steps of 1
        2,
        -INT4_MAX - 1,
        INT4_MAX,
        INT4_GROUP,
        candidates=_int4_candidates,
        encode_scales=lambda scales, dtype: scales.to(dtype),
        pack=pack_int4,
    ),
)
_INT8 = Kernel("int8_w8a8", int8, _decode_int8)

SCHEMES = (
    WeightScheme("int8_w8a8", _decode_int8, {"compressed-tensors": _INT8}, 20.0),
    WeightScheme("w4a16", _decode_int4, {"compressed-tensors": _INT4}, 6.0),
)
