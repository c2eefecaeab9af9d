"""The table of quantization schemes.

    >>> scheme("mxfp4").bits_per_weight
    4.25
    >>> scheme("fp8_block").formats
    ('compressed-tensors',)

The table is `schemes.yaml`; the tensors that a format stores for a scheme are in `pipeline.quantize.formats.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from quantmint.pipeline.base.data import load_table, rows

Format = Literal["compressed-tensors", "quark"]
Engine = Literal["stream", "llmcompressor", "quark"]

#: The layouts that an engine writes.
WRITES: Mapping[str, tuple[Format, ...]] = MappingProxyType(
    {
        "stream": ("compressed-tensors", "quark"),
        "llmcompressor": ("compressed-tensors",),
        "quark": ("quark",),
    }
)

#: Bits of one scale, by its type.
SCALE_BITS: Mapping[str, int] = MappingProxyType({"e8m0": 8, "e4m3": 8, "bf16": 16})

Element = Literal["e4m3", "e2m1", "e2m3", "e3m2", "int8", "int4"]

#: The name of each element type for people: in tables, in tags of a model card, in the words of a runtime.
ELEMENT_KINDS: Mapping[Element, str] = MappingProxyType(
    {"e4m3": "FP8", "e2m1": "FP4", "e2m3": "FP6", "e3m2": "FP6", "int8": "INT8", "int4": "INT4"}
)
#: The beginning of a format's name that its groups' scales give it.
_FAMILIES: Mapping[str, str] = MappingProxyType({"e8m0": "MX", "e4m3": "NV", "bf16": ""})


def element_title(element: Element) -> str:
    """Return the name of an element type, with its bits where another type has the same name: "FP8", "FP6 e2m3"."""
    kind = ELEMENT_KINDS[element]
    return kind if list(ELEMENT_KINDS.values()).count(kind) == 1 else f"{kind} {element}"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The stored format of a weight of shape [out_features, in_features].

    `bits` counts the elements only. `group` is the (rows, columns) that share a scale, where the granularity is `group`
    or `block`. `scale` is the type of a scale; bf16 stands for the model's own 16-bit type.
    """

    dtype: Element
    bits: int
    granularity: Literal["per_tensor", "per_channel", "group", "block"]
    scale: Literal["bf16", "e8m0", "e4m3"]
    group: tuple[int, int] | None = None


MxScales = Literal["even", "up"]
"""Rounding of a microscaling group's scale. even: up where the largest magnitude would round to the next power of two;
numbers of up to 7/6 of the largest element are cut. up: the least power of two with which no number is cut."""
MX_GROUP = 32
"""Elements that share a scale in the OCP microscaling formats."""


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The format of a quantized layer's inputs: unchanged ("none"), or ``dtype`` with static or dynamic scales.

    ``group`` is the number of inputs that share a scale, where the granularity is group. ``mx_scales`` is how scales of
    a microscaling format are rounded; the table leaves it at "even", since the metal decides (`activations_on`).
    """

    kind: Literal["none", "static", "dynamic"]
    granularity: Literal["per_tensor", "per_token", "group"] | None = None
    dtype: Element | None = None
    group: int | None = None
    mx_scales: MxScales = "even"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One quantization scheme of the table.

    ``formats`` are the checkpoint formats that vLLM loads it from. ``refused`` are pairs of another format and why vLLM
    does not load it; ``lacks`` are pairs of an engine and a format that this engine cannot make it in.
    """

    name: str
    description: str
    weight: WeightFormat
    activations: ActivationFormat
    formats: tuple[str, ...]
    engines: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()
    lacks: tuple[tuple[str, str], ...] = ()

    @property
    def needs_ranges(self) -> bool:
        """Whether the inputs' scales are static, so that every layer's inputs are measured on a calibration set."""
        return self.activations.kind == "static"

    @property
    def input_scale_role(self) -> str | None:
        """Role of the tensor with a layer's static scale of inputs; None for a scheme without one."""
        if not self.needs_ranges:
            return None
        return "input_global_scale" if self.activations.group else "input_scale"

    @property
    def is_mx(self) -> bool:
        """Whether the scheme is OCP microscaling (MX): groups of 32 elements share a power of two as scale."""
        return self.weight.scale == "e8m0"

    @property
    def weight_format(self) -> str:
        """Name of the weights' format, such as "FP8", "MXFP4", "NVFP4" or "INT4"."""
        return _FAMILIES[self.weight.scale] + ELEMENT_KINDS[self.weight.dtype]

    @property
    def input_divisor(self) -> int:
        """Divisor of in_features: 32 for MX, 16 for NVFP4, 128 for blocks and INT4 groups, else 1."""
        return self.weight.group[1] if self.weight.group else 1

    @property
    def row_divisor(self) -> int:
        """Divisor of out_features where vLLM stacks the rows of several modules: 128 for blocks, else 1."""
        return self.weight.group[0] if self.weight.group and self.weight.granularity == "block" else 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight with its share of group or block scales; scales per channel or tensor are not counted."""
        if self.weight.group is None:
            return float(self.weight.bits)
        return self.weight.bits + SCALE_BITS[self.weight.scale] / math.prod(self.weight.group)

    def stored_bits(self, rows: int, columns: int) -> int:
        """Return the bits of a weight of shape [rows, columns] with all of its scales."""
        high, wide = {"per_tensor": (rows, columns), "per_channel": (1, columns)}.get(
            self.weight.granularity, self.weight.group or (1, 1)
        )
        scales = math.ceil(rows / high) * math.ceil(columns / wide)
        return rows * columns * self.weight.bits + scales * SCALE_BITS[self.weight.scale]

    def refusal(self, engine: str, checkpoint_format: str) -> str | None:
        """Return in one clause why an engine does not make the scheme in a checkpoint format; None when it does."""
        if checkpoint_format not in self.formats:
            return f"there is no {self.name} in {checkpoint_format}: {dict(self.refused)[checkpoint_format]}"
        if engine not in self.engines:
            return f"engine {engine} has no {self.name}"
        if checkpoint_format not in WRITES[engine]:
            return f"engine {engine} does not write {checkpoint_format}"
        if (engine, checkpoint_format) in self.lacks:
            return f"engine {engine} has no {self.name} in {checkpoint_format}"
        return None

    def makers(self, checkpoint_format: str) -> tuple[str, ...]:
        """Return the engines that make the scheme in a checkpoint format."""
        return tuple(engine for engine in self.engines if self.refusal(engine, checkpoint_format) is None)


@cache
def table() -> Mapping[str, Scheme]:
    """Return every scheme by name, in the order of the file."""
    return rows(Scheme, load_table(__file__, "schemes.yaml"), "refused", "lacks")


def scheme(name: str) -> Scheme:
    """Return the scheme of that name. Raises `KeyError` where there is none."""
    return table()[name]


def activations_on(name: str, mx_scales: MxScales = "even") -> ActivationFormat:
    """Return the format of a scheme's inputs, with the scales of microscaling groups rounded as ``mx_scales`` says."""
    row = scheme(name).activations
    return replace(row, mx_scales=mx_scales) if row.group == MX_GROUP else row


def has_mx_activations(schemes: Iterable[str]) -> bool:
    """Return whether any of the schemes rounds inputs in a microscaling format when it is served."""
    return any(scheme(name).activations.group == MX_GROUP for name in schemes)
