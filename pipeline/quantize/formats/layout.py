"""What a layout must know, and the tensors that each stores for a quantized module, from the table in ``tensors.yaml``.

A layout writes a model's ``quantization_config`` from a `Choice`, and reads one back into `Claims`: what the
configuration promises about each linear module and about the KV cache. `inspect` holds the promise against the files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import ceil
from typing import Any, Protocol

import yaml

from pipeline.base.errors import UserError
from pipeline.quantize.formats.checkpoint import tensor_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """What was done to a model.

    ``schemes`` maps each quantized linear module to its scheme; ``kept`` are the modules with a two-dimensional
    weight that stay in 16 bit, routers included, because vLLM must be told about each of them; ``kv_cache`` is
    whether static FP8 scales are stored for the attention modules, ``kv_per_head`` whether there is one a KV head.
    """

    schemes: Mapping[str, str]
    kept: tuple[str, ...]
    kv_cache: bool
    kv_per_head: bool = False

    @property
    def default(self) -> str:
        """The scheme of the most modules; the first by name where two are as frequent."""
        names = list(self.schemes.values())
        return max(sorted(set(names)), key=names.count)


@dataclass(frozen=True, slots=True)
class Claims:
    """What a ``quantization_config`` promises: a scheme, or None for 16 bit, per module; None also for an unknown one.

    ``unknown`` holds descriptions of settings that are not in the table of schemes, by module.
    """

    schemes: Mapping[str, str | None]
    unknown: Mapping[str, str]
    kv_cache: bool


class Layout(Protocol):
    """A checkpoint format."""

    name: str

    def quantization_config(self, choice: Choice) -> dict[str, Any]:
        """The value of ``quantization_config`` in ``config.json``."""
        ...

    def claims(self, config: Mapping[str, Any], modules: Collection[str]) -> Claims:
        """What such a value promises about these linear modules."""
        ...

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """The names of the K and the V scale of an attention module."""
        ...

    def kv_scale_shape(self, heads: int | None = None) -> tuple[int, ...]:
        """The shape of a KV scale: one for a layer, or one for each of its ``heads``.

        Raises `UserError` where the format has no scales by head.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that belongs in a checkpoint; ``role`` is its name's last part in the format's table."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on disk, bytes."""
        return tensor_bytes(self.dtype, self.shape)


@cache
def _table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    text = resources.files("pipeline.quantize.formats").joinpath("tensors.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = yaml.safe_load(text)
    return table


def stores(checkpoint_format: str, scheme: str) -> bool:
    """Whether the format has a layout for the scheme."""
    return scheme in _table().get(checkpoint_format, {})


def weight_tensors(
    checkpoint_format: str, scheme: str, module: str, shape: tuple[int, int], scale_dtype: str
) -> tuple[StoredTensor, ...]:
    """What is stored for a linear module whose 16-bit weight is ``shape`` = [O, I].

    Raises `UserError` where the format has no layout for the scheme.
    """
    if not stores(checkpoint_format, scheme):
        known = ", ".join(sorted(_table().get(checkpoint_format, {})))
        raise UserError(f"the format {checkpoint_format} has no layout for {scheme}; it has: {known}.")
    return tuple(
        StoredTensor(
            f"{module}.{role}",
            role,
            scale_dtype if entry["dtype"] == "scale" else entry["dtype"],
            tuple(_dimension(token, shape) for token in entry["shape"]),
        )
        for role, entry in _table()[checkpoint_format][scheme].items()
    )


def _dimension(token: str | int, shape: tuple[int, int]) -> int:
    if isinstance(token, int):
        return token
    product, _, divisor = token.partition("/")
    symbol, _, factor = product.partition("*")
    value = {"O": shape[0], "I": shape[1]}[symbol] * int(factor or 1)
    return ceil(value / int(divisor)) if divisor else value
