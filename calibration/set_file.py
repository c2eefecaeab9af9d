"""A YAML file of one mapping whose keys know their line, so that a fault is told at file:line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibration.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class SetFile:
    """Plain values, with the line of each key: top-level keys by ``(key,)``, those one deeper by ``(key, inner)``."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def fault(self, message: str, *key: str) -> CalibrationError:
        """What is wrong with a key, at its line; with the file as a whole where no key is named."""
        if not key:
            return CalibrationError(f"{self.path}: {message}")
        return CalibrationError(f"{self.path}:{self.lines.get(key, 1)}: {'.'.join(key)}: {message}")

    def require_known(self, valid: Iterable[str], *parent: str) -> None:
        """Raise `CalibrationError` for the first key of a mapping that is none of ``valid``, with the nearest one."""
        names = list(valid)
        found = self.values[parent[0]] if parent else self.values
        for key in found:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f' (did you mean "{near[0]}"?)' if near else ""
                message = f"found an unknown key, expected one of {', '.join(names)}{hint}"
                raise self.fault(message, *parent, str(key))


def read(path: Path) -> SetFile:
    """Read a set's file; raise `CalibrationError` where it is no mapping, or where a key stands twice."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise CalibrationError(f"{path}:{line}: not a YAML file: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise CalibrationError(f"{path}: not a YAML file: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise CalibrationError(f"{path}: expected a mapping")
    lines = dict(_lines(path, root, ()))
    values = yaml.constructor.SafeConstructor().construct_document(root)
    return SetFile(path, {str(key): value for key, value in values.items()}, lines)


def _lines(path: Path, node: yaml.MappingNode, parent: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], int]]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise CalibrationError(f"{path}:{line}: expected a word as key")
        if key.value in seen:
            raise CalibrationError(f"{path}:{line}: {key.value}: stands in line {seen[key.value]} already")
        seen[key.value] = line
        yield (*parent, key.value), line
        if isinstance(value, yaml.MappingNode):
            yield from _lines(path, value, (*parent, key.value))
