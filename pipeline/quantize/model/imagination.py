"""A release's tensors and structure from its config.json alone: for planning where the weights are not here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from quantmint.calibration.decoders import BLOCK
from quantmint.calibration.encodings import BLOCKS, SCALE_SUFFIX, Stored, is_block_fp8, plain_name
from quantmint.pipeline.quantize.formats.checkpoint import (
    SINGLE_NAME,
    Checkpoint,
    TensorInfo,
    read_config,
    tensor_bytes,
)
from quantmint.pipeline.quantize.formats.layout import layout, weight_tensors
from quantmint.pipeline.quantize.model.builder import meta_model, stored_tensors
from quantmint.pipeline.quantize.model.classifier import TensorClassifier
from quantmint.pipeline.quantize.model.encodings import LEFTOVERS, input_rounding, quantized_by, source_encoding
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.modules import declared_quantization

_LAYER = re.compile(r"^(.*\blayers\.)(\d+)\.")


def imagine(folder: Path, *, trust_remote_code: bool = False) -> tuple[Checkpoint, Structure]:
    """Return the checkpoint, in one file, that a model's ``config.json`` stands for, and its structure.

    It is for planning where the weights are not here: names, dtypes and sizes are those of the release.
    """
    model = meta_model(folder, trust_remote_code=trust_remote_code)
    config = read_config(folder)
    stored = stored_tensors(model)
    plain = _imagined_tensors(stored, model, config, ())
    structure = TensorClassifier(model, {**config, "quantization_config": None}, plain).structure()
    tensors = _imagined_tensors(stored, model, config, structure.linear)
    checkpoint = Checkpoint(folder, config, tuple(sorted({file for file, _ in tensors.values()})), tensors)
    encoding = source_encoding(config, tensors)
    stored_as = {plain_name(name): name for name in encoding.weights}
    weights = {
        module: replace(
            weight,
            tensor=stored_as[weight.tensor],
            encoded=encoding.weights[stored_as[weight.tensor]],
            transposed=False,  # only of stacks, whose encodings are not
        )
        if weight.tensor in stored_as
        else weight
        for module, weight in structure.weights.items()
    }
    scales = encoding.scales
    leftovers = [name for name in tensors if name.endswith(LEFTOVERS) and name not in scales]
    return checkpoint, replace(
        structure,
        encoded=encoding.weights,
        weights=weights,
        dropped=tuple(leftovers if encoding.weights else ()),
        quantized_by=quantized_by(config),
        undecodable=encoding.obstacle,
        rounds_inputs=input_rounding(config) is not None,
    )


def _imagined_tensors(
    stored: Mapping[str, Stored], model: Any, config: Mapping[str, Any], linear: Collection[str]
) -> dict[str, tuple[str, TensorInfo]]:
    """Lay out the tensors of a release in one file; return the file and entry of each by name.

    ``stored`` are dtype and shape of what transformers would save of ``model``. The layers of a multi-token predictor
    that ``config`` counts are added as DeepSeek stores them; weights of the ``linear`` modules are stored as ``config``
    declares, in the encodings that sources are decoded from.
    """
    tensors = {**stored, **_predictor(stored, model)}
    declared = declared_quantization(config)
    if declared is not None and linear:
        is_stacked = declared.get("quant_method") == "mxfp4"
        is_v4 = "expert_dtype" in config and is_block_fp8(declared)
        stores = _stored_in_v4(config, linear) if is_v4 else _stored_by_kind(declared, linear)
        tensors = _encode_stacks(tensors) if is_stacked else _encode(tensors, stores)
    laid_out: dict[str, tuple[str, TensorInfo]] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + tensor_bytes(dtype, shape)
        laid_out[name] = (SINGLE_NAME, TensorInfo(name, dtype, shape, position, end))
        position = end
    return laid_out


def _predictor(stored: Mapping[str, Stored], model: Any) -> dict[str, Stored]:
    """Return the tensors of a multi-token predictor's layers, with dtype and shape.

    Each is a layer like the last one, with a projection, norms, embedding and head.
    """
    text = model.config.get_text_config()
    layers, extra = getattr(text, "num_hidden_layers", 0), getattr(text, "num_nextn_predict_layers", None) or 0
    tensors: dict[str, Stored] = {}
    for number in range(layers, layers + extra):
        root = ""
        for name, (dtype, shape) in stored.items():
            match = _LAYER.match(name)
            if match is not None and int(match[2]) == layers - 1:
                root = f"{match[1]}{number}."
                tensors[f"{root}{name[match.end() :]}"] = dtype, shape
        if root:
            hidden, vocabulary = text.hidden_size, text.vocab_size
            shapes = {
                "eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,),
                "embed_tokens": (vocabulary, hidden), "shared_head.head": (vocabulary, hidden),
                "shared_head.norm": (hidden,),
            }  # fmt: skip
            tensors |= {f"{root}{name}.weight": ("BF16", shape) for name, shape in shapes.items()}
    return tensors


Tensors = Mapping[str, Stored]
"""Dtype and shape by the name of a tensor."""
Store = Callable[[str, tuple[int, int]], Tensors]
"""Returns the tensors of a linear module, given its name and the shape [O, I] of its weight."""


def _encode(tensors: Tensors, stores: Mapping[str, Store]) -> dict[str, Stored]:
    """Replace the weights of linear modules, and those of the predictor's layers like them, by what is stored of them.

    ``stores`` are by a module's name without the number of its layer.
    """
    encoded: dict[str, Stored] = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        store = stores.get(_relative(module)) if name.endswith(".weight") and len(shape) == 2 else None
        encoded |= {name: (dtype, shape)} if store is None else store(module, (shape[0], shape[1]))
    return encoded


def _encode_stacks(tensors: Tensors) -> dict[str, Stored]:
    """Replace stacks of experts [E, I, O] in 16 bit by the MXFP4 that gpt-oss stores of them."""
    encoded: dict[str, Stored] = {}
    for name, (dtype, shape) in tensors.items():
        if len(shape) == 3:
            experts, inputs, outputs = shape
            scales = (experts, outputs, inputs // 32)
            encoded |= {f"{name}{BLOCKS}": ("U8", (*scales, 16)), f"{name}_scales": ("U8", scales)}
        else:
            encoded[name] = dtype, shape
    return encoded


def _stored_by_kind(declared: Mapping[str, Any], linear: Collection[str]) -> dict[str, Store]:
    """Return how each quantized kind of linear module is stored by a ``quantization_config``.

    A kind is a module's name without the number of its layer; where layers differ, as in schemes, the last one counts.
    """
    method = str(declared.get("quant_method"))
    if method in ("compressed-tensors", "quark"):
        form = layout(method)
        schemes, weights = form.claims(declared, linear).schemes, form.weights(declared, linear)
        return {_relative(module): _store_of(method, schemes[module], weights[module]) for module in weights}
    if method == "modelopt":
        store = {"NVFP4": _store_modelopt_nvfp4, "FP8": _store_fp8}.get(str(declared.get("quant_algo")))
        ignored = [*(declared.get("ignore") or ()), *(declared.get("exclude_modules") or ())]
        modules = [name for name in linear if not any(fnmatchcase(name, pattern) for pattern in ignored)]
        return {} if store is None else {_relative(module): store for module in modules}
    if method == "fp8":
        store = _store_blocks if is_block_fp8(declared) else _store_fp8
        return {_relative(module): store for module in linear}
    if method in ("awq", "gptq"):
        excluded = declared.get("modules_to_not_convert") or ()
        store = partial(_store_turned, method, declared.get("group_size"))
        return {_relative(module): store for module in linear if not any(part in module for part in excluded)}
    return {}


def _store_of(method: str, scheme: str | None, weights: Mapping[str, Any]) -> Store:
    """Return how a layout stores a module of a scheme; of one that is not in the table, INT4 in groups of any size."""
    group = weights.get("group_size")

    def store(module: str, shape: tuple[int, int]) -> Tensors:
        if scheme is not None:
            return {
                part.name: (part.dtype, part.shape) for part in weight_tensors(method, scheme, module, shape, "BF16")
            }
        if method != "compressed-tensors" or (weights.get("type"), weights.get("num_bits")) != ("int", 4):
            return {f"{module}.weight": ("BF16", shape)}
        rows, columns = shape
        groups = _groups(columns, group)
        zero_point: Stored = ("I32", (ceil(rows / 8), groups))
        return {
            f"{module}.weight_packed": ("I32", (rows, columns // 8)),
            f"{module}.weight_scale": ("BF16", (rows, groups)),
            f"{module}.weight_shape": ("I64", (2,)),
            **({} if weights.get("symmetric", True) else {f"{module}.weight_zero_point": zero_point}),
        }

    return store


def _groups(columns: int, size: object) -> int:
    """Return the number of groups of inputs that share a scale; one where ``size`` is -1, or no number."""
    return -(-columns // size) if isinstance(size, int) and size > 0 else 1


def _store_turned(method: str, group: object, module: str, shape: tuple[int, int]) -> Tensors:
    """Return what AWQ or GPTQ stores of a weight, in groups of ``group`` inputs."""
    rows, columns = shape
    groups = _groups(columns, group)
    order = {f"{module}.g_idx": ("I32", (columns,))} if method == "gptq" else {}
    return {
        f"{module}.qweight": ("I32", (columns // 8, rows) if method == "gptq" else (columns, rows // 8)),
        f"{module}.qzeros": ("I32", (groups, rows // 8)),
        f"{module}.scales": ("F16", (groups, rows)),
        **order,
    }


def _stored_in_v4(config: Mapping[str, Any], linear: Collection[str]) -> dict[str, Store]:
    """Return how DeepSeek V4 stores each kind of linear module: routed experts in MXFP4 if config.json says so."""
    is_fp4 = config.get("expert_dtype") == "fp4"
    return {_relative(module): partial(_store_v4, is_fp4 and ".experts." in module) for module in linear}


def _store_v4(is_fp4: bool, module: str, shape: tuple[int, int]) -> Tensors:
    rows, columns = shape
    if is_fp4:
        return {f"{module}.weight": ("I8", (rows, columns // 2)), f"{module}.scale": ("F8_E8M0", (rows, columns // 32))}
    blocks = (ceil(rows / BLOCK), ceil(columns / BLOCK))
    return {f"{module}.weight": ("F8_E4M3", shape), f"{module}.scale": ("F8_E8M0", blocks)}


def _store_blocks(module: str, shape: tuple[int, int]) -> Tensors:
    blocks = (ceil(shape[0] / BLOCK), ceil(shape[1] / BLOCK))
    return {f"{module}.weight": ("F8_E4M3", shape), f"{module}.weight{SCALE_SUFFIX}": ("F32", blocks)}


def _store_fp8(module: str, shape: tuple[int, int]) -> Tensors:
    scales = {f"{module}.{name}": ("F32", ()) for name in ("weight_scale", "input_scale")}
    return {f"{module}.weight": ("F8_E4M3", shape), **scales}


def _store_modelopt_nvfp4(module: str, shape: tuple[int, int]) -> Tensors:
    rows, columns = shape
    scales = {f"{module}.{name}": ("F32", ()) for name in ("weight_scale_2", "input_scale")}
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        **scales,
    }


def _relative(module: str) -> str:
    """Return a module's name without the number of its layer."""
    return _LAYER.sub(r"\1*.", module)
