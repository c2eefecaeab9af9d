"""Strict reading of the YAML files that suites or workloads are defined in.

A misspelt key must not silently fall back to a default: every key is asked for by name, and what was never asked for
is refused with the file, the line, the key and the nearest valid spelling.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from eval.errors import DefinitionError

T = TypeVar("T", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of a definition file, with the line that each key stands on.

    `line` is the mapping's own first line, 1-based. `values` maps a key to its parsed value, where nested mappings
    are sections again; `lines` maps a key to its line.
    """

    path: Path
    line: int
    values: dict[str, Any]
    lines: dict[str, int]

    def error(self, message: str, key: str | None = None) -> DefinitionError:
        """Build the error for a key of this section, or for the section as a whole."""
        line = self.line if key is None else self.lines.get(key, self.line)
        return DefinitionError(f"{self.path}:{line}: {message}")

    def only(self, known: Iterable[str]) -> None:
        """Refuse keys that are not in `known`."""
        valid = sorted(known)
        for key in self.values:
            if key not in valid:
                near = difflib.get_close_matches(key, valid, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
                raise self.error(f"unknown key {key!r}; {hint}", key)

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, checked to be a `kind`; None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"{key!r} must be {_NOUNS[kind]}, found {value!r}", key)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"{key!r} must be finite, found {value!r}", key)
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """Like `get`, for a key that must be there."""
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"missing key {key!r}, expected {_NOUNS[kind]}")
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.need(key, int) if default is None else self.get(key, int)
        if value is None:
            assert default is not None  # noqa: S101 - narrows for the type checker
            return default
        if value < least:
            raise self.error(f"{key!r} must be at least {least}, found {value}", key)
        return value

    def fraction(self, key: str) -> float | None:
        """A number in (0, 1), or None where the key is absent."""
        value = self.get(key, float)
        if value is not None and not 0 < value < 1:
            raise self.error(f"{key!r} is a fraction between 0 and 1 (0.01 is one point), found {value}", key)
        return value

    def section(self, key: str) -> Section | None:
        """A mapping of its own; None where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Section):
            raise self.error(f"{key!r} must be a mapping, found {value!r}", key)
        return value

    def sections(self, key: str) -> tuple[Section, ...]:
        """A non-empty list of mappings."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, Section) for item in value):
            raise self.error(f"{key!r} must be a non-empty list of mappings", key)
        return tuple(value)


_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def read(path: Path) -> Section:
    """Parse a definition file into its top-level section.

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
        return _section(path, node, loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DefinitionError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    finally:
        loader.dispose()


def _section(path: Path, node: yaml.MappingNode, loader: yaml.SafeLoader) -> Section:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in values:
            raise DefinitionError(f"{path}:{line}: key {key!r} appears twice, first on line {lines[key]}")
        values[key] = _value(path, value_node, loader)
        lines[key] = line
    return Section(path, node.start_mark.line + 1, values, lines)


def _value(path: Path, node: yaml.Node, loader: yaml.SafeLoader) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _section(path, node, loader)
    if isinstance(node, yaml.SequenceNode):
        return [_value(path, item, loader) for item in node.value]
    return loader.construct_object(node, deep=True)
