"""The structure of a draft: a small model that proposes tokens for another one, of a class that transformers lacks.

EAGLE-3's and DFlash's drafts are a few decoder layers with a projection of the target's hidden states, stored under
names of their own (`midlayer.self_attn.q_proj`, `layers.0.mlp.up_proj`, `fc`). vLLM builds every matrix of theirs with
the quantization that the draft's own config.json declares, but for embeddings and head; so the names decide here what
is linear. A draft that is a whole model (vLLM's method draft_model) is read as any model is.
"""

from __future__ import annotations

import re
from pathlib import Path

from quantmint.calibration.encodings import plain_name
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import SIXTEEN_BIT, Checkpoint, open_checkpoint
from quantmint.pipeline.quantize.model.encodings import LEFTOVERS, quantized_by, source_encoding
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.structure import OUTPUT_HEAD, Structure

_CLASS = re.compile(r"eagle3|dflash", re.IGNORECASE)
_HEAD = re.compile(r"(^|\.)lm_head$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|d2t|t2d|mask_hidden)$|norm")
_NUMBERS = frozenset({*SIXTEEN_BIT, "F32"})


def is_draft(checkpoint: Checkpoint) -> bool:
    """Return whether the class of a model proposes tokens from the hidden states of another (EAGLE-3, DFlash)."""
    return any(_CLASS.search(str(name)) for name in checkpoint.config.get("architectures") or ())


def read_draft(folder: Path) -> tuple[Checkpoint, Structure]:
    """Return a draft's tensor headers and its structure, also of one that is quantized.

    Raises `UserError` for a folder without a model, and for a class that is no draft and that transformers cannot
    build.
    """
    checkpoint = open_checkpoint(folder)
    if not is_draft(checkpoint):
        return checkpoint, read_structure(folder, checkpoint.tensors)
    encoding = source_encoding(checkpoint.config, checkpoint.tensors)
    scales, linear, weights, heads = encoding.scales, {}, {}, {}
    copied = 0
    for name, (_, info) in checkpoint.tensors.items():
        if name in scales or (encoding.weights and name.endswith(LEFTOVERS)):
            continue
        module, encoded = plain_name(name).removesuffix(".weight"), encoding.weights.get(name)
        is_matrix = plain_name(name).endswith(".weight") and len(info.shape) == 2
        if is_matrix and _HEAD.search(module):
            heads[module] = OUTPUT_HEAD
        elif is_matrix and not _EMBEDDING.search(module) and (encoded is not None or info.dtype in _NUMBERS):
            elements = 1 if encoded is None else encoded.rule.elements
            linear[module] = (info.shape[0], info.shape[1] * elements)
            weights[module] = WeightSource(name, encoded=encoded)
        else:
            copied += 1
    if not linear:
        raise UserError(f"{folder}: found no linear module in this draft, expected *.weight of two dimensions.")
    leftovers = [name for name in checkpoint.tensors if name.endswith(LEFTOVERS) and name not in scales]
    structure = Structure(
        linear=linear,
        kept=heads,
        attention=(),
        parameters=sum(rows * columns for rows, columns in linear.values()),
        weights=weights,
        encoded=encoding.weights,
        dropped=tuple(leftovers if encoding.weights else ()),
        copied={"embedding, norm or table": copied},
        quantized_by=quantized_by(checkpoint.config),
        undecodable=encoding.obstacle,
    )
    return checkpoint, structure
