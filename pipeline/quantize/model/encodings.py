"""Sources that are not in 16 bit: which tensors hold encoded weights, and why a source cannot be decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from quantmint.calibration.decoders import BLOCK
from quantmint.calibration.encodings import (
    MODELOPT,
    SCALE_SUFFIX,
    Encoded,
    is_block_fp8,
    obstacle,
    recognise,
    scale_of,
)
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import TensorInfo
from quantmint.pipeline.recipe.modules import declared_quantization

LEFTOVERS = (
    "_scale", "_scale_2", "_scale_inv", "_global_scale", "_shape", "_zero_point", "_g_idx", ".qzeros", ".g_idx"
)  # fmt: skip
"""Ends of names of what a quantized source has beside its weights: without meaning once these are decoded."""
DECODED = "FP8 by blocks of 128x128, channels or tensor, MXFP8, MXFP4, NVFP4, INT4, AWQ and GPTQ of 4 bits"
"""The encodings that sources are decoded from, for messages."""
_INTEGERS = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class SourceEncoding:
    """The encodings of a source's weights.

    ``weights`` maps the name of each stored tensor of elements to its encoding. ``obstacle`` is why the source cannot
    be decoded, as part of a sentence; None where it can.
    """

    weights: Mapping[str, Encoded] = field(default_factory=dict)
    obstacle: str | None = None

    @property
    def scales(self) -> frozenset[str]:
        """Return the names of the tensors of scales that the weights are decoded with."""
        return frozenset(scale for encoded in self.weights.values() for scale in encoded.scales)


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """Return the quantization that a ``config.json`` declares, in words; None for 16 bit and for FP8 in 128x128 blocks.

    It is the ``quant_method``, and for fp8 also the granularity. Transformers and calibration run the other two without
    asking how they were quantized.
    """
    declared = declared_quantization(config)
    if declared is None or is_block_fp8(declared):
        return None
    method, block = str(declared.get("quant_method")), declared.get("weight_block_size")
    return f"{method}, {'per tensor' if not block else f'in blocks of {block}'}" if method == "fp8" else method


def input_rounding(config: Mapping[str, Any]) -> str | None:
    """Return how a model's configuration rounds the inputs of linear layers, as "quark, fp4"; None where it does not.

    That of a checkpoint with several schemes names each.
    """
    declared = declared_quantization(config) or {}
    method = declared.get("quant_method")
    if method == "fp8":
        return "fp8, e4m3" if declared.get("activation_scheme") else None
    if method == "modelopt":
        kind = MODELOPT.get(str(declared.get("quant_algo")))
        return None if kind is None else f"modelopt, {kind}"
    if method == "compressed-tensors":
        inputs = [group.get("input_activations") or {} for group in (declared.get("config_groups") or {}).values()]
        kinds = {f"{part.get('type')}{part.get('num_bits')}" for part in inputs if part}
    elif method == "quark":
        layers = [declared.get("global_quant_config"), *(declared.get("layer_quant_config") or {}).values()]
        inputs = [(layer or {}).get("input_tensors") or {} for layer in layers]
        kinds = {str(part.get("dtype")) for part in inputs if isinstance(part, dict) and part}
    else:
        return None
    return f"{method}, {' and '.join(sorted(kinds))}" if kinds else None


def source_encoding(config: Mapping[str, Any], tensors: Mapping[str, tuple[str, TensorInfo]]) -> SourceEncoding:
    """Return how the weights of a source are encoded, by its configuration and its tensors' dtypes and shapes.

    Raises `UserError` for FP8 in blocks whose scales are missing, or have another dtype or shape.
    """
    declared = declared_quantization(config)
    if declared is None:
        return SourceEncoding()
    if is_block_fp8(declared):
        return SourceEncoding(_block_weights(tensors))
    if (reason := obstacle(declared)) is not None:
        return SourceEncoding(obstacle=reason)
    stored = {name: (info.dtype, info.shape) for name, (_, info) in tensors.items()}
    elements = [name for name, (dtype, _) in stored.items() if dtype in _INTEGERS and not name.endswith(LEFTOVERS)]
    recognised = {name: recognise(stored, name, declared) for name in elements}
    encoding = SourceEncoding({name: encoded for name, encoded in recognised.items() if encoded is not None})
    scales = encoding.scales
    for name in (name for name, encoded in recognised.items() if encoded is None and name not in scales):
        dtype, shape = stored[name]
        return SourceEncoding(obstacle=f"{declared.get('quant_method')}, {name} is {dtype} {list(shape)}")
    if not encoding.weights:
        return SourceEncoding(obstacle=f"{declared.get('quant_method')}, which none of its tensors is")
    return encoding


_BLOCK_SCALES = {"F32": "fp8_block", "BF16": "fp8_block", "F8_E8M0": "fp8_block_e8m0"}
_MX_SCALES = {"F8_E8M0": "mxfp4", "U8": "mxfp4"}


def _block_weights(tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, Encoded]:
    """Map each weight in FP8 blocks to its encoding, and each of DeepSeek V4's experts in MXFP4, which is I8."""
    weights: dict[str, Encoded] = {}
    for name, (_, info) in tensors.items():
        if info.dtype != "F8_E4M3" and (info.dtype != "I8" or not name.endswith(".weight")):
            continue
        scale_name = scale_of(tensors, name)
        if scale_name is None or len(info.shape) != 2:
            raise UserError(
                f"{name}: it is {info.dtype} {list(info.shape)}, but there is no {name + SCALE_SUFFIX} to decode it."
            )
        (rows, columns), scale = info.shape, tensors[scale_name][1]
        is_mx = info.dtype == "I8"
        expected = (rows, columns // 16) if is_mx else (ceil(rows / BLOCK), ceil(columns / BLOCK))
        encoding = (_MX_SCALES if is_mx else _BLOCK_SCALES).get(scale.dtype)
        if encoding is None or scale.shape != expected:
            raise UserError(
                f"{scale_name}: it is {scale.dtype} {list(scale.shape)}, expected {'F8_E8M0' if is_mx else 'F32'} "
                f"{list(expected)} for {name} {list(info.shape)}."
            )
        weights[name] = Encoded(encoding, (scale_name,))
    return weights


def is_bias_of_gptq(name: str, encoded: Mapping[str, Encoded]) -> bool:
    """Return whether a tensor is the bias of a module in GPTQ's encoding or AWQ's.

    Tools of GPTQ store zeros there for modules that have no bias by config.json, and vLLM passes over them.
    """
    module = name.removesuffix(".bias")
    return module != name and f"{module}.qweight" in encoded
