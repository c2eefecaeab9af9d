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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from quantmint.eval import records
from quantmint.eval.errors import DefinitionError, MeasurementError
from quantmint.eval.records import Part, Record, T

FOLDER = Path(__file__).parent / "prompts"


Words = Annotated[str, Field(pattern=r"\S")]


@dataclass(frozen=True, slots=True)
class Prompt(Record):
    """One text, with a name that describes it."""

    name: Words
    text: Words


@dataclass(frozen=True, slots=True)
class _Line(Part):
    """A line of a user's prompt file; further keys in it are ignored."""

    prompt: Words
    output_tokens: Annotated[int, Field(ge=1)] | None = None


def _read(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Yield (1-based line number, record) for each line of a file that is not blank.

    Raises `DefinitionError` for a file that cannot be read, and for a line that is no such record, with its number.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, kind.from_json(json.loads(line))
    except (OSError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise DefinitionError(f"{path}:{number}: not JSON: {error}") from error
    except MeasurementError as error:
        raise DefinitionError(f"{path}:{number}: {error}") from error


def load(name: str, folder: Path = FOLDER) -> tuple[Prompt, ...]:
    """Return the prompts of a set, by its name in `folder`.

    Raises `DefinitionError` with the nearest existing name, or with file and line of a fault.
    """
    return parse(records.file_of("prompts", name, folder, "jsonl"))


def parse(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a file, at least two with different names; raise `DefinitionError` for any other file."""
    prompts: dict[str, Prompt] = {}
    for number, prompt in _read(path, Prompt):
        if prompt.name in prompts:
            raise DefinitionError(f"{path}:{number}: prompt {prompt.name!r} appears twice")
        prompts[prompt.name] = prompt
    if len(prompts) < 2:
        raise DefinitionError(f"{path}: found {len(prompts)} prompts, expected two at least: one has no interval")
    return tuple(prompts.values())


Kind = Literal["sharegpt", "jsonl"]
SHAREGPT_PROMPT, SHAREGPT_TOTAL = 1024, 2048
"""Tokens: vLLM leaves out the conversations that are longer (vllm/benchmarks/datasets, is_valid_sequence)."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A file of prompts for a load.

    With `chat_template` a line of a jsonl file is a user's turn; without it, it is sent as it stands.
    """

    kind: Kind
    path: Path
    chat_template: bool = True

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file's bytes in hexadecimal, which identifies it wherever it lies."""
        return _sha256(self.path, _stamp(self.path))


class Lines(NamedTuple):
    """The summary of a file of JSON lines.

    `prompts` counts them; `longest_answer` is the largest `output_tokens`, in tokens, None if a line has none.
    """

    prompts: int
    longest_answer: int | None


def lines_of(path: Path) -> Lines:
    """Return the summary of a file of JSON lines; a file that did not change is read once per process.

    Raises `DefinitionError` for a file that cannot be read, and for a line that is not JSON or has no prompt.
    """
    return _lines(path, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """Return a file's modification time in ns and its size in bytes, the key of the caches: a file may have 600 MB.

    Raises `DefinitionError` for a file that cannot be read.
    """
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
    lengths = [line.output_tokens for _, line in _read(path, _Line)]
    counted = [length for length in lengths if length is not None]
    return Lines(len(lengths), max(counted) if counted and len(counted) == len(lengths) else None)
