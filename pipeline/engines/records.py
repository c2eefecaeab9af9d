"""Which algorithms a checkpoint says that it was made with.

Quark lists them in ``quantization_config``; llm-compressor writes its modifiers into ``recipe.yaml`` beside the
weights, and what it rotated into ``transform_config`` as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from pipeline.engines.algorithms import Alters, names_of, strongest
from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint

RECIPE = "recipe.yaml"
_ENGINES = {"quark": "quark", "compressed-tensors": "llmcompressor"}
_PLAIN = frozenset({"QuantizationModifier"})  # rounds to the nearest


def recorded_algorithms(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Names of the table of algorithms, in the order of the record; a library's own name where no row has it.

    Raises `UserError` for a ``recipe.yaml`` that cannot be read.
    """
    declared: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    method = str(declared.get("quant_method"))
    if method not in _ENGINES:
        return ()
    records = _of_quark(declared) if method == "quark" else _of_llmcompressor(checkpoint, declared)
    return names_of(_ENGINES[method], dict.fromkeys(records))


def recorded_alterations(checkpoint: Checkpoint) -> Alters:
    """How a checkpoint differs from its 16-bit source beside rounding, by what it records."""
    return strongest(recorded_algorithms(checkpoint))


def _of_quark(declared: Mapping[str, Any]) -> Iterable[str]:
    found = declared.get("algo_config") or ()
    for entry in (found,) if isinstance(found, Mapping) else found:
        yield str(entry.get("name"))


def _of_llmcompressor(checkpoint: Checkpoint, declared: Mapping[str, Any]) -> Iterable[str]:
    path = checkpoint.folder / RECIPE
    if path.is_file():
        try:
            # Composed and not constructed: the library leaves tags of Python objects in it.
            root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"{path}: it does not say how the checkpoint was made: {error}") from None
        for _, stage in _entries(root):
            for _, modifiers in _entries(stage):
                yield from (name for name, _ in _entries(modifiers) if name not in _PLAIN)
    if (declared.get("transform_config") or {}).get("config_groups"):
        yield "SpinQuantModifier"


def _entries(node: yaml.Node | None) -> Iterable[tuple[str, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((str(key.value), value) for key, value in node.value)
