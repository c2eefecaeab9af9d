"""Stored weights back to float32, by scheme: the definition of each format, not a fast path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from pipeline.schemes import scheme as row_of

if TYPE_CHECKING:
    import torch

# Bits of exponent and of mantissa of the OCP Microscaling 1.0 elements, which have no infinity and no NaN.
_MINIFLOATS = {"e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2)}
_NIBBLES_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ's order puts the outputs 0 to 7 of a word


def dequantize(scheme: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rebuild a weight of [O, I] in float32 from its stored parts, by role.

    Per-channel scales are [O] or [O, 1], per-tensor ones [] or [1], block scales [O/128, I/128], MX scales E8M0 bytes
    of [O, I/32]; those of INT4 groups are [O, I/128] or, in Quark's transposed layout, [I/128, O].
    """
    import torch

    row = row_of(scheme).weight
    scale = parts["weight_scale"]
    stored = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    if row.dtype == "int4":
        numbers, scale = (_words(stored), scale) if "weight_packed" in parts else (_transposed_words(stored), scale.t())
        return numbers * scale.float().repeat_interleave(128, dim=1)
    if row.scale == "e8m0":
        table = None if row.dtype == "e4m3" else _minifloats(row.dtype, stored.device)
        values = stored.float() if table is None else table[_codes(row.bits, stored).int()]
        # ldexp and not exp2: the latter is not exact for every integer everywhere.
        exponents = scale.int() - 127
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        return values * powers.masked_fill(scale == 255, torch.nan).repeat_interleave(32, dim=1)
    weight, scale = stored.float(), scale.float()
    if row.granularity == "block":
        rows, columns = weight.shape
        return weight * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight * (scale.reshape(-1, 1) if scale.numel() == weight.shape[0] else scale.reshape(()))


@cache
def _minifloats(dtype: str, device: torch.device) -> torch.Tensor:
    """Every value of an element type in float32, in the order of its codes: sign, exponent, mantissa."""
    import torch

    exponent_bits, mantissa_bits = _MINIFLOATS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values.append(fraction * 2 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2 ** (exponent - bias))
    return torch.tensor([*values, *(-value for value in values)], device=device)


def _codes(bits: int, packed: torch.Tensor) -> torch.Tensor:
    """[O, I] codes from bytes: two of 4 bit in one, or four of 6 bit in three, the first in the lowest bits."""
    import torch

    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    low, middle, high = packed.int().reshape(packed.shape[0], -1, 3).unbind(-1)
    word = low | (middle << 8) | (high << 16)
    return torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(1)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """[O, I] integers from 32-bit words of eight along I, 8 added to each."""
    import torch

    nibbles = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
    return (nibbles.flatten(1) - 8).float()


def _transposed_words(packed: torch.Tensor) -> torch.Tensor:
    """[O, I] integers from [I, O/8] words in AWQ's order of nibbles, each in two's complement."""
    import torch

    nibbles = torch.stack([(packed >> (4 * place)) & 15 for place in _NIBBLES_AWQ], dim=-1).flatten(1)
    return ((nibbles ^ 8) - 8).float().t()


def sqnr_db(source: torch.Tensor, restored: torch.Tensor) -> float:
    """10 log10(sum w^2 / sum (w - q)^2), dB; infinite for an exact copy, NaN where a weight is."""
    import math

    signal = source.double().square().sum().item()
    noise = (source.double() - restored.double()).square().sum().item()
    if math.isnan(noise):
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
