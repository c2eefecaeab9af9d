"""The layouts that vLLM loads, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import UserError
from pipeline.quantize.formats.compressed_tensors import CompressedTensors
from pipeline.quantize.formats.layout import Layout
from pipeline.quantize.formats.quark import Quark


def layout(name: str) -> Layout:
    """The layout of that name; raise `UserError` for one that is not there."""

    layouts: dict[str, Layout] = {known.name: known for known in (CompressedTensors(), Quark())}
    if name not in layouts:
        raise UserError(f"unknown checkpoint format {name!r}; known: {', '.join(layouts)}.")
    return layouts[name]


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a model's ``config.json`` declares."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        raise UserError("config.json has no quantization_config: this is not a quantized checkpoint.")
    return layout(str(declared.get("quant_method")))
