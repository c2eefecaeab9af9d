"""How far a quantized weight is from its source, taken while both are at hand.

One row in 64 is compared, which costs a few percent and moves the ratio of a real weight by hundredths of a decibel;
`quantmint inspect --source` compares all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.engines.stream.kernels import BLOCK, E2M1_MAX, FP8_MAX, MX_GROUP
from pipeline.inspection.dequantize import dequantize

if TYPE_CHECKING:
    import torch

_STRIDE = 64
# Beyond the largest value by more than half of the last step: further than rounding moves anything.
_CLIPPED = {FP8_MAX: 464.0, E2M1_MAX: 7.0}


@dataclass(frozen=True, slots=True)
class Error:
    """Sums over the compared elements: squares of the weight and of its error, how many were clipped, how many."""

    signal: float = 0.0
    noise: float = 0.0
    clipped: int = 0
    count: int = 0

    def __add__(self, other: Error) -> Error:
        return Error(
            self.signal + other.signal,
            self.noise + other.noise,
            self.clipped + other.clipped,
            self.count + other.count,
        )

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(sum w^2 / sum (w - q)^2), dB; None where there is no error, or nothing but zeros."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else None


def sampled_error(weight: torch.Tensor, made: dict[str, torch.Tensor], limit: float) -> Error:
    """Compare rows of a weight [O, I] with what a kernel made of them."""
    import torch

    source = weight[::_STRIDE].float()
    scale = made["weight_scale"]
    if limit == E2M1_MAX:
        packed = "weight_packed" if "weight_packed" in made else "weight"
        parts = {"weight_packed": made[packed][::_STRIDE], "weight_scale": scale[::_STRIDE]}
        restored = dequantize("mxfp4", parts)
        exponents = scale[::_STRIDE].int() - 127
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        step = powers.repeat_interleave(MX_GROUP, dim=1)
    else:
        if scale.ndim == 2:  # of blocks
            step = scale.repeat_interleave(BLOCK // _STRIDE, 0)[: source.shape[0]].repeat_interleave(BLOCK, 1)
            step = step[:, : source.shape[1]].float()
        else:
            step = (scale[::_STRIDE].unsqueeze(1) if scale.ndim else scale).float()
        restored = made["weight"][::_STRIDE].float() * step
    clipped = source.abs() > _CLIPPED[limit] * step
    sums = (source.square().sum(), (source - restored).square().sum(), clipped.sum())
    signal, noise, count = torch.stack([each.double() for each in sums]).tolist()  # one wait for a GPU, not three
    return Error(signal, noise, int(count), source.numel())
