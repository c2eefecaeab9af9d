"""Sources that are not in 16 bit: FP8 in blocks, decoded to bfloat16 when it is read.

DeepSeek's layout, which others took over, stores ``X.weight`` F8_E4M3 [O, I] beside ``X.weight_scale_inv`` F32
[ceil(O/128), ceil(I/128)]. The name says inverse, but a weight is the stored number times the scale of its block. Other
sources that are not in 16 bit are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from quantmint.calibration.encodings import BLOCK, SCALE_SUFFIX, is_block_fp8
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import TensorInfo
from quantmint.pipeline.recipe.modules import declared_quantization


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """The ``quant_method`` of a source that cannot be decoded; None for 16 bit and for FP8 in blocks of 128x128."""
    declared = declared_quantization(config)
    if declared is None or is_block_fp8(declared):
        return None
    method, block = str(declared.get("quant_method")), declared.get("weight_block_size")
    return f"{method}, {'per tensor' if not block else f'in blocks of {block}'}" if method == "fp8" else method


def encoded_weights(config: Mapping[str, Any], tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, str]:
    """Map each FP8 weight of a source to the name of its block scales; empty for a 16-bit source.

    Raises `UserError` for an FP8 weight without scales and for scales of another shape.
    """
    declared = declared_quantization(config)
    if declared is None or not is_block_fp8(declared):
        return {}
    scales: dict[str, str] = {}
    for name, (_, info) in tensors.items():
        if info.dtype != "F8_E4M3":
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is None or len(info.shape) != 2:
            raise UserError(
                f"{name}: it is F8_E4M3 {list(info.shape)}, but there is no {name + SCALE_SUFFIX} to decode it."
            )
        blocks = tuple(ceil(size / BLOCK) for size in info.shape)
        if scale[1].shape != blocks or scale[1].dtype not in ("F32", "BF16"):
            raise UserError(
                f"{name + SCALE_SUFFIX}: it is {scale[1].dtype} {list(scale[1].shape)}, expected F32 {list(blocks)} "
                f"for {name} {list(info.shape)}."
            )
        scales[name] = name + SCALE_SUFFIX
    return scales
