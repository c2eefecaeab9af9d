"""Sources that are not 16 bit: FP8 in blocks is decoded, everything else is refused.

DeepSeek's layout, which others took over: ``X.weight`` F8_E4M3 [O, I] beside ``X.weight_scale_inv`` F32
[ceil(O/128), ceil(I/128)]. The name says inverse, but a weight is the stored number times its block's scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from pipeline.errors import UserError
from pipeline.formats.header import TensorInfo

_BLOCK = 128
_SUFFIX = "_scale_inv"


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """The ``quant_method`` of a source that cannot be decoded; None for 16 bit and for FP8 in blocks of 128x128."""
    declared = _declared(config)
    if declared is None:
        return None
    method, block = str(declared.get("quant_method")), declared.get("weight_block_size")
    if method == "fp8" and list(block or ()) == [_BLOCK, _BLOCK]:
        return None
    return f"{method}, {'per tensor' if not block else f'in blocks of {block}'}" if method == "fp8" else method


def encoded_weights(config: Mapping[str, Any], tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, str]:
    """Name of each FP8 weight of a source with the name of its block scales; nothing for a 16-bit source.

    Raises `UserError` for an FP8 weight without scales and for scales of another shape.
    """
    declared = _declared(config)
    if declared is None or declared.get("quant_method") != "fp8" or quantized_by(config) is not None:
        return {}
    found: dict[str, str] = {}
    for name, (_, info) in tensors.items():
        if info.dtype != "F8_E4M3":
            continue
        scale = tensors.get(name + _SUFFIX)
        if scale is None or len(info.shape) != 2:
            raise UserError(f"{name}: it is F8_E4M3 {list(info.shape)}, but there is no {name + _SUFFIX} to decode it.")
        blocks = tuple(ceil(size / _BLOCK) for size in info.shape)
        if scale[1].shape != blocks or scale[1].dtype not in ("F32", "BF16"):
            raise UserError(
                f"{name + _SUFFIX}: it is {scale[1].dtype} {list(scale[1].shape)}, expected F32 {list(blocks)} "
                f"for {name} {list(info.shape)}."
            )
        found[name] = name + _SUFFIX
    return found


def _declared(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # Some multimodal models declare it for the part that is the language model.
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("quantization_config"), Mapping):
            declared: Mapping[str, Any] = part["quantization_config"]
            return declared
    return None
