"""What a layout must know, and the two that vLLM loads.

A layout writes a model's ``quantization_config`` from a `Choice`, and reads one back into `Claims`: what the
configuration promises about each linear module and about the KV cache. `inspect` holds the promise against the files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.errors import UserError


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


def layout(name: str) -> Layout:
    """The layout of that name; raise `UserError` for one that is not there."""
    from pipeline.formats.compressed_tensors import CompressedTensors
    from pipeline.formats.quark import Quark

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
