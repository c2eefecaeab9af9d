"""Records: frozen dataclasses that are written as JSON and read back, each value of the type that its field declares.

    @dataclass(frozen=True, slots=True)
    class Machine(Record):
        clock_mhz: float | None = None

    Machine.from_json({"clock_mhz": 1980.0}).to_json()

A record may come from anywhere, so reading is strict: no unknown field, no text for a number, no NaN (which compares
as neither within a limit nor beyond it). `pydantic` checks and converts; making a record in a program checks nothing.

YAML files that define suites or workloads are read as strictly: a misspelt key must not silently fall back to a
default, so it is refused with the file, the line, the key and the nearest valid spelling. Whatever could make a small
file expensive (aliases that multiply, deep nesting) is refused too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml

from quantmint.eval.errors import DefinitionError, MeasurementError

SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's safe loader, which takes a tenth of PyYAML's time; PyYAML's own where it was built without libyaml."""

if TYPE_CHECKING:
    from typing import Self

    from pydantic import ConfigDict, TypeAdapter


class Record:
    """The base class of all records, which are frozen dataclasses; JSON holds the value of an enumeration's member."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of the fields that `json.dumps` accepts."""
        return asdict(self, dict_factory=_plain)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read back a mapping that `to_json` returned. Raises `MeasurementError`, which names the field at fault."""
        return checked(cls, data)


class Part(Record):
    """A record that holds some fields of the data it is read from; further fields in the data are ignored."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = {**Record.__pydantic_config__, "extra": "ignore"}


T = TypeVar("T", bound=Record)


def checked(kind: type[T], data: Any) -> T:
    """Return data as a record of the class `kind`. Raises `MeasurementError`, which names the field at fault."""
    from pydantic import ValidationError

    try:
        read: T = validated(kind, data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"{part}: " for part in (".".join(map(str, first["loc"])),) if part)
        value = f", found {first['input']!r:.80}"
        raise MeasurementError(f"not a {kind.__name__}: {place}{first['msg']}{value}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise MeasurementError(f"not a {kind.__name__}: {error}") from error
    return read


def to_columns(kind: type[Record], rows: Sequence[Record]) -> dict[str, list[Any]]:
    """Return records as a mapping from field name to a list of values, one per record.

    It takes far fewer bytes than a mapping for each record.
    """
    return {field.name: [getattr(row, field.name) for row in rows] for field in fields(kind)}  # type: ignore[arg-type]


def to_rows(columns: Any) -> list[dict[str, Any]]:
    """Return a mapping for each record in the columns of `to_columns`; the values are not checked.

    Raises `MeasurementError` for lists of unequal length, and for data that is no mapping of lists.
    """
    try:
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    except (AttributeError, TypeError, ValueError) as error:
        raise MeasurementError(f"not a mapping of columns of equal length: {error}") from error


def validated(kind: Any, data: Any) -> Any:
    """Return data as an instance of the type `kind`.

    Raises pydantic's `ValidationError` for a wrong field, and `TypeError` or `ValueError` for data that JSON cannot
    hold.
    """
    return _adapter(kind).validate_json(json.dumps(data))


def _plain(values: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in values}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


MOST_BYTES = 1 << 20
MOST_LEVELS = 100
"""Mappings and lists in each other; the interpreter's own limit may be any that a library set."""
MOST_VALUES = 20_000
"""Values of a definition file, each alias counted as often as it is used: `pipeline.recipe` reads as much."""

Place = tuple[str | int, ...]
"""Where a value stands: keys of mappings and numbers of lists, from the outside in."""


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed definition file: its mapping, and the 1-based line of each value by its keys and list indices."""

    path: Path
    data: dict[str, Any]
    lines: dict[Place, int]

    def error(self, message: str, *place: str | int) -> DefinitionError:
        """Return the error for the value at `place`, with the line of that value or of the nearest one around it."""
        while place not in self.lines:
            place = place[:-1]
        return DefinitionError(f"{self.path}:{self.lines[place]}: {message}")

    def read(self, kind: type[T], keys: Collection[str]) -> T:
        """Return the whole file as a record of the class `kind`.

        `keys` are all valid keys, from which the message for an unknown key takes the nearest. Raises `DefinitionError`
        with the line and key at fault.
        """
        from pydantic import ValidationError

        try:
            read: T = validated(kind, self.data)
        except ValidationError as error:
            # A key that is unknown first: another one is often missing for it.
            found = error.errors(include_url=False)
            first = min(found, key=lambda fault: fault["type"] != "unexpected_keyword_argument")
            place: Place = first["loc"]
            match first["type"]:
                case "missing":
                    raise self.error(f"missing key {place[-1]!r}", *place[:-1]) from error
                case "unexpected_keyword_argument":
                    near = difflib.get_close_matches(str(place[-1]), keys, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(keys))}"
                    raise self.error(f"unknown key {place[-1]!r}; {hint}", *place) from error
            while place not in self.lines:  # less what pydantic calls the members of a union
                place = place[:-1]
            key = next((part for part in reversed(place) if isinstance(part, str)), "")
            raise self.error(f"{key!r}: {first['msg']}, found {first['input']!r:.80}", *place) from error
        except (TypeError, ValueError) as error:
            raise self.error(f"not a definition: {error}") from error
        return read


def read(path: Path) -> Document:
    """Parse a YAML definition file.

    Raises `DefinitionError` if the file cannot be read, is too large or nested too deep, is not YAML, is not a mapping,
    or repeats a key.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DefinitionError(f"{path}: {path.stat().st_size:,} bytes, expected at most {MOST_BYTES:,}")
        node = _compose(path, path.read_text(encoding="utf-8"))
        if not isinstance(node, yaml.MappingNode):
            raise DefinitionError(f"{path}:1: expected a mapping")
        lines: dict[Place, int] = {(): node.start_mark.line + 1}
        _lines(path, node, (), lines)
        return Document(path, yaml.constructor.SafeConstructor().construct_document(node), lines)
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError:
        raise DefinitionError(f"{path}: values are nested too deep, or in themselves") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DefinitionError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # characters or numbers without a place
        raise DefinitionError(f"{path}: not valid YAML: {error}") from error


def _compose(path: Path, text: str) -> yaml.Node | None:
    """Return the root node of a text, composed by libyaml, or where that refuses it by PyYAML, for its messages.

    libyaml takes a tenth of the time. Raises `DefinitionError` for values that are nested too deep.
    """
    try:
        _require_shallow(path, text, SAFE_LOADER)
        return yaml.compose(text, SAFE_LOADER)
    except yaml.YAMLError:
        _require_shallow(path, text, yaml.SafeLoader)
        return yaml.compose(text, yaml.SafeLoader)


def is_shallow(text: str, levels: int, loader: Any) -> bool:
    """Return whether a YAML text has at most so many ``levels`` of collections, without composing them.

    libyaml overflows the stack on deep ones, and PyYAML takes the square of their number. Raises `yaml.YAMLError`.
    """
    level = 0
    for event in yaml.parse(text, loader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > levels:
            return False
    return True


def _require_shallow(path: Path, text: str, loader: Any) -> None:
    """Raise `DefinitionError` for values that are nested too deep."""
    if not is_shallow(text, MOST_LEVELS, loader):
        raise DefinitionError(f"{path}: values are nested too deep, or in themselves")


def _lines(path: Path, node: yaml.Node, place: Place, lines: dict[Place, int]) -> None:
    """Add the line of each value below a node to `lines`, for an alias at each of its uses.

    Raises `DefinitionError` for a repeated key, and for values that are too many or nested too deep.
    """
    if len(place) > MOST_LEVELS:
        raise DefinitionError(f"{path}: values are nested too deep, or in themselves")
    if len(lines) > MOST_VALUES:
        raise DefinitionError(f"{path}: more than {MOST_VALUES:,} values, counting aliases")
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            at, line = (*place, str(key_node.value)), key_node.start_mark.line + 1
            if at in lines:
                raise DefinitionError(f"{path}:{line}: key {at[-1]!r} appears twice, first on line {lines[at]}")
            lines[at] = line
            _lines(path, value, at, lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines[(*place, number)] = value.start_mark.line + 1
            _lines(path, value, (*place, number), lines)


def is_path(name: str) -> bool:
    """Return whether the name of a definition is the path of a YAML file, by its ending."""
    return name.endswith((".yaml", ".yml"))


def names(folder: Path, ending: str = "yaml") -> tuple[str, ...]:
    """Return the sorted names of the definitions in a folder: its files with this ending, without it."""
    return tuple(sorted(path.stem for path in folder.glob(f"*.{ending}")))


def file_of(what: str, name: str, folder: Path, ending: str = "yaml") -> Path:
    """Return the path of the file that defines `name`.

    Raises `DefinitionError` with the nearest existing name; `what` is the kind of definition in its message.
    """
    available = names(folder, ending)
    if name not in available:
        near = difflib.get_close_matches(name, available, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(available)}"
        raise DefinitionError(f"no {what} {name!r} in {folder}; {hint}")
    return folder / f"{name}.{ending}"
