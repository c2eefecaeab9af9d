"""The table of quantization schemes, with the arithmetic of their sizes.

    >>> ptpc = scheme("ptpc_fp8")
    >>> ptpc.weight_bytes(4096, 14336) + ptpc.scale_bytes("compressed-tensors", 4096, 14336)
    58728448
    >>> scheme("mxfp4").bits_per_weight
    4.25

The table is `schemes.yaml`. Its numbers decide what a checkpoint weighs before a byte of it is made, so they say what
lies on disk and not what a kernel computes with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import yaml

Format = Literal["compressed-tensors", "quark"]
Engine = Literal["stream", "llmcompressor", "quark"]

#: Bytes of one scale, by its type on disk.
SCALE_BYTES = MappingProxyType({"e8m0": 1, "bf16": 2, "f32": 4})
#: Where FP8 scales that are not part of the weight (inputs, KV cache) are kept.
RANGE_SCALE_DTYPE: Mapping[str, str] = MappingProxyType({"compressed-tensors": "bf16", "quark": "f32"})


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a weight of shape [out_features, in_features] is stored.

    `bits` counts the elements only. `group` is the (rows, columns) that share a scale, where the granularity is
    `group` or `block`. `scale_dtypes` holds (format, type on disk) pairs.
    """

    dtype: Literal["e4m3", "e2m1"]
    bits: int
    granularity: Literal["per_tensor", "per_channel", "group", "block"]
    scale_dtypes: tuple[tuple[str, str], ...]
    group: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """What the inputs of a quantized layer become: nothing, or a type with static or run-time scales."""

    kind: Literal["none", "static", "dynamic"]
    granularity: Literal["per_tensor", "per_token", "group"] | None = None
    dtype: Literal["e4m3", "e2m1"] | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """One row of the table."""

    name: str
    description: str
    weight: WeightFormat
    activations: ActivationFormat
    engines: tuple[str, ...]
    planned: tuple[str, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """Checkpoint formats that have a layout for the scheme."""
        return tuple(name for name, _ in self.weight.scale_dtypes)

    @property
    def needs_ranges(self) -> bool:
        """Whether the inputs of every layer must be measured on a calibration set."""
        return self.activations.kind == "static"

    @property
    def is_mx(self) -> bool:
        """Whether it is an OCP microscaling scheme: groups of 32 with a power of two as their scale."""
        return any(dtype == "e8m0" for _, dtype in self.weight.scale_dtypes)

    @property
    def input_divisor(self) -> int:
        """What in_features must be divisible by: 32 for MX, 128 for blocks, else 1."""
        return self.weight.group[1] if self.weight.group else 1

    @property
    def bits_per_weight(self) -> float:
        """Bits of one weight with its share of the scales; scales per channel or tensor weigh nothing in it."""
        if self.weight.group is None:
            return float(self.weight.bits)
        _, dtype = self.weight.scale_dtypes[0]
        return self.weight.bits + 8 * SCALE_BYTES[dtype] / math.prod(self.weight.group)

    def weight_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes of the weight tensor; two 4-bit elements share a byte of a row."""
        return out_features * math.ceil(in_features * self.weight.bits / 8)

    def scale_count(self, out_features: int, in_features: int) -> int:
        """Number of weight scales."""
        match self.weight.granularity:
            case "per_tensor":
                return 1
            case "per_channel":
                return out_features
            case _:
                rows, columns = self.weight.group or (1, 1)
                return math.ceil(out_features / rows) * math.ceil(in_features / columns)

    def scale_bytes(self, checkpoint_format: str, out_features: int, in_features: int) -> int:
        """Bytes of the weight's scales, plus the input scale where activations are static.

        Raises `KeyError` for a format that has no layout for the scheme.
        """
        size = SCALE_BYTES[dict(self.weight.scale_dtypes)[checkpoint_format]]
        total = size * self.scale_count(out_features, in_features)
        return total + SCALE_BYTES[RANGE_SCALE_DTYPE[checkpoint_format]] if self.needs_ranges else total

    def refusal(self, engine: str) -> str | None:
        """Why an engine does not make the scheme, in one sentence; None when it does."""
        if engine in self.engines:
            return None
        if engine in self.planned:
            return f"engine {engine} does not make {self.name} yet"
        return f"engine {engine} has no {self.name}"


@cache
def table() -> Mapping[str, Scheme]:
    """Every scheme by name, in the order of the file."""
    rows = yaml.safe_load(resources.files("pipeline").joinpath("schemes.yaml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _scheme(name, row) for name, row in rows.items()})


def scheme(name: str) -> Scheme:
    """The scheme of that name; `KeyError` where there is none."""
    return table()[name]


def _scheme(name: str, row: dict[str, Any]) -> Scheme:
    weight = dict(row["weight"])
    scales, group = weight.pop("scale"), weight.pop("group", None)
    return Scheme(
        name=name,
        description=row["description"],
        weight=WeightFormat(
            **weight, scale_dtypes=tuple(scales.items()), group=None if group is None else (group[0], group[1])
        ),
        activations=ActivationFormat(**row["activations"]),
        engines=tuple(row["engines"]),
        planned=tuple(row["planned"]),
    )
