"""OCP microscaling weights: elements in groups of 32 along the input, each group with a power of two (E8M0) as scale.

Bytes equal those of llm-compressor 0.14 (compressed-tensors layout) and amd-quark 0.13 (Quark layout).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from quantmint.calibration.elements import E2M1, E2M3, E3M2, E4M3, ElementType, decode_elements, power
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.schemes.elements import encode_minifloat, pack_e2m1, pack_six_bits
from quantmint.pipeline.quantize.schemes.scales import FP8_MAX, MX_GROUP, amax, e8m0, inverse_power
from quantmint.pipeline.quantize.schemes.scheme import Decode, Grid, Kernel, Parts, WeightScheme


def mxfp4(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as OCP MXFP4: E2M1 elements in groups of 32 along the input, with powers of two as scales (E8M0).

    The exponent is that of the group's largest magnitude, rounded up from a mantissa of 1.75, less 2, the exponent of
    E2M1's largest value. Elements go to the nearest value, ties to the even mantissa. Negative elements that round to
    zero keep their sign, as llm-compressor has it. I must be divisible by 32.

    Return ``weight_packed`` uint8 [O, I/2], the even column in the low nibble, and ``weight_scale`` uint8 [O, I/32].
    """
    return _mxfp4(weight, signed_zero=True)


def mxfp4_unsigned_zero(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as `mxfp4` in Quark's form: the tensor is called ``weight``, and zero has no sign."""
    parts = _mxfp4(weight, signed_zero=False)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}


def _mxfp4(weight: torch.Tensor, *, signed_zero: bool) -> Parts:
    parts = _mxfp4_of_bits(weight, signed_zero) if weight.dtype == torch.bfloat16 else None
    return _mxfp4_of_numbers(weight, signed_zero) if parts is None else parts


def _mxfp4_of_bits(weight: torch.Tensor, signed_zero: bool) -> Parts | None:
    """Encode bfloat16 as MXFP4 by its bits; return None where a group is so small that its elements may be subnormal.

    Subtracting the scale's exponent field from an element's bits leaves 128 times its binary exponent plus its
    mantissa, y, with y = 128 for 1.0. E2M1 has one mantissa bit, so codes of normal values (1, 1.5, 2, 3, 4, 6) are y /
    64 rounded to even; below lie 0.5 with y from -127 to 63, and 0.
    """
    rows, columns = weight.shape
    bits = weight.view(torch.int16)
    magnitude = bits & 0x7FFF
    largest = magnitude.view(rows, columns // MX_GROUP, MX_GROUP).amax(dim=-1)
    # 7 mantissa bits: adding a quarter of their range carries 1.75 into the next exponent.
    exponent = (((largest + 32) >> 7) - E2M1.max_exponent).clamp_(min=0)
    if bool(((exponent <= 2) & (largest > 0)).any()):
        return None
    base = ((exponent.clamp(min=2) << 7) - 128).unsqueeze(-1)
    y = (magnitude.view(rows, -1, MX_GROUP) - base).view(rows, columns)
    code = (y >> 6).bitwise_and_(1).add_(y).add_(31).bitwise_right_shift_(6)
    below_one = (y - 64).bitwise_right_shift_(15).add_(y.add_(127).bitwise_right_shift_(15)).add_(2)  # 0, 1 or 2
    torch.maximum(code, below_one, out=code).clamp_(max=7)
    # The sign is bit 15 of an element and bit 3 of its code; adding 7 of 8 carries into that bit unless all is zero.
    if signed_zero:
        sign = magnitude.add_(0x7FFF).bitwise_and_(bits).bitwise_right_shift_(12).bitwise_and_(8)
    else:
        sign = torch.add(code, 7, out=y).bitwise_and_(bits >> 12).bitwise_and_(8)
    pairs = code.bitwise_or_(sign).view(torch.int32)  # the even column is the low half
    packed = (pairs >> 12).bitwise_or_(pairs).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}


def _mxfp4_of_numbers(weight: torch.Tensor, signed_zero: bool) -> Parts:
    """Encode a weight of any floating-point dtype as MXFP4, in float32."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // MX_GROUP, MX_GROUP)
    exponent = e8m0(groups.abs().amax(dim=-1))
    scaled = groups * inverse_power(exponent).unsqueeze(-1)
    packed = pack_e2m1(scaled.view(rows, columns), signed_zero=signed_zero)
    return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}


def _decode_as(dtype: str, bits: int) -> Decode:
    """Return the function that decodes elements of a type, ``bits`` wide, with E8M0 scales, uint8 [O, I/32]."""

    def decode(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        stored = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
        scale = power(parts["weight_scale"]).repeat_interleave(MX_GROUP, dim=1)
        return decode_elements(dtype, bits, stored) * scale

    return decode


def mxfp8(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as OCP MXFP8: E4M3 elements in groups of 32 along the input, with powers of two as scales (E8M0).

    Return ``weight`` float8_e4m3fn [O, I] and ``weight_scale`` uint8 [O, I/32]. I must be divisible by 32.
    """
    exponent, scaled = _scaled(weight, E4M3)
    elements = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": elements, "weight_scale": exponent.to(torch.uint8)}


def _mxfp6(element: ElementType) -> Callable[[torch.Tensor, torch.Tensor | None], Parts]:
    """Return the function that encodes OCP MXFP6 with 6-bit elements of type ``element``."""

    def encode(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
        """Encode in Quark's form, where zero has no sign. I must be divisible by 32.

        Return ``weight`` uint8 [O, I*3/4], see `pack_six_bits`, and ``weight_scale`` uint8 [O, I/32].
        """
        exponent, scaled = _scaled(weight, element)
        return {"weight": _pack_six(scaled, element), "weight_scale": exponent.to(torch.uint8)}

    return encode


def _scaled(weight: torch.Tensor, element: ElementType) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight's E8M0 exponents, int32 [O, I/32], and the weight divided by its scales, float32 [O, I]."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // MX_GROUP, MX_GROUP)
    exponent = e8m0(amax(groups, dim=2).float(), element.max_exponent, element.deciding)
    scaled = groups.float() * inverse_power(exponent).unsqueeze(-1)
    return exponent, scaled.view(rows, columns)


def _grid(element: ElementType, pack: Callable[[torch.Tensor], torch.Tensor]) -> Grid:
    """Return the grid of elements of a type, which ``pack`` packs; GPTQ chooses the scale of each 32 of them."""

    def candidates(target: torch.Tensor, _: torch.dtype) -> torch.Tensor:
        """Return the scales that GPTQ tries for groups [..., 32, O]: float32 [..., 3, O], powers of two.

        They are that of round-to-nearest, its half and its double, in this order.
        """
        nearest = e8m0(target.abs().amax(dim=-2), element.max_exponent, element.deciding)
        # Of a scale of 2 ** -127 float32 has no normal number, and the largest element times 2 ** 127 is too much.
        exponents = torch.stack((nearest, nearest - 1, nearest + 1), dim=-2).clamp_(1, 254 - element.max_exponent)
        return (exponents << 23).view(torch.float32)

    return Grid(
        element.mantissa_bits,
        element.least_exponent,
        -element.largest,
        element.largest,
        MX_GROUP,
        candidates=candidates,
        encode_scales=lambda scales, _: (scales.view(torch.int32) >> 23).to(torch.uint8),
        pack=pack,
    )


def _pack_six(scaled: torch.Tensor, element: ElementType) -> torch.Tensor:
    return pack_six_bits(encode_minifloat(scaled, element, signed_zero=False))


def _mxfp6_kernel(name: str, element: ElementType, decode: Decode) -> Kernel:
    grid = _grid(element, partial(_pack_six, element=element))
    return Kernel(name, _mxfp6(element), decode, grid=grid, uncertain=255 - element.max_exponent)


_FP4, _FP6_E2M3, _FP6_E3M2, _FP8 = (_decode_as(*of) for of in (("e2m1", 4), ("e2m3", 6), ("e3m2", 6), ("e4m3", 8)))
_GRID = _grid(E2M1, partial(pack_e2m1, signed_zero=False))
_MXFP4 = Kernel("mxfp4", mxfp4, _FP4, grid=_GRID)
_MXFP4_QUARK = Kernel("mxfp4_unsigned_zero", mxfp4_unsigned_zero, _FP4, grid=_GRID)
_MXFP6_E2M3 = _mxfp6_kernel("mxfp6_e2m3", E2M3, _FP6_E2M3)
_MXFP6_E3M2 = _mxfp6_kernel("mxfp6_e3m2", E3M2, _FP6_E3M2)
_MXFP8 = Kernel("mxfp8", mxfp8, _FP8, uncertain=255 - E4M3.max_exponent)
_BOTH = {"compressed-tensors": _MXFP4, "quark": _MXFP4_QUARK}

SCHEMES = (
    WeightScheme("mxfp4", _FP4, _BOTH, 6.0),
    WeightScheme("mxfp4_weight_only", _FP4, _BOTH, 6.0),
    WeightScheme("mxfp4_fp8", _FP4, {"quark": _MXFP4_QUARK}, 6.0),
    WeightScheme("mxfp6_e2m3", _FP6_E2M3, {"quark": _MXFP6_E2M3}, 18.0),
    WeightScheme("mxfp6_e3m2", _FP6_E3M2, {"quark": _MXFP6_E3M2}, 16.0),
    WeightScheme("mxfp8", _FP8, {"compressed-tensors": _MXFP8}, 24.0),
)
