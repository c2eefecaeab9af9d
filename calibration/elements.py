"""Decode element types smaller than a byte, and FP8, by their bits.

>>> decode_elements("e2m1", 4, packed)   # uint8 [O, I/2] -> float32 [O, I]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from quantmint.calibration.lazy import torch


@dataclass(frozen=True, slots=True)
class ElementType:
    """A floating-point element type: bits of exponent and of mantissa, and its largest finite value.

    ``deciding`` is the number of mantissa bits that decide whether a microscaling group's scale is rounded up (`e8m0`).
    """

    exponent_bits: int
    mantissa_bits: int
    largest: float
    deciding: int

    @property
    def bits(self) -> int:
        """Return the bits of an element, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """Return the binary exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """Return the binary exponent of the largest finite value."""
        return math.frexp(self.largest)[1] - 1


# OCP Microscaling 1.0. The scale of e4m3 is decided as that of e2m1, because its largest value is 1.75 * 2 ** 8.
E2M1 = ElementType(2, 1, 6.0, 1)
E2M3 = ElementType(2, 3, 7.5, 3)
E3M2 = ElementType(3, 2, 28.0, 2)
E4M3 = ElementType(4, 3, 448.0, 1)
ELEMENT_TYPES = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3}


def decode_elements(dtype: str, bits: int, stored: torch.Tensor) -> torch.Tensor:
    """Decode stored elements of type ``dtype`` ("e2m1", "e2m3", "e3m2", "e4m3") to float32 [O, I].

    ``bits`` is the width of a stored element: 4 (two in a byte, [O, I/2]), 6 (four in three bytes, [O, I*3/4]) or 8.
    Bytes are looked up in a table; tensors of any other dtype than uint8 and float8_e4m3fn are converted to float32 as
    they are.
    """
    if dtype in ELEMENT_TYPES and bits == 6:
        low, middle, high = stored.int().reshape(stored.shape[0], -1, 3).unbind(-1)
        word = low | (middle << 8) | (high << 16)
        codes = torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(1)
        return minifloat_values(dtype, stored.device)[codes]
    if stored.dtype in (torch.float8_e4m3fn, torch.uint8):
        values = _values_of_bytes(dtype, stored.device).index_select(0, stored.view(torch.uint8).reshape(-1).int())
        return values.view(stored.shape[0], -1)
    return stored.float()


@cache
def _values_of_bytes(dtype: str, device: torch.device) -> torch.Tensor:
    """Return the decoded value of each byte: float32 [256], or [256, 2] for two 4-bit elements, the low bits first."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if dtype == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    return minifloat_values(dtype, device)[torch.stack((codes & 15, codes >> 4), dim=-1).int()]


@cache
def minifloat_values(dtype: str, device: torch.device) -> torch.Tensor:
    """Return every value of an element type, float32 [2**bits], indexed by its code (sign, exponent, mantissa bits)."""
    element = ELEMENT_TYPES[dtype]
    steps = 2**element.mantissa_bits
    values = []
    for code in range(2 ** (element.bits - 1)):
        exponent, mantissa = divmod(code, steps)
        fraction = mantissa / steps if exponent == 0 else 1 + mantissa / steps
        values.append(fraction * 2.0 ** (max(exponent, 1) - 1 + element.least_exponent))
    return torch.tensor([*values, *(-value for value in values)], device=device)


NIBBLES_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's order puts the outputs 0 to 7 of a word, in units of 4 bits."""


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [O, I/8] of eight 4-bit integers along I, stored with 8 added; return float32 [O, I], -8 to 7."""
    nibbles = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
    return (nibbles.flatten(1) - 8).float()


def bits(stored: torch.Tensor) -> torch.Tensor:
    """Return stored bytes as uint8, a view where they are int8 (packed elements) or float8_e8m0fnu (exponents)."""
    return stored.view(torch.uint8) if stored.dtype in (torch.int8, torch.float8_e8m0fnu) else stored


def power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (exponent - 127) in float32 for E8M0 bytes (uint8); NaN for 255."""
    # By their bits: exp2 is not exact for every integer everywhere, and ldexp runs on the current GPU alone. Of
    # 2 ** -127 float32 has no normal number.
    powers = torch.where(exponent == 0, 1 << 22, exponent.int() << 23).view(torch.float32)
    return powers.masked_fill(exponent == 255, torch.nan)
