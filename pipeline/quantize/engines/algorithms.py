"""The table of algorithms: what they do to weights, which engine runs them for which schemes, and their records.

    >>> algorithm("gptq").refusal("quark", "w4a16")
    >>> algorithm("gptq").refusal("stream", "int8_w8a8")
    'engine stream has no gptq for int8_w8a8: llmcompressor and quark have'

The table is `algorithms.yaml`. "none" is plain rounding, which every engine does. Of a checkpoint, Quark lists its
algorithms in ``quantization_config``; llm-compressor writes its modifiers into ``recipe.yaml`` beside the weights, and
what it rotated into ``transform_config`` as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import yaml

from quantmint.pipeline.base.data import load_table, rows
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint

#: What of the model differs from its 16-bit source, beside rounding: see the head of `algorithms.yaml`.
Alters = Literal["nothing", "rounding", "channels", "everything"]
_ALTERS: tuple[Alters, ...] = ("nothing", "rounding", "channels", "everything")


@dataclass(frozen=True, slots=True)
class Support:
    """An engine's support of an algorithm: the ``schemes`` that it can make.

    ``record`` is the name of the algorithm that the library writes into a checkpoint; ``package`` a distribution that
    the library needs in addition, None where it needs none.
    """

    schemes: tuple[str, ...]
    record: str
    package: str | None = None


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row of the table of algorithms.

    ``alters`` says how the model differs from its source beside rounding, ``calibrated`` whether samples are needed,
    ``engines`` maps engines to their support, and ``harms`` names schemes that the algorithm may make worse.
    """

    name: str
    description: str
    alters: Alters
    calibrated: bool
    engines: Mapping[str, Support] = field(default_factory=dict)
    harms: tuple[str, ...] = ()

    def refusal(self, engine: str, scheme_name: str) -> str | None:
        """Return why an engine cannot run the algorithm for a scheme, in one clause that names the engines that can.

        None where the engine can run it.
        """
        if self.name == "none" or (engine in self.engines and scheme_name in self.engines[engine].schemes):
            return None
        able = [name for name, support in self.engines.items() if scheme_name in support.schemes]
        others = f"{' and '.join(able)} {'has' if len(able) == 1 else 'have'}" if able else "no engine has"
        return f"engine {engine} has no {self.name} for {scheme_name}: {others}"

    def caution(self, schemes: Collection[str]) -> str | None:
        """Return a caution if any of ``schemes`` may get worse by the algorithm; None otherwise."""
        harmed = [name for name in self.harms if name in schemes]
        if not harmed:
            return None
        return (
            f"{self.name} may harm {' and '.join(harmed)}: SmolLM2-135M loses less by rounding to the nearest, "
            "and the least by gptq where a scheme has it (docs/notes/measurements.md)"
        )


@cache
def table() -> Mapping[str, Algorithm]:
    """Return all algorithms by name, in the order of the file."""
    return rows(Algorithm, load_table(__file__, "algorithms.yaml"))


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of that name. Raises `KeyError` where there is none."""
    return table()[name]


RECIPE = "recipe.yaml"
_ENGINES = {"quark": "quark", "compressed-tensors": "llmcompressor"}
_PLAIN = frozenset({"QuantizationModifier"})  # rounds to the nearest


def record(names: Sequence[str], checkpoint_format: str) -> tuple[list[str], str | None]:
    """Return how a library records the named algorithms in a layout: their names there, and the text of `RECIPE`.

    The text is None for Quark, which has no such file. Raises `KeyError` for an algorithm that the library does not
    have.
    """
    records = [table()[name].engines[_ENGINES[checkpoint_format]].record for name in names]
    text = yaml.safe_dump({"default_stage": {"default_modifiers": {name: {} for name in records}}}, sort_keys=False)
    return records, None if checkpoint_format == "quark" else text


def recorded_algorithms(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the algorithms that a checkpoint records, in the order of its record; () where its format is unknown.

    Names are those of the table, or the library's own where no row has it. Raises `UserError` for a ``recipe.yaml``
    that cannot be read.
    """
    declared: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    method = str(declared.get("quant_method"))
    if method not in _ENGINES:
        return ()
    records = _of_quark(declared) if method == "quark" else _of_llmcompressor(checkpoint, declared)
    engine = _ENGINES[method]
    our_names = {row.engines[engine].record: name for name, row in table().items() if engine in row.engines}
    return tuple(our_names.get(record, record) for record in dict.fromkeys(records))


def recorded_alterations(checkpoint: Checkpoint) -> Alters:
    """Return how a checkpoint differs from its source beside rounding; "everything" if it records an unknown algorithm.

    Of several algorithms the farthest-reaching counts. Raises `UserError` for a ``recipe.yaml`` that cannot be read.
    """
    names = recorded_algorithms(checkpoint)
    alterations = [table()[name].alters if name in table() else "everything" for name in names]
    return max(alterations, key=_ALTERS.index, default="nothing")


def _of_quark(declared: Mapping[str, Any]) -> Iterable[str]:
    entries = declared.get("algo_config") or ()
    for entry in (entries,) if isinstance(entries, Mapping) else entries:
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
