"""Held-out prompts: texts of our own that no calibration set and no task holds, for the canary to read.

A set is a file of `prompts/`, one object a line: ``{"name": "german-letter", "text": "..."}``. `general` holds prose,
code, mathematics, tables and several languages; `tiny` is told of the world that the embedded model knows.

And files that a load's prompts come from: conversations of ShareGPT, or JSON lines of one's own, with one object a
line, the columns of vLLM's dataset "custom"::

    {"prompt": "What is the capital of Chad?", "output_tokens": 120}

`output_tokens`, the length of the answer, is only needed where the cell does not say `output_len`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from eval.errors import DefinitionError
from eval.records import unknown

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
    if name not in names(folder):
        raise unknown("prompts", name, names(folder), folder)
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


Kind = Literal["sharegpt", "jsonl"]
SHAREGPT_PROMPT, SHAREGPT_TOTAL = 1024, 2048
"""Tokens: vLLM leaves out the conversations that are longer (vllm/benchmarks/datasets, is_valid_sequence)."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts. `chat_template`: a line of a jsonl file is a user's turn, and not the text as it is sent."""

    kind: Kind
    path: Path
    chat_template: bool = True

    @property
    def sha256(self) -> str:
        """Of the file's bytes, in hexadecimal: what stands for the file, wherever it lies."""
        return _sha256(self.path, _stamp(self.path))


class Lines(NamedTuple):
    """What is in a file of JSON lines: `longest_answer` is the largest `output_tokens`, None where a line has none."""

    prompts: int
    longest_answer: int | None


def lines_of(path: Path) -> Lines:
    """Read a file of JSON lines. Raises `DefinitionError` with the line that is none, or that has no prompt."""
    return _lines(path, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the file does: a plan asks several times, and a file of conversations has 600 MB."""
    try:
        facts = path.stat()
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    return facts.st_mtime_ns, facts.st_size


@lru_cache(maxsize=32)
def _sha256(path: Path, _: tuple[int, int]) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@lru_cache(maxsize=32)
def _lines(path: Path, _: tuple[int, int]) -> Lines:
    lengths: list[int | None] = []
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    lengths.append(_length(f"{path}:{number}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path}: cannot be read: {error}") from error
    known = [length for length in lengths if length is not None]
    return Lines(len(lengths), max(known) if known and len(known) == len(lengths) else None)


def _length(place: str, line: str) -> int | None:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise DefinitionError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise DefinitionError(f'{place}: expected an object with "prompt", a text that is not empty')
    length = row.get("output_tokens")
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise DefinitionError(f'{place}: "output_tokens" must be a whole number of at least 1, found {length!r}')
    return length
