"""Tell by its tensors how a source stores weights in fewer than 16 bits; `decoders` decodes them.

    recognise(names, "model.layers.0.mlp.up_proj.weight_packed")

A weight lies in one tensor of elements, ``X.weight``, ``X.weight_packed`` or ``X.qweight``, beside tensors of scales.
Dtypes and shapes tell the encodings apart:

    fp8_block    F8_E4M3 [O, I]; ``_scale_inv``, or ``_scale``, [ceil(O/128), ceil(I/128)]
    fp8_block_e8m0  the same, with scales F8_E8M0
    fp8_channel  F8_E4M3 [O, I]; ``_scale`` [O] or [O, 1]
    fp8_tensor   F8_E4M3 [O, I]; ``_scale`` [] or [1]
    mxfp8        F8_E4M3 [O, I]; ``_scale`` U8 or F8_E8M0 [O, I/32]
    mxfp4        U8 or I8 [O, I/2]; ``_scale`` U8 or F8_E8M0 [O, I/32]
    nvfp4        U8 [O, I/2]; ``_scale`` F8_E4M3 [O, I/16]; ``_global_scale`` F32, by which scales are divided
    nvfp4_by     the same; ``_scale_2`` F32, by which scales are multiplied, as ModelOpt writes it
    int4         I32 [O, I/8], symmetric; ``_scale`` [O, n] for n groups of inputs; ``_shape``
    int4_zero    the same; ``_zero_point`` I32 [ceil(O/8), n]
    awq          ``qweight`` I32 [I, O/8], outputs in AWQ's order; ``qzeros`` I32 [n, O/8]; ``scales`` [n, O]
    gptq         ``qweight`` I32 [I/8, O]; ``qzeros`` I32 [n, O/8], less by 1; ``scales`` [n, O]; ``g_idx`` I32 [I]
    gptq_v2      the same, with zero points as they are
    mxfp4_stack  of experts: ``_blocks`` U8 [E, O, I/32, 16]; ``_scales`` U8 [E, O, I/32], E8M0

DeepSeek V4 calls the scale of ``X.weight`` ``X.scale``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from quantmint.calibration.decoders import BLOCK, ENCODINGS, Encoding

SCALE_SUFFIX = "_scale_inv"
"""Ends the name of the block scales that DeepSeek publishes, behind the name of the weight that they belong to."""
BLOCKS = "_blocks"
"""Ends the name of a stack of experts in MXFP4 that gpt-oss publishes."""
_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("U8", "F8_E8M0")  # both hold the exponent of a power of two

Stored = tuple[str, tuple[int, ...]]
"""Dtype by its safetensors name, and shape."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoding of one weight, a key of `ENCODINGS`, and the names of its scale tensors in `decode`'s order."""

    encoding: str
    scales: tuple[str, ...]

    @property
    def rule(self) -> Encoding:
        """Return the entry of `ENCODINGS` for this encoding."""
        return ENCODINGS[self.encoding]


def plain_name(name: str) -> str:
    """Return the name of the 16-bit weight that a stored tensor encodes: ``X.weight`` for ``X.weight_packed``.

    That of a stack of experts is ``X`` for ``X_blocks``.
    """
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last in ("weight_packed", "qweight") else name.removesuffix(BLOCKS)


def recognise(tensors: Mapping[str, Stored], name: str, declared: Mapping[str, Any] | None = None) -> Encoded | None:
    """Return the encoding of tensor ``name`` by the dtypes and shapes of it and its scales.

    None for a tensor that no rule knows, or whose scales are missing. ``tensors`` maps names to dtype and shape. The
    ``quantization_config`` ``declared`` says how GPTQ stores zero points.
    """
    dtype, shape = tensors[name]
    if name.endswith(BLOCKS):
        scale_name = f"{name.removesuffix(BLOCKS)}_scales"
        is_stack = dtype == "U8" and len(shape) == 4 and shape[-1] == 16
        return (
            Encoded("mxfp4_stack", (scale_name,)) if is_stack and tensors.get(scale_name) == ("U8", shape[:3]) else None
        )
    if name.endswith(".qweight"):
        return _recognise_turned(tensors, name, declared or {})
    if len(shape) != 2 or not name.endswith((".weight", ".weight_packed")):
        return None
    stem = plain_name(name)
    scales_name = scale_of(tensors, stem)
    if scales_name is None:
        return None
    (rows, stored), (scale_dtype, scale_shape) = shape, tensors[scales_name]
    if dtype == "F8_E4M3":
        fp8 = _recognise_fp8((rows, stored), scale_dtype, scale_shape)
        return None if fp8 is None else Encoded(fp8, (scales_name,))
    is_packed = dtype in ("U8", "I8") and scale_shape == (rows, stored // 16) and not stored % 16
    if is_packed and scale_dtype in _POWERS:
        return Encoded("mxfp4", (scales_name,))
    if dtype == "U8" and scale_dtype == "F8_E4M3" and scale_shape == (rows, stored // 8) and not stored % 8:
        for encoding, suffix in (("nvfp4", "_global_scale"), ("nvfp4_by", "_scale_2")):
            if f"{stem}{suffix}" in tensors:
                return Encoded(encoding, (scales_name, f"{stem}{suffix}"))
    elif dtype == "I32" and scale_dtype in _FLOATS:
        groups = scale_shape[1] if len(scale_shape) == 2 and scale_shape[0] == rows else 0
        if groups and not 8 * stored % groups:
            zeros = tensors.get(f"{stem}_zero_point")
            if zeros == ("I32", (ceil(rows / 8), groups)):
                return Encoded("int4_zero", (scales_name, f"{stem}_zero_point"))
            return None if zeros is not None or _has_zero_points(declared or {}) else Encoded("int4", (scales_name,))
    return None


def scale_of(tensors: Collection[str], weight: str) -> str | None:
    """Return the name of the tensor with the scales of a ``weight``, by its plain name; None where there is none."""
    names = (f"{weight}_scale", f"{weight}{SCALE_SUFFIX}", f"{weight.removesuffix('.weight')}.scale")
    return next((name for name in names if name in tensors), None)


def _recognise_fp8(shape: tuple[int, int], scale_dtype: str, scale_shape: tuple[int, ...]) -> str | None:
    """Return the encoding of E4M3 elements of a ``shape`` [O, I]; None for scales that no rule knows."""
    (rows, columns), blocks = shape, tuple(ceil(size / BLOCK) for size in shape)
    if scale_dtype in _POWERS and scale_shape == (rows, columns // 32):
        return "mxfp8"
    if scale_dtype == "F8_E8M0" and scale_shape == blocks:
        return "fp8_block_e8m0"
    if scale_dtype not in _FLOATS:
        return None
    if scale_shape in ((), (1,), (1, 1)):
        return "fp8_tensor"
    if scale_shape in ((rows,), (rows, 1)):
        return "fp8_channel"
    return "fp8_block" if scale_shape == blocks else None


def _recognise_turned(tensors: Mapping[str, Stored], name: str, declared: Mapping[str, Any]) -> Encoded | None:
    """Return the encoding of a tensor of AWQ or GPTQ, stored as [I, O], by the dtypes and shapes of it and its scales.

    None where a scale or zero point is missing, or has another shape than 4 bits imply.
    """
    stem = name.removesuffix("qweight")
    names = (f"{stem}scales", f"{stem}qzeros")
    (scale_dtype, scale_shape), zeros = (tensors.get(scale, ("", ())) for scale in names)
    (dtype, (outer, inner)), order = tensors[name], tensors.get(f"{stem}g_idx")
    if dtype != "I32" or scale_dtype not in _FLOATS or len(scale_shape) != 2:
        return None
    groups, outputs = scale_shape
    if not groups or zeros != ("I32", (groups, outputs // 8)) or outputs % 8:
        return None
    if inner == outputs // 8 and not outer % groups:
        return Encoded("awq", names)
    if inner != outputs or order not in (None, ("I32", (8 * outer,))) or (order is None and 8 * outer % groups):
        return None
    encoding = "gptq_v2" if _gptq_format(declared) == "gptq_v2" else "gptq"
    return Encoded(encoding, names if order is None else (*names, f"{stem}g_idx"))


def _has_zero_points(declared: Mapping[str, Any]) -> bool:
    """Return whether a ``quantization_config`` of compressed-tensors declares all weights asymmetric."""
    groups = [group.get("weights") or {} for group in (declared.get("config_groups") or {}).values()]
    return bool(groups) and not any(weights.get("symmetric", True) for weights in groups)


def _gptq_format(declared: Mapping[str, Any]) -> str:
    """Return the layout that a ``quantization_config`` of GPTQ declares; "gptq" where it names none."""
    return str(declared.get("checkpoint_format") or declared.get("format") or "gptq")


OLD_MODELOPT = "hf_quant_config.json"
"""File in which older versions of ModelOpt describe a quantization, beside a config.json that has none."""


def with_old_modelopt(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a folder's ``config.json`` with the ``quantization_config`` that its `OLD_MODELOPT` file stands for.

    It is returned as it is where it has a quantization itself, or where there is no such file. Raises `OSError` or
    `ValueError` for a file that cannot be read or is none of ModelOpt.
    """
    path = folder / OLD_MODELOPT
    if config.get("quantization_config") or not path.is_file():
        return config
    described = json.loads(path.read_text(encoding="utf-8"))
    quantization = described.get("quantization") if isinstance(described, dict) else None
    if not isinstance(quantization, dict):
        raise ValueError(f"{OLD_MODELOPT} has no `quantization`, in which ModelOpt describes one")
    if not quantization.get("quant_algo"):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantization}}


def is_block_fp8(declared: Mapping[str, Any]) -> bool:
    """Return whether a ``quantization_config`` declares FP8 weights in blocks of 128x128."""
    block = declared.get("weight_block_size")
    return declared.get("quant_method") == "fp8" and isinstance(block, list) and block == [BLOCK, BLOCK]


_TYPES = {"float": {4, 8}, "int": {4}}  # bits of elements, by what compressed-tensors calls their type
_QUARK = {"fp8_e4m3", "fp4"}
MODELOPT = {"FP8": "fp8", "NVFP4": "fp4"}
"""Algorithms of ModelOpt whose weights are decoded, with the type that inputs are rounded to."""


def obstacle(declared: Mapping[str, Any]) -> str | None:
    """Return why a source with the ``quantization_config`` ``declared`` cannot be decoded, as a phrase; None if it may.

    Where this is None, `recognise` decides by the tensors. It cannot tell formats whose tensors look alike: INT8,
    rotated weights, AWQ in another order than GEMM's.
    """
    method = str(declared.get("quant_method"))
    if method == "fp8":
        block = declared.get("weight_block_size")
        return None if not block or list(block) == [BLOCK, BLOCK] else f"fp8, in blocks of {block}"
    if method == "modelopt":
        algorithm = str(declared.get("quant_algo"))
        return None if algorithm in MODELOPT else f"modelopt, {algorithm}"
    if method == "mxfp4":
        return None
    if method == "awq":
        bits, version = declared.get("bits", declared.get("w_bit", 4)), str(declared.get("version") or "gemm").lower()
        return None if (bits, version) == (4, "gemm") else f"awq, {version} of {bits} bits"
    if method == "gptq":
        bits, form = declared.get("bits", 4), _gptq_format(declared)
        return None if bits == 4 and form in ("gptq", "gptq_v2") else f"gptq, {form} of {bits} bits"
    if method == "compressed-tensors":
        if (declared.get("transform_config") or {}).get("config_groups"):
            return "compressed-tensors, with rotated weights"
        for group in (declared.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            kind, bits = weights.get("type"), weights.get("num_bits")
            if bits not in _TYPES.get(str(kind), set()):
                return f"compressed-tensors, {kind}{bits}"
            if weights.get("actorder") not in (None, False, "static", "weight"):
                return f"compressed-tensors, with activation order {weights['actorder']}"
        return None
    if method == "quark":
        layers = [declared.get("global_quant_config"), *(declared.get("layer_quant_config") or {}).values()]
        for layer in layers:
            weights = (layer or {}).get("weight") or {}
            for part in weights if isinstance(weights, list) else [weights]:
                if part and part.get("dtype") not in _QUARK:
                    return f"quark, {part.get('dtype')}"
        return None
    return method
