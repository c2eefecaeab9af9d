"""Calibration sets: which texts ranges are measured on.

    >>> load_set("ultrachat").repo
    'HuggingFaceH4/ultrachat_200k'

A set is a YAML file in `sets/`: where the texts are (a file, or a dataset of the Hub), which column holds what (plain
text, conversations, or one turn a column), and how much of it is used where the recipe says nothing else.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from quantmint.calibration.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class SetFile:
    """Plain values of a set's file, with each key's line: ``(key,)`` at the top level, ``(key, inner)`` one deeper."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def fault(self, message: str, *key: str) -> CalibrationError:
        """Return an error with ``message`` about a key, at its line; about the whole file where no key is given."""
        if not key:
            return CalibrationError(f"{self.path}: {message}")
        return CalibrationError(f"{self.path}:{self.lines.get(key, 1)}: {'.'.join(key)}: {message}")

    def require_known(self, valid: Iterable[str], *parent: str) -> None:
        """Raise `CalibrationError` for the first key that is not in ``valid``; the message suggests the nearest one.

        The keys are those of the file, or of the mapping under the key ``parent``.
        """
        names = list(valid)
        found = self.values[parent[0]] if parent else self.values
        for key in found:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f' (did you mean "{near[0]}"?)' if near else ""
                message = f"found an unknown key, expected one of {', '.join(names)}{hint}"
                raise self.fault(message, *parent, str(key))


def _read(path: Path) -> SetFile:
    """Read a set's file. Raises `CalibrationError` where it cannot be read, is not YAML or is not a mapping."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        raise CalibrationError(f"{place}: not a YAML file: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise CalibrationError(f"{path}: expected a mapping")
    values = yaml.constructor.SafeConstructor().construct_document(root)
    return SetFile(path, {str(key): value for key, value in values.items()}, dict(_lines(root, ())))


def _lines(node: yaml.Node, parent: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        yield (*parent, str(key.value)), key.start_mark.line + 1
        yield from _lines(value, (*parent, str(key.value)))


FOLDER = Path(__file__).parent / "sets"
SUFFIXES = (".jsonl", ".parquet", ".txt")
"""Kinds of local files."""
SAMPLE_BY = ("line", "paragraph", "document")
"""What one sample of a text file is; the words are those of the library `datasets`, blank lines part paragraphs."""

_ROLES = ("system", "user", "assistant")
_COUNTS = {"samples": 1, "sequence_length": 1, "seed": 0}  # with the least value of each
_FLAGS = ("chat", "packing")
_HUB = ("revision", "config", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSet:
    """The source of texts; exactly one of `file` or `repo`, and exactly one of `text`, `messages` or `turns`.

    `file` is an absolute path; `sample_by` cuts a .txt file. `config` is the dataset's configuration, `split` its part.
    `text` names a column of plain text, `messages` one with a list of {role, content}; `turns` are (role, column)
    pairs that make one conversation. With `chat`, conversations are rendered by the model's chat template, where it
    has one; without, their contents are joined.

    `samples`, `sequence_length`, `packing` and `seed` are defaults of a recipe's calibration section; None where the
    set has no opinion.
    """

    name: str
    description: str
    file: Path | None = None
    sample_by: str = "line"
    repo: str | None = None
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    text: str | None = None
    messages: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    chat: bool = True
    samples: int | None = None
    sequence_length: int | None = None
    packing: bool | None = None
    seed: int | None = None

    @property
    def defaults(self) -> dict[str, int | bool]:
        """Return the fields that are defaults of a recipe's calibration section, without those that are None."""
        given = {name: getattr(self, name) for name in DEFAULTS}
        return {name: value for name, value in given.items() if value is not None}


DEFAULTS = ("samples", "sequence_length", "packing", "seed")
"""Fields that only stand in for what a recipe leaves out; they say nothing about the texts."""


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Return the names of the sets in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load_set(name: str, folder: Path = FOLDER) -> CalibrationSet:
    """Load a set by its name in ``folder``, or by the path of a YAML file.

    Raises `CalibrationError` with the nearest existing name, or with the file and line of what is wrong in it.
    """
    if name.endswith((".yaml", ".yml")):
        return parse(Path(name))
    if name not in names(folder):
        near = difflib.get_close_matches(name, names(folder), n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        raise CalibrationError(f'found no calibration set "{name}", expected one of {", ".join(names(folder))}{hint}')
    return parse(folder / f"{name}.yaml")


def parse(path: Path) -> CalibrationSet:
    """Load a set from a YAML file, whose stem must be the set's name.

    Raises `CalibrationError` with the file and line of what is wrong in it.
    """
    document = _read(path)
    document.require_known(field.name for field in fields(CalibrationSet))
    values = dict(document.values)
    turns = values.pop("turns", {})
    if not isinstance(turns, dict):
        raise document.fault("expected a mapping of roles to columns", "turns")
    if turns:
        document.require_known(_ROLES, "turns")
    _check_types(document, values, turns)
    for key in ("name", "description"):
        if key not in values:
            raise document.fault(f"{key}: found nothing, expected text")
    if values["name"] != path.stem:
        raise document.fault(f'found "{values["name"]}", expected the name of its file, "{path.stem}"', "name")
    _one_of(document, ("file", "repo"), values)
    if "repo" in values:
        if "sample_by" in values:
            raise document.fault("found it beside a repo, expected it with a .txt file only", "sample_by")
        values = {"revision": "main", "split": "train", **values}
    else:
        values = _local(document, values)
    _one_of(document, ("text", "messages", "turns"), {**values, **({"turns": turns} if turns else {})})
    if "chat" in values and "text" in values:
        raise document.fault("found it beside text, expected it with messages or turns only", "chat")
    return CalibrationSet(**values, turns=tuple(turns.items()))


def _check_types(document: SetFile, values: Mapping[str, Any], turns: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in _COUNTS:
            if type(value) is not int or value < _COUNTS[key]:
                raise document.fault(f"found {value!r}, expected a whole number of at least {_COUNTS[key]}", key)
        elif key in _FLAGS:
            if type(value) is not bool:
                raise document.fault(f"found {value!r}, expected true or false", key)
        elif not isinstance(value, str) or not value:
            raise document.fault(f"found {value!r}, expected text", key)
    for role, column in turns.items():
        if not isinstance(column, str) or not column:
            raise document.fault(f"found {column!r}, expected text", "turns", role)


def _local(document: SetFile, values: dict[str, Any]) -> dict[str, Any]:
    """Check the values of a set whose texts are a local file; return them with the file's absolute path.

    Raises `CalibrationError` for keys or values that a local file cannot have.
    """
    for key in _HUB:
        if key in values:
            raise document.fault("found it beside a file, expected it with a repo only", key)
    file = (document.path.parent / values["file"]).resolve()
    if file.suffix not in SUFFIXES:
        raise document.fault(f'found "{values["file"]}", expected a file in {", ".join(SUFFIXES)}', "file")
    if file.suffix == ".txt":
        values = {"text": "text", **values}  # it has no columns
        if values.get("sample_by", "line") not in SAMPLE_BY:
            message = f'found "{values["sample_by"]}", expected one of {", ".join(SAMPLE_BY)}'
            raise document.fault(message, "sample_by")
    elif "sample_by" in values:
        raise document.fault(f"found it beside {file.name}, expected it with a .txt file only", "sample_by")
    return {**values, "file": file}


def _one_of(document: SetFile, keys: tuple[str, ...], given: Mapping[str, Any]) -> None:
    found = [key for key in keys if key in given]
    if len(found) != 1:
        what = " with ".join(found) or "none of them"
        message = f"found {what}, expected exactly one of {', '.join(keys)}"
        raise document.fault(message, found[-1]) if found else document.fault(message)
