"""FP8 in blocks, the encoding that DeepSeek publishes its models in: how it is told, and how it is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibration.lazy import torch

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
    wide = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() * wide).to(torch.bfloat16)
