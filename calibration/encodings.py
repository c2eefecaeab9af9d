"""FP8 in blocks, the encoding that DeepSeek publishes its models in: how it is told, and how it is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantmint.calibration.lazy import torch

BLOCK = 128
"""Rows and columns of a block that shares one scale."""
SCALE_SUFFIX = "_scale_inv"
"""Ends the name of the block scales, behind the name of the weight that they belong to."""


def is_block_fp8(declared: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` declares FP8 weights in blocks of 128x128."""
    block = declared.get("weight_block_size")
    return declared.get("quant_method") == "fp8" and isinstance(block, list) and block == [BLOCK, BLOCK]


def decode_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply FP8 [O, I] with the scales of its blocks, [ceil(O/128), ceil(I/128)]; bfloat16 [O, I].

    The product is computed in float32 and rounded once.
    """
    rows, columns = weight.shape
    whole = rows // BLOCK
    numbers, factor = _widened(weight, scale)
    wide = (scale.float() * factor).repeat_interleave(BLOCK, 1)[:, :columns]  # [blocks, I]: rows of a block share it
    numbers[: whole * BLOCK].view(whole, BLOCK, columns).mul_(wide[:whole].unsqueeze(1))
    numbers[whole * BLOCK :].mul_(wide[whole:])  # the last block's, where it is not whole
    return numbers.to(torch.bfloat16)


_FP16_BIAS, _E4M3_BIAS, _E4M3_NAN = 15, 7, 0x7F


def _widened(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return FP8 numbers in float32, and the power of two by which they are too small.

    PyTorch 2.13 converts FP8 one number at a time on a CPU, which takes four fifths of decoding. Shifted into the
    fields of float16, the bits of an FP8 number are 2 ** (7 - 15) times that number, subnormal or not, and vector
    instructions convert float16. NaN has no such place, and a huge scale leaves no room for the factor: PyTorch
    converts those.
    """
    factor = 2.0 ** (_FP16_BIAS - _E4M3_BIAS)
    plain = weight.device.type != "cpu" or weight.dtype != torch.float8_e4m3fn or not weight.numel()
    if plain or not bool((scale.abs() < torch.finfo(torch.float32).max / factor).all()):
        return weight.float(), 1.0
    if int((weight.view(torch.uint8) & _E4M3_NAN).amax()) == _E4M3_NAN:
        return weight.float(), 1.0
    # Sign, five bits of exponent and ten of mantissa, of which FP8 has the lowest four and the highest three.
    bits = weight.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).float(), factor
