"""Calibration sets: which texts ranges are measured on.

    >>> load_set("ultrachat").repo
    'HuggingFaceH4/ultrachat_200k'

A set is a YAML file in `sets/`: where the texts are (a jsonl file, or a dataset of the Hub), and which column holds
what (plain text, conversations, or one turn a column). How many are used, and how long, is the recipe's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from calibration.errors import CalibrationError

FOLDER = Path(__file__).parent / "sets"

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSet:
    """Where texts come from; exactly one of `file` or `repo`, and exactly one of `text`, `messages` or `turns`.

    `file` is an absolute path to jsonl. `config` is the dataset's configuration, `split` its part. `text` names a
    column of plain text, `messages` one with a list of {role, content}; `turns` are (role, column) pairs that make one
    conversation. Conversations are rendered by the model's chat template.
    """

    name: str
    description: str
    file: Path | None = None
    repo: str | None = None
    revision: str | None = None
    config: str | None = None
    split: str | None = None
    text: str | None = None
    messages: str | None = None
    turns: tuple[tuple[str, str], ...] = ()


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the sets in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def load_set(name: str, folder: Path = FOLDER) -> CalibrationSet:
    """Load a set by its name, or by the path of a YAML file.

    Raises `CalibrationError` with the nearest existing name, or with the file and what is wrong in it.
    """
    if name.endswith((".yaml", ".yml")):
        return parse(Path(name))
    if name not in names(folder):
        near = difflib.get_close_matches(name, names(folder), n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        raise CalibrationError(f'found no calibration set "{name}", expected one of {", ".join(names(folder))}{hint}')
    return parse(folder / f"{name}.yaml")


def parse(path: Path) -> CalibrationSet:
    """Load a set from any file."""
    values = _mapping(path)
    for key in values:
        _known(path, key, [field.name for field in fields(CalibrationSet)])
    turns = values.pop("turns", {})
    if not isinstance(turns, dict):
        raise CalibrationError(f"{path}: turns: expected a mapping of roles to columns")
    for role in turns:
        _known(path, role, _ROLES)
    for key, value in (*values.items(), *turns.items()):
        if not isinstance(value, str) or not value:
            raise CalibrationError(f"{path}: {key}: found {value!r}, expected text")
    for key in ("name", "description"):
        if key not in values:
            raise CalibrationError(f"{path}: {key}: found nothing, expected text")
    if values["name"] != path.stem:
        raise CalibrationError(f'{path}: name: found "{values["name"]}", expected the name of its file, "{path.stem}"')
    given = {**values, **({"turns": turns} if turns else {})}
    _one_of(path, given, ("file", "repo"))
    _one_of(path, given, ("text", "messages", "turns"))
    if "repo" in values:
        values = {"revision": "main", "split": "train", **values}
    elif hubs := [key for key in ("revision", "config", "split") if key in values]:
        raise CalibrationError(f"{path}: {hubs[0]}: found it beside a file, expected it with a repo only")
    file = (path.parent / values.pop("file")).resolve() if "file" in values else None
    return CalibrationSet(**values, file=file, turns=tuple(turns.items()))


def _mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise CalibrationError(f"{path}: not a YAML file: {error}") from error
    if not isinstance(values, dict):
        raise CalibrationError(f"{path}: expected a mapping")
    return values


def _known(path: Path, key: object, valid: Iterable[str]) -> None:
    valid = list(valid)
    if key not in valid:
        near = difflib.get_close_matches(str(key), valid, n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        raise CalibrationError(f"{path}: {key}: found an unknown key, expected one of {', '.join(valid)}{hint}")


def _one_of(path: Path, values: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    given = [key for key in keys if key in values]
    if len(given) != 1:
        found = " with ".join(given) or "none of them"
        raise CalibrationError(f"{path}: found {found}, expected exactly one of {', '.join(keys)}")
