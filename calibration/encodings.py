"""Sources that store weights in fewer than 16 bits: how each encoding is told from its tensors, and how it is decoded.

    encoding, scales = recognise(names, "model.layers.0.mlp.up_proj.weight_packed")
    ENCODINGS["mxfp4"].decode(elements, [scale])        # bfloat16 [O, I]

A weight lies in one tensor of elements, ``X.weight`` or ``X.weight_packed``, beside tensors of scales. Dtypes and
shapes tell the encodings apart:

    fp8_block    F8_E4M3 [O, I]; ``_scale_inv``, or ``_scale``, [ceil(O/128), ceil(I/128)]
    fp8_channel  F8_E4M3 [O, I]; ``_scale`` [O] or [O, 1]
    fp8_tensor   F8_E4M3 [O, I]; ``_scale`` [] or [1]
    mxfp8        F8_E4M3 [O, I]; ``_scale`` U8 [O, I/32], E8M0
    mxfp4        U8 [O, I/2]; ``_scale`` U8 [O, I/32], E8M0
    nvfp4        U8 [O, I/2]; ``_scale`` F8_E4M3 [O, I/16]; ``_global_scale`` F32, by which scales are divided
    nvfp4_by     the same; ``_scale_2`` F32, by which scales are multiplied, as ModelOpt writes it
    int4         I32 [O, I/8], symmetric; ``_scale`` [O, I/group]; ``_shape``

Numbers are computed in float32 and rounded to bfloat16 once. In block FP8 the name says inverse, but a weight is the
stored number times the scale of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, Final

from quantmint.calibration.elements import decode_elements, power, unpack_int4
from quantmint.calibration.lazy import torch

BLOCK = 128
"""Rows and columns of a block that shares one scale."""
SCALE_SUFFIX = "_scale_inv"
"""Ends the name of the block scales that DeepSeek publishes, behind the name of the weight that they belong to."""
_FLOATS = ("F32", "BF16", "F16")

Stored = tuple[str, tuple[int, ...]]
"""Dtype by its safetensors name, and shape."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store a matrix [O, I] in fewer than 16 bits.

    One item of the stored tensor holds ``elements`` elements of a row, and ``rows`` rows share a row of scales.
    ``decode`` takes rows of the stored tensor and their scales, and returns bfloat16 [rows, I].
    """

    decode: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    elements: int = 1
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoding of one weight, a key of `ENCODINGS`, and the names of its scale tensors in `decode`'s order.

    With ``by_row`` the first scale tensor has one row for every `Encoding.rows` rows of the weight, and is read by
    rows; other scale tensors are read whole.
    """

    encoding: str
    scales: tuple[str, ...]
    by_row: bool = True

    @property
    def rule(self) -> Encoding:
        """Return the entry of `ENCODINGS` for this encoding."""
        return ENCODINGS[self.encoding]


def plain_name(name: str) -> str:
    """Return the name of the 16-bit weight that a stored tensor encodes: ``X.weight`` for ``X.weight_packed``."""
    return f"{name.removesuffix('weight_packed')}weight" if name.endswith(".weight_packed") else name


def recognise(tensors: Mapping[str, Stored], name: str) -> Encoded | None:
    """Return the encoding of tensor ``name`` by the dtypes and shapes of it and its scales.

    None for a tensor that no rule knows, or whose scales are missing. ``tensors`` maps names to dtype and shape.
    """
    dtype, shape = tensors[name]
    if len(shape) != 2 or not name.endswith((".weight", ".weight_packed")):
        return None
    stem = plain_name(name)
    scale = tensors.get(f"{stem}_scale") or tensors.get(f"{stem}{SCALE_SUFFIX}")
    if scale is None:
        return None
    scale_name = f"{stem}_scale" if f"{stem}_scale" in tensors else f"{stem}{SCALE_SUFFIX}"
    (rows, stored), (scale_dtype, scale_shape) = shape, scale
    if dtype == "F8_E4M3":
        if scale_dtype == "U8" and scale_shape == (rows, stored // 32):
            return Encoded("mxfp8", (scale_name,))
        if scale_dtype not in _FLOATS:
            return None
        if scale_shape in ((), (1,), (1, 1)):
            return Encoded("fp8_tensor", (scale_name,), by_row=False)
        if scale_shape in ((rows,), (rows, 1)):
            return Encoded("fp8_channel", (scale_name,))
        if scale_shape == (ceil(rows / BLOCK), ceil(stored / BLOCK)):
            return Encoded("fp8_block", (scale_name,))
    elif dtype == "U8" and scale_dtype == "U8" and scale_shape == (rows, stored // 16) and not stored % 16:
        return Encoded("mxfp4", (scale_name,))
    elif dtype == "U8" and scale_dtype == "F8_E4M3" and scale_shape == (rows, stored // 8) and not stored % 8:
        for encoding, suffix in (("nvfp4", "_global_scale"), ("nvfp4_by", "_scale_2")):
            if f"{stem}{suffix}" in tensors:
                return Encoded(encoding, (scale_name, f"{stem}{suffix}"))
    elif dtype == "I32" and scale_dtype in _FLOATS and f"{stem}_zero_point" not in tensors:
        groups = scale_shape[1] if len(scale_shape) == 2 and scale_shape[0] == rows else 0
        return Encoded("int4", (scale_name,)) if groups and not 8 * stored % groups else None
    return None


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

    Where this is None, `recognise` decides by the tensors. It cannot tell formats whose tensors look alike: INT4 with
    zero points in the words, INT8, rotated weights.
    """
    method = str(declared.get("quant_method"))
    if method == "fp8":
        block = declared.get("weight_block_size")
        return None if not block or list(block) == [BLOCK, BLOCK] else f"fp8, in blocks of {block}"
    if method == "modelopt":
        algorithm = str(declared.get("quant_algo"))
        return None if algorithm in MODELOPT else f"modelopt, {algorithm}"
    if method == "compressed-tensors":
        if (declared.get("transform_config") or {}).get("config_groups"):
            return "compressed-tensors, with rotated weights"
        for group in (declared.get("config_groups") or {}).values():
            weights = group.get("weights") or {}
            kind, bits = weights.get("type"), weights.get("num_bits")
            if bits not in _TYPES.get(str(kind), set()) or not weights.get("symmetric", True):
                return f"compressed-tensors, {'' if weights.get('symmetric', True) else 'asymmetric '}{kind}{bits}"
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


def decode_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply FP8 [O, I] by the scales of its 128x128 blocks, [ceil(O/128), ceil(I/128)]; return bfloat16 [O, I].

    The product is computed in float32 and rounded once.
    """
    rows, columns = weight.shape
    whole = rows // BLOCK
    numbers, factor = _widened(weight, scale)
    wide = (scale.float() * factor).repeat_interleave(BLOCK, 1)[:, :columns]  # [blocks, I]: rows of a block share it
    numbers[: whole * BLOCK].view(whole, BLOCK, columns).mul_(wide[:whole].unsqueeze(1))
    numbers[whole * BLOCK :].mul_(wide[whole:])  # the last block's, where it is not whole
    return numbers.to(torch.bfloat16)


def _decode_fp8(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply FP8 [O, I] by one scale for each row, or one for all; return bfloat16 [O, I]."""
    numbers, factor = _widened(weight, scales[0])
    return numbers.mul_((scales[0].float() * factor).reshape(-1, 1)).to(torch.bfloat16)


def _by_group(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply float32 [O, I] in place by the scales of n groups along I, float32 [O, n]; return bfloat16 [O, I]."""
    groups = numbers.view(*scale.shape, -1)
    return groups.mul_(scale.unsqueeze(-1)).to(torch.bfloat16).view(numbers.shape)


def _decode_mxfp8(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return _by_group(weight.float(), power(scales[0]))


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two E2M1 elements of each byte as bfloat16, both in one int32: int32 [256]."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return decode_elements("e2m1", 4, every_byte).to(torch.bfloat16).view(torch.int32).flatten()


def _decode_mxfp4(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode MXFP4, uint8 [O, I/2] with E8M0 scales, to bfloat16 [O, I], by a table with two elements for each byte.

    An element times a power of two is exact in bfloat16.
    """
    rows, columns = weight.shape
    numbers = _pairs(weight.device).index_select(0, weight.reshape(-1).int()).view(torch.bfloat16)
    groups = numbers.view(rows, -1, 2 * columns // scales[0].shape[1])
    return groups.mul_(power(scales[0]).to(torch.bfloat16).unsqueeze(-1)).view(rows, 2 * columns)


def _decode_nvfp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _by_group(decode_elements("e2m1", 4, weight), scale)


def _decode_int4(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return _by_group(unpack_int4(weight), scales[0].float())


ENCODINGS: Final[Mapping[str, Encoding]] = {
    "fp8_block": Encoding(lambda weight, scales: decode_blocks(weight, scales[0]), rows=BLOCK),
    "fp8_channel": Encoding(_decode_fp8),
    "fp8_tensor": Encoding(_decode_fp8),
    "mxfp8": Encoding(_decode_mxfp8),
    "mxfp4": Encoding(_decode_mxfp4, elements=2),
    "nvfp4": Encoding(
        lambda weight, scales: _decode_nvfp4(weight, scales[0].float() / scales[1].float().reshape(())), elements=2
    ),
    "nvfp4_by": Encoding(
        lambda weight, scales: _decode_nvfp4(weight, scales[0].float() * scales[1].float().reshape(())), elements=2
    ),
    "int4": Encoding(_decode_int4, elements=8),
}
"""Rules by name."""


_FP16_BIAS, _E4M3_BIAS, _E4M3_NAN = 15, 7, 0x7F


def _widened(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return FP8 numbers divided by a power of two, in float32, and that power of two.

    PyTorch 2.13 converts FP8 one number at a time on a CPU, which takes four fifths of decoding. Shifted into the
    fields of float16, the bits of an FP8 number are 2 ** (7 - 15) times that number, subnormal or not, and vector
    instructions convert float16. Where a number is NaN, or a ``scale`` so large that its product with the power
    overflows, PyTorch converts, and the power is 1.
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
