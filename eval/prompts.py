"""Held-out prompts: texts of our own that no calibration set and no task holds, for the canary to read.

A set is a file of `prompts/`, one object a line: ``{"name": "german-letter", "text": "..."}``. `general` holds prose,
code, mathematics, tables and several languages; `tiny` is told of the world that the embedded model knows.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from eval.errors import DefinitionError

FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text, by a name that says what it is."""

    name: str
    text: str


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the sets in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.jsonl")))


def load(name: str, folder: Path = FOLDER) -> tuple[Prompt, ...]:
    """Load a set by its name.

    Raises `DefinitionError` with the nearest existing name, or with file and line of what is wrong in it.
    """
    found = names(folder)
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(found)}"
        raise DefinitionError(f"no prompts {name!r} in {folder}; {hint}")
    return parse(folder / f"{name}.jsonl")


def parse(path: Path) -> tuple[Prompt, ...]:
    """Load a set from any file."""
    prompts: dict[str, Prompt] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        prompt = _prompt(line, f"{path}:{number}")
        if prompt.name in prompts:
            raise DefinitionError(f"{path}:{number}: prompt {prompt.name!r} appears twice")
        prompts[prompt.name] = prompt
    if len(prompts) < 2:
        raise DefinitionError(f"{path}: found {len(prompts)} prompts, expected two at least: one has no interval")
    return tuple(prompts.values())


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DefinitionError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or set(row) != {"name", "text"}:
        keys = f"the keys {', '.join(map(str, row)) or 'none'}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DefinitionError(f"{where}: found {keys}, expected name and text")
    for key, value in row.items():
        if not isinstance(value, str) or not value.strip():
            raise DefinitionError(f"{where}: {key!r} must be a text that is not empty")
    return Prompt(row["name"], row["text"])
