"""The arithmetic of each scheme, one function a scheme, in plain PyTorch.

A kernel takes rows of a weight of [O, I] and returns what is stored for them by role, scales as one value a row; the
format decides on their shape. Results equal those of llm-compressor 0.14 byte for byte, which equal amd-quark 0.13's.

Magnitudes are compared as integers: without the sign bit, the bits of a floating-point number have its order. Integers
of 16 bits are what a CPU's vector unit gets the most of; the same lines as C++ from ``torch.compile`` (PyTorch 2.13)
took twice as long there, and on a GPU the bus is the bound. `make bench-kernels` measures both again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantmint.calibration.lazy import torch

Parts = dict[str, "torch.Tensor"]

FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""
BLOCK = 128
"""Side of a block of fp8_block, elements."""
MX_GROUP = 32
"""Elements that share an MX scale."""
E2M1_MAX = 6.0
"""Largest value of an MXFP4 element."""
E8M0_UNCERTAIN = 253
"""The MX exponent of groups that hold infinity or NaN, and of some finite ones; those of others are smaller."""
INT4_GROUP = 128
"""Elements that share a scale of w4a16."""
INT4_MAX = 7.0
"""Largest value of a four-bit integer; the least is -8."""
_E2M1_MAX_EXPONENT = 2


def amax(weight: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The largest magnitude, of everything or along a dimension, in the weight's own dtype of 16 or 32 bits.

    A NaN counts as larger than infinity: what is finite here is finite everywhere.
    """
    if not weight.numel():
        return weight.new_zeros(() if dim is None else weight.shape[:dim])
    integers, mask = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[weight.element_size()]
    magnitudes = weight.view(integers) & mask
    largest = magnitudes.amax() if dim is None else magnitudes.amax(dim=dim)
    return largest.view(weight.dtype)


def fp8_scale(largest: torch.Tensor) -> torch.Tensor:
    """amax / 448 in amax's own dtype; where amax is 0, that dtype's epsilon, so that nothing divides by zero.

    The scale is rounded to the dtype that it is stored in *before* anything is divided by it: what is multiplied back
    when the model runs is the very number that was divided by. (compressed-tensors, ``calculate_qparams``.)
    """
    scale = largest / torch.tensor(FP8_MAX, dtype=largest.dtype, device=largest.device)
    return torch.where(scale == 0, torch.finfo(largest.dtype).eps, scale)


def ptpc_fp8(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """FP8 e4m3fn with one scale an output channel; activations get theirs per token when the model runs.

    The quotient is rounded to the dtype of ``weight``, [O, I] of 16 or 32 bits, then to FP8: two roundings, which is
    what both reference libraries do. Returns ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [O].
    """
    largest = amax(weight, dim=1)
    scale = fp8_scale(largest)
    return {"weight": _to_fp8(weight, scale.unsqueeze(1), largest.unsqueeze(1)), "weight_scale": scale}


def fp8(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Parts:
    """FP8 e4m3fn with one scale for the whole matrix; the scale of its input comes from calibration.

    ``largest`` is the largest magnitude of the whole, or of all the matrices that share its scale; None where
    ``weight`` is the whole and not some rows. Returns ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [].
    """
    if largest is None:
        largest = amax(weight)
    scale = fp8_scale(largest)
    return {"weight": _to_fp8(weight, scale, largest), "weight_scale": scale}


def fp8_block(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """FP8 e4m3fn with one scale a block of 128 x 128; blocks at the edges are smaller.

    Returns ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [ceil(O/128), ceil(I/128)].
    """
    from torch.nn.functional import pad

    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    # By columns first: a reduction over the outer dimension is the one that vector units like.
    by_column = amax(blocks.view(blocks.shape[0], BLOCK, -1), dim=1)
    largest = amax(by_column.view(blocks.shape[0], blocks.shape[2], BLOCK), dim=2)
    scale = fp8_scale(largest)
    quotient = _to_fp8(blocks, scale[:, None, :, None], largest[:, None, :, None])
    return {"weight": quotient.view(padded.shape)[:rows, :columns].contiguous(), "weight_scale": scale}


def _to_fp8(weight: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    quotient = weight / scale
    # Rounding is monotone, so the quotient of the largest is the largest quotient: it exceeds the format only where
    # the scale is subnormal, and then all are brought back.
    if not bool((largest / scale <= FP8_MAX).all()):
        quotient.clamp_(-FP8_MAX, FP8_MAX)
    return quotient.to(torch.float8_e4m3fn)


def mxfp4(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """OCP MXFP4: E2M1 elements in groups of 32 along the input, each with a power of two as its scale (E8M0).

    The exponent is that of the group's largest magnitude, rounded up from a mantissa of 1.75, less 2, the exponent of
    E2M1's largest value. Elements go to the nearest value, ties to the even mantissa. Negative elements that round to
    nothing keep their sign, as llm-compressor has it. I must be divisible by 32.

    Returns ``weight_packed`` uint8 [O, I/2], the even column in the low nibble, and ``weight_scale`` uint8 [O, I/32].
    """
    return _mxfp4(weight, signed_zero=True)


def mxfp4_unsigned_zero(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """`mxfp4` as Quark has it: the tensor is called ``weight``, and zero has no sign."""
    made = _mxfp4(weight, signed_zero=False)
    return {"weight": made["weight_packed"], "weight_scale": made["weight_scale"]}


def _mxfp4(weight: torch.Tensor, *, signed_zero: bool) -> Parts:
    made = _mxfp4_of_bits(weight, signed_zero) if weight.dtype == torch.bfloat16 else None
    return _mxfp4_of_numbers(weight, signed_zero) if made is None else made


def _mxfp4_of_bits(weight: torch.Tensor, signed_zero: bool) -> Parts | None:
    """MXFP4 of bfloat16 by its bits; None where a group is so small that the bits of its elements are not logarithmic.

    Subtracting the scale's exponent field from an element's bits leaves 128 times its binary exponent plus its
    mantissa, y, with y = 128 for 1.0. E2M1 has one mantissa bit, so codes of normal values (1, 1.5, 2, 3, 4, 6) are
    y / 64 rounded to even; below lie 0.5 with y from -127 to 63, and 0.
    """
    rows, columns = weight.shape
    bits = weight.view(torch.int16)
    magnitude = bits & 0x7FFF
    largest = magnitude.view(rows, columns // MX_GROUP, MX_GROUP).amax(dim=-1)
    # 7 mantissa bits: adding a quarter of their range carries 1.75 into the next exponent.
    exponent = (((largest + 32) >> 7) - _E2M1_MAX_EXPONENT).clamp_(min=0)
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
    """MXFP4 of anything that float32 holds."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // MX_GROUP, MX_GROUP)
    exponent = e8m0(groups.abs().amax(dim=-1))
    # 2 ** (127 - exponent), by its bits: exp2 is not exact everywhere.
    scaled = groups * ((254 - exponent) << 23).view(torch.float32).unsqueeze(-1)
    packed = pack_e2m1(scaled.view(rows, columns), signed_zero=signed_zero)
    return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}


def e8m0(largest: torch.Tensor) -> torch.Tensor:
    """The MX exponents of groups with these largest magnitudes in float32: int32 of the same shape."""
    # float32's exponent field is E8M0 already: adding a quarter of the mantissa's range carries 1.75 into the next one.
    return (((largest.view(torch.int32) + (1 << 21)) >> 23) - _E2M1_MAX_EXPONENT).clamp_(min=0)


def to_nearest(numbers: torch.Tensor, mantissa: int, least: int, *, out: torch.Tensor) -> torch.Tensor:
    """Round float32 to ``mantissa`` bits, ties to even, at most as finely as 2 ** ``least`` is; fills ``out``.

    A number is rounded to a multiple of a power of two by adding 1.5 * 2 ** 23 times that, which leaves a float32 no
    smaller digit, and taking it away.
    """
    power = (numbers.view(torch.int32) & 0x7F800000).clamp_(min=(least + 127) << 23).view(torch.float32)
    shift = 1.5 * 2.0 ** (23 - mantissa)
    return torch.add(numbers, power, alpha=shift, out=out).sub_(power, alpha=shift)


def pack_e2m1(scaled: torch.Tensor, *, signed_zero: bool) -> torch.Tensor:
    """Round what was divided by its scale, float32 [O, I], to E2M1, two in a byte: uint8 [O, I/2]."""
    magnitude = scaled.abs().clamp_(max=E2M1_MAX)
    # E2M1 counts in halves below 2, in ones below 4, in twos up to 6: 0 .5 1 1.5 | 2 3 | 4 6 are the codes 0 to 7.
    above_two, above_four = (magnitude >= 2).float(), (magnitude >= 4).float()
    steps = magnitude * (2 - above_two - above_four / 2)
    code = steps.round_() + 2 * (above_two + above_four)
    code += 8 * ((scaled < 0) if signed_zero else (scaled < 0) & (code > 0))
    pairs = code.view(scaled.shape[0], scaled.shape[1] // 2, 2)
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)


def w4a16(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """INT4 in groups of 128 along the input, each with a scale of the weight's dtype; activations keep 16 bit.

    Returns ``weight_packed`` int32 [O, I/8], see `pack_int4`, and ``weight_scale`` [O, I/128]. I must be divisible by
    128. The scale is a 7.5th of the largest magnitude, so that an element may be clipped by half a step.
    """
    groups = weight.view(weight.shape[0], -1, INT4_GROUP)
    scale = int4_scale(amax(groups, dim=2))
    numbers = (groups / scale.unsqueeze(2)).round_().clamp_(-INT4_MAX - 1, INT4_MAX)
    return {"weight_packed": pack_int4(numbers.view(weight.shape)), "weight_scale": scale}


def int4_scale(largest: torch.Tensor) -> torch.Tensor:
    """amax / 7.5 in amax's own dtype; where amax is 0, that dtype's epsilon. (compressed-tensors again.)"""
    # By a tensor, which a CUDA graph can make: by the inverse of a number it is another quotient now and then.
    scale = largest / largest.new_full((), INT4_MAX + 0.5)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Whole numbers from -8 to 7 of any dtype, [O, I]: 8 added, eight in an int32, the first in its lowest bits."""
    pairs = (numbers + 8).to(torch.uint8).view(numbers.shape[0], -1, 2)
    return (pairs[..., 0] + 16 * pairs[..., 1]).view(torch.int32)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with the number of rows that share a scale: the least that it can compute apart from all others.

    ``whole`` is for a kernel whose scale needs the largest magnitude of the whole weight, its second argument.
    """

    compute: Callable[[torch.Tensor, torch.Tensor | None], Parts]
    rows: int
    whole: bool = False


KERNELS: Mapping[str, Kernel] = {
    "ptpc_fp8": Kernel(ptpc_fp8, rows=1),
    "fp8": Kernel(fp8, rows=1, whole=True),
    "fp8_block": Kernel(fp8_block, rows=BLOCK),
    "mxfp4": Kernel(mxfp4, rows=1),
    "mxfp4_unsigned_zero": Kernel(mxfp4_unsigned_zero, rows=1),
    "w4a16": Kernel(w4a16, rows=1),
}


def kernel_name(scheme: str, checkpoint_format: str) -> str:
    """Return the kernel of a scheme's weights in a layout; activations have no part in it."""
    if scheme.startswith("mxfp4"):
        return "mxfp4_unsigned_zero" if checkpoint_format == "quark" else "mxfp4"
    return scheme
