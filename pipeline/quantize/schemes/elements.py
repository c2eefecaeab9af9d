"""Element types smaller than a byte, and FP8, by their bits: round, encode, pack; `calibration.elements` decodes.

>>> codes = encode_minifloat(scaled, E2M1, signed_zero=False)   # uint8 codes 0 to 15
>>> pack_nibbles(codes)                                         # two in a byte
"""

from __future__ import annotations

from quantmint.calibration.elements import E2M1, NIBBLES_AWQ, ElementType
from quantmint.calibration.lazy import torch


def to_nearest(numbers: torch.Tensor, mantissa: int, least: int, *, out: torch.Tensor) -> torch.Tensor:
    """Round float32 to ``mantissa`` bits, ties to even, with steps no finer than those at 2 ** ``least``; fill ``out``.

    A number is rounded to a multiple of a power of two by adding 1.5 * 2 ** 23 times that, which leaves a float32 no
    smaller digit, and taking it away. Return ``out``.
    """
    power = (numbers.view(torch.int32) & 0x7F800000).clamp_(min=(least + 127) << 23).view(torch.float32)
    shift = 1.5 * 2.0 ** (23 - mantissa)
    return torch.add(numbers, power, alpha=shift, out=out).sub_(power, alpha=shift)


def encode_minifloat(scaled: torch.Tensor, element: ElementType, *, signed_zero: bool) -> torch.Tensor:
    """Round float32 to the nearest value of an element type, ties to even, and return its codes: uint8, same shape.

    Numbers beyond the largest value become the largest. With ``signed_zero``, negative numbers that round to zero keep
    their sign.
    """
    magnitude = scaled.abs().clamp_(max=element.largest)
    rounded = to_nearest(magnitude, element.mantissa_bits, element.least_exponent, out=torch.empty_like(magnitude))
    # Codes of subnormal and normal numbers follow each other, as the bits of a float do.
    subnormal = rounded * 2.0 ** (element.mantissa_bits - element.least_exponent)
    bits = rounded.view(torch.int32) >> (23 - element.mantissa_bits)
    normal = bits - ((126 + element.least_exponent) << element.mantissa_bits)
    code = torch.where(rounded < 2.0**element.least_exponent, subnormal.int(), normal)
    negative = (scaled < 0) if signed_zero else (scaled < 0) & (code > 0)
    return code.add_(negative.int() << (element.bits - 1)).to(torch.uint8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 4 bits, uint8 [O, I], two in a byte, the even column in the low bits: uint8 [O, I/2]."""
    pairs = codes.view(codes.shape[0], codes.shape[1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def pack_e2m1(scaled: torch.Tensor, *, signed_zero: bool) -> torch.Tensor:
    """Round scaled numbers, float32 [O, I], to E2M1, and pack two codes in a byte: uint8 [O, I/2].

    With ``signed_zero``, negative numbers that round to zero keep their sign.
    """
    return pack_nibbles(encode_minifloat(scaled, E2M1, signed_zero=signed_zero))


def pack_six_bits(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of 6 bits, uint8 [O, I], four in three bytes, the first in the lowest bits: uint8 [O, I*3/4]."""
    first, second, third, fourth = codes.int().view(codes.shape[0], -1, 4).unbind(-1)
    word = first | (second << 6) | (third << 12) | (fourth << 18)
    return torch.stack([(word >> shift) & 255 for shift in (0, 8, 16)], dim=-1).to(torch.uint8).flatten(1)


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Pack whole numbers from -8 to 7 of any dtype, [O, I], with 8 added, eight in an int32: int32 [O, I/8].

    The first number lies in the lowest bits.
    """
    pairs = (numbers + 8).to(torch.uint8).view(numbers.shape[0], -1, 2)
    return (pairs[..., 0] + 16 * pairs[..., 1]).view(torch.int32)


def unpack_int4_transposed(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 words [I, O/8] of eight 4-bit integers, two's complement in AWQ's order, to float32 [O, I]."""
    nibbles = torch.stack([(packed >> (4 * place)) & 15 for place in NIBBLES_AWQ], dim=-1).flatten(1)
    return ((nibbles ^ 8) - 8).float().t()
