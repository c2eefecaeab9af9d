"""Strict reading of the YAML files that suites or workloads are defined in.

A misspelt key must not silently fall back to a default: what no record of `eval.records` has is refused, with the
file, the line, the key and the nearest valid spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from eval.errors import DefinitionError
from eval.records import Record, validated

T = TypeVar("T", bound=Record)
Place = tuple[str | int, ...]
"""Where a value stands: keys of mappings and numbers of lists, from the outside in."""


@dataclass(frozen=True, slots=True)
class Document:
    """A definition file: its mapping, and the 1-based line of every place in it."""

    path: Path
    data: dict[str, Any]
    lines: dict[Place, int]

    def error(self, message: str, *place: str | int) -> DefinitionError:
        """The error for a place, told with the line of the nearest one that is there."""
        while place not in self.lines:
            place = place[:-1]
        return DefinitionError(f"{self.path}:{self.lines[place]}: {message}")

    def read(self, kind: type[T], keys: Collection[str]) -> T:
        """The whole file as a record, in which the `keys` are known; `DefinitionError` for anything else."""
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
    """Parse a definition file.

    Raises `DefinitionError` where the file is missing, is not YAML, is not a mapping, or repeats a key.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise DefinitionError(f"{path}:1: expected a mapping")
        lines: dict[Place, int] = {(): node.start_mark.line + 1}
        _lines(path, node, (), lines)
        return Document(path, loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DefinitionError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    finally:
        loader.dispose()


def _lines(path: Path, node: yaml.Node, place: Place, lines: dict[Place, int]) -> None:
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


def unknown(what: str, name: str, names: Collection[str], folder: Path) -> DefinitionError:
    """The error for a name that no file of a folder has."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
    return DefinitionError(f"no {what} {name!r} in {folder}; {hint}")
