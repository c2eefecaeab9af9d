"""Faults of a recipe, each at its place in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantmint.pipeline.base.errors import RecipeError

#: Where a value is, from the root: keys of mappings, numbers of list items.
YamlPath = tuple[str | int, ...]

_SHOWN = 60


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """A line and a column of a file, both counted from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


OPTIONS = Place("options", 0, 0)
"""Where everything stands in a recipe that is the options of a command."""
_OPTIONS = {("quantization", "overrides"): "--override", ("calibration", "set"): "--calibration"}
_SECTIONS = ("source", "trust_remote_code", "quantization", "calibration")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong; `message` says what was found, then what was expected."""

    place: Place
    path: YamlPath
    message: str

    def __str__(self) -> str:
        if self.place == OPTIONS:
            return f"{option_of(self.path)}: {self.message.replace('a calibration section', '--calibration SET')}"
        field = dotted(self.path)
        return f"{self.place}: {field}: {self.message}" if field else f"{self.place}: {self.message}"


def refuse(faults: Iterable[Fault]) -> None:
    """Raise one `RecipeError` with every fault, in the order of the file; do nothing where there is none.

    Of options only what there is an option for is looked at.
    """
    told = {fault for fault in faults if fault.place != OPTIONS or (fault.path and fault.path[0] in _SECTIONS)}
    lines = [str(fault) for fault in sorted(told, key=lambda fault: (fault.place, str(fault)))]
    if lines:
        raise RecipeError("\n".join(dict.fromkeys(lines)))


def option_of(path: YamlPath) -> str:
    """The option that says what a recipe says at a path: ``--sequence-length`` for calibration.sequence_length."""
    if path[0] == "source":
        return "SRC"
    field = path[:2]
    return _OPTIONS.get((str(field[0]), str(field[-1])), f"--{str(field[-1]).replace('_', '-')}")


def dotted(path: YamlPath) -> str:
    """The way to a field as people write it: `quantization.overrides[0].scheme`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def shown(value: Any) -> str:
    """A value as it stands in YAML, cut short; collections by their kind."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value[:_SHOWN]}{"..." if len(value) > _SHOWN else ""}"'
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case _:
            return str(value)
