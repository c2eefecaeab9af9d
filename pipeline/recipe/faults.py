"""Faults of a recipe, each with its position in a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quantmint.pipeline.base.errors import RecipeError

#: Path of a value from the root: keys of mappings, indices of list items.
YamlPath = tuple[str | int, ...]

_SHOWN = 60


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A line and a column of a file, both counted from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


OPTIONS = Position("options", 0, 0)
"""Position of every value in a recipe that is made of a command's options."""
_OPTIONS = {("quantization", "overrides"): "--override", ("calibration", "set"): "--calibration"}
_SECTIONS = ("source", "trust_remote_code", "quantization", "calibration")


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a recipe; `message` says what was found, then what was expected."""

    place: Position
    path: YamlPath
    message: str

    def __str__(self) -> str:
        if self.place == OPTIONS:
            return f"{option_of(self.path)}: {self.message.replace('a calibration section', '--calibration SET')}"
        field = dotted(self.path)
        return f"{self.place}: {field}: {self.message}" if field else f"{self.place}: {self.message}"


def refuse(faults: Iterable[Fault]) -> None:
    """Raise one `RecipeError` with every fault, in the order of the file; do nothing without faults.

    Of a recipe that stands for a command's options, only faults in fields that have an option are reported.
    """
    relevant = {fault for fault in faults if fault.place != OPTIONS or (fault.path and fault.path[0] in _SECTIONS)}
    lines = [str(fault) for fault in sorted(relevant, key=lambda fault: (fault.place, str(fault)))]
    if lines:
        raise RecipeError("\n".join(dict.fromkeys(lines)))


def option_of(path: YamlPath) -> str:
    """Return the command-line option for a field of a recipe: ``--sequence-length`` for calibration.sequence_length."""
    if path[0] == "source":
        return "MODEL"
    field = path[:2]
    return _OPTIONS.get((str(field[0]), str(field[-1])), f"--{str(field[-1]).replace('_', '-')}")


def dotted(path: YamlPath) -> str:
    """Return a field's path as text: `quantization.overrides[0].scheme`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def shown(value: Any) -> str:
    """Return a value as YAML writes it, shortened to 60 characters; for a collection, its kind."""
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
