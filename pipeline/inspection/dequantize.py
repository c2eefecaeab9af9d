"""Stored weights back to float32, by scheme: the definition of each format, not a fast path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling 1.0, table of FP4 values; the sign is bit 3


def dequantize(scheme: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rebuild a weight of [O, I] in float32 from its stored parts, by role.

    Per-channel scales are [O] or [O, 1], per-tensor ones [] or [1], block scales [O/128, I/128], MX scales E8M0 bytes
    of [O, I/32].
    """
    import torch

    scale = parts["weight_scale"]
    if scheme.startswith("mxfp4"):
        packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)
        exponents = torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)
        return values[nibbles.int()] * exponents
    weight = parts["weight"].float()
    scale = scale.float()
    if scheme == "fp8_block":
        rows, columns = weight.shape
        return weight * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight * (scale.reshape(-1, 1) if scale.numel() == weight.shape[0] else scale.reshape(()))


def sqnr_db(source: torch.Tensor, restored: torch.Tensor) -> float:
    """10 log10(sum w^2 / sum (w - q)^2), dB; infinite for an exact copy, NaN where a weight is."""
    import math

    signal = source.double().square().sum().item()
    noise = (source.double() - restored.double()).square().sum().item()
    if math.isnan(noise):
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
