"""The arithmetic of a quantization scheme: kernels that encode weights, the function that decodes them, GPTQ's grid.

A kernel takes rows of a weight of [O, I] and returns what is stored for them by role, scales as one value a row; the
layout decides on their shape. Each module of this package holds one family of schemes as `WeightScheme` objects;
`registry` lists them. A new scheme is a module here, its line there, and its row in ``pipeline/base/schemes.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantmint.calibration.lazy import torch

Parts = dict[str, "torch.Tensor"]
"""Stored tensors of one weight, or of some of its rows, by role: ``weight``, ``weight_scale``, ..."""
Decode = Callable[[Mapping[str, "torch.Tensor"]], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that GPTQ rounds to, as a small floating-point format, and the functions for scales that GPTQ chooses.

    ``mantissa`` are mantissa bits, ``least`` the exponent of the smallest normal number, ``lowest`` and ``limit`` the
    least and the largest value. ``group`` is the number of elements whose common scale GPTQ chooses; 1 where
    round-to-nearest gives the scale. A grid of groups has the functions below. ``candidates`` returns the scales to try
    for groups, float32 [..., group, O], of a weight of some dtype: float32 [..., n, O], first that of round-to-nearest.
    ``encode_scales`` returns chosen scales as they are stored, given the weight's dtype; ``pack`` takes elements
    divided by their scale, [O, I].
    """

    mantissa: int
    least: int
    lowest: float
    limit: float
    group: int = 1
    candidates: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None
    encode_scales: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None
    pack: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """An encoder of weights for one or several layouts.

    ``compute`` takes rows [n, I] of 16 or 32 bits, and the largest magnitude of the whole weight where ``whole`` is
    set; with ``fused`` it is always that of all weights that vLLM loads as one. ``decode`` returns float32 [n, I] from
    the parts that ``compute`` returned. ``rows`` is the number of rows that share a scale: the least that can be
    computed apart from all others. ``grid`` is None where GPTQ cannot stand for the kernel. ``uncertain`` is the least
    E8M0 exponent that a group with infinity or NaN can have. ``decode_sample(parts, stride)`` decodes each
    ``stride``-th row where slicing all parts alike is not enough.
    """

    name: str
    compute: Callable[[torch.Tensor, torch.Tensor | None], Parts]
    decode: Decode
    rows: int = 1
    whole: bool = False
    fused: bool = False
    grid: Grid | None = None
    uncertain: int = 253
    decode_sample: Callable[[Parts, int], torch.Tensor] | None = None

    def sample(self, parts: Parts, stride: int) -> torch.Tensor:
        """Decode each ``stride``-th row of the encoded ``parts``: float32 [ceil(n/stride), I]."""
        if self.decode_sample is not None:
            return self.decode_sample(parts, stride)
        return self.decode({role: part[::stride] if part.ndim else part for role, part in parts.items()})


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The weights of a scheme: how they are decoded, and which kernel encodes them in each layout.

    ``decode`` rebuilds float32 [O, I] from the stored tensors of every layout. ``kernels`` has no entry for a layout
    that only libraries write. ``sqnr_floor_db`` is the least signal-to-noise ratio of a correctly rounded weight:
    rounding gives about 31.5 dB for e4m3, 31 for e2m3, 25.5 for e3m2 and 18 for e2m1, little dependent on the
    distribution because all have an exponent; integers depend on it. ``exact`` encodes, in all layouts, weights whose
    numbers have so few bits that the scheme may hold them without loss.
    """

    name: str
    decode: Decode
    kernels: Mapping[str, Kernel]
    sqnr_floor_db: float
    exact: Kernel | None = None

    @property
    def kernel(self) -> Kernel:
        """Return the kernel whose values stand for the scheme in measurements; those of all layouts decode alike.

        Raises `StopIteration` where only libraries encode the scheme.
        """
        return self.kernels.get("compressed-tensors") or next(iter(self.kernels.values()))
