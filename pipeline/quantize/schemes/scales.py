"""Scales of quantized weights: floating-point ones in a weight's own dtype, and E8M0 powers of two.

Magnitudes are compared as integers: without the sign bit, the bits of a floating-point number have its order. Integers
of 16 bits are what a CPU's vector unit processes fastest.
"""

from __future__ import annotations

from quantmint.calibration.lazy import torch

FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""
BLOCK = 128
"""Side of a block of fp8_block, elements."""
MX_GROUP = 32
"""Elements that share an MX scale."""
NV_GROUP = 16
"""Elements that share a scale of NVFP4."""
INT4_GROUP = 128
"""Elements that share a scale of w4a16."""
INT4_MAX = 7.0
"""Largest value of a four-bit integer; the least is -8."""
INT8_MAX = 127.0
"""Largest value of an eight-bit integer; the least is -128."""


def amax(weight: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the largest magnitude, of all numbers or along ``dim``, in the weight's own dtype of 16 or 32 bits.

    A NaN counts as larger than infinity: if the result is finite, all numbers are. Without numbers it is zero.
    """
    if not weight.numel():
        return weight.new_zeros(() if dim is None else weight.shape[:dim])
    integers, mask = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[weight.element_size()]
    magnitudes = weight.view(integers) & mask
    largest = magnitudes.amax() if dim is None else magnitudes.amax(dim=dim)
    return largest.view(weight.dtype)


def fp8_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return ``largest`` / 448 in its own dtype; that dtype's epsilon where it is 0, so that nothing divides by zero.

    The scale is rounded to the dtype that it is stored in *before* anything is divided by it: what is multiplied back
    when the model runs is the very number that was divided by. (compressed-tensors, ``calculate_qparams``.)
    """
    scale = largest / torch.tensor(FP8_MAX, dtype=largest.dtype, device=largest.device)
    return torch.where(scale == 0, torch.finfo(largest.dtype).eps, scale)


def int4_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return ``largest`` / 7.5 in its own dtype; that dtype's epsilon where it is 0, as compressed-tensors does."""
    # By a tensor, which a CUDA graph can make: by the inverse of a number it is another quotient now and then.
    scale = largest / largest.new_full((), INT4_MAX + 0.5)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def int8_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return ``largest`` / 127.5 in its own dtype; that dtype's epsilon where it is 0, as compressed-tensors does."""
    scale = largest / largest.new_full((), INT8_MAX + 0.5)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def global_scale(largest: torch.Tensor) -> torch.Tensor:
    """Return NVFP4's global scale, float32 []: 448 * 6 / ``largest``; 1 where ``largest`` is 0 or NaN.

    The inverse and the product are rounded to the dtype of ``largest``, which is the weight's. (compressed-tensors,
    ``generate_gparam``.)
    """
    scale = largest.clamp(min=torch.finfo(largest.dtype).tiny).reciprocal() * (FP8_MAX * 6.0)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0, neginf=1.0).float()


def e8m0(largest: torch.Tensor, max_exponent: int = 2, deciding: int = 1) -> torch.Tensor:
    """Return the biased E8M0 exponents of groups whose largest magnitudes are given in float32: int32, same shape.

    ``max_exponent`` is the exponent of the element type's largest value. The exponent is one more where the magnitude,
    rounded to ``deciding`` bits of mantissa, is the next power of two.
    """
    # float32's exponent field is E8M0 already: adding half a step of the mantissa carries into the next exponent.
    return (((largest.view(torch.int32) + (1 << (22 - deciding))) >> 23) - max_exponent).clamp_(min=0)


def inverse_power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 ** (127 - exponent) in float32 for biased E8M0 exponents in int32.

    It is made of bits, because exp2 is not exact everywhere.
    """
    return ((254 - exponent) << 23).view(torch.float32)
