"""The tensors that a release holds, from its config.json alone: for planning where the weights are not here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import ceil
from typing import Any

from quantmint.calibration.encodings import BLOCK, SCALE_SUFFIX
from quantmint.pipeline.quantize.formats.checkpoint import SINGLE_NAME, TensorInfo, tensor_bytes
from quantmint.pipeline.quantize.model.encodings import quantized_by
from quantmint.pipeline.recipe.modules import declared_quantization

_LAYER = re.compile(r"^(.*\blayers\.)(\d+)\.")


def imagined_tensors(
    stored: Mapping[str, tuple[str, tuple[int, ...]]], model: Any, config: Mapping[str, Any], linear: Collection[str]
) -> dict[str, tuple[str, TensorInfo]]:
    """Lay out the tensors of a release in one file.

    ``stored`` are dtype and shape of what transformers would save of ``model``. The layers of a multi-token predictor
    that ``config`` counts are added as DeepSeek stores them; weights of the ``linear`` modules become FP8 with block
    scales where ``config`` declares that.
    """
    tensors = {**stored, **_predictor(stored, model)}
    if declared_quantization(config) is not None and quantized_by(config) is None:
        tensors = _encode(tensors, linear)
    laid_out: dict[str, tuple[str, TensorInfo]] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + tensor_bytes(dtype, shape)
        laid_out[name] = (SINGLE_NAME, TensorInfo(name, dtype, shape, position, end))
        position = end
    return laid_out


def _predictor(stored: Mapping[str, tuple[str, tuple[int, ...]]], model: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The layers of a predictor: each is a layer like the last one, with a projection, norms, embedding and head."""
    text = model.config.get_text_config()
    layers, extra = getattr(text, "num_hidden_layers", 0), getattr(text, "num_nextn_predict_layers", None) or 0
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
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


def _encode(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], linear: Collection[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Give the weights of linear modules, and those of the predictor's layers like them, FP8 with block scales."""
    lasts = {_relative(module) for module in linear}
    encoded: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and len(shape) == 2 and _relative(module) in lasts:
            encoded[name] = "F8_E4M3", shape
            encoded[name + SCALE_SUFFIX] = "F32", (ceil(shape[0] / BLOCK), ceil(shape[1] / BLOCK))
        else:
            encoded[name] = dtype, shape
    return encoded


def _relative(module: str) -> str:
    """A module's name without the number of its layer."""
    return _LAYER.sub(r"\1*.", module)
