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
    """One text, by a name that says what it is."""

    name: Words
    text: Words


@dataclass(frozen=True, slots=True)
class _Line(Part):
    """A line of a file of one's own, which may say more than a load asks."""

    prompt: Words
    output_tokens: Annotated[int, Field(ge=1)] | None = None


def _read(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """The objects of a file with the numbers of their lines; `DefinitionError` with the line that is none."""
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
    """Load a set by its name.

    Raises `DefinitionError` with the nearest existing name, or with file and line of what is wrong in it.
    """
    return parse(records.file_of("prompts", name, folder, "jsonl"))


def parse(path: Path) -> tuple[Prompt, ...]:
    """Load a set from any file."""
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
    """A file of prompts. `chat_template`: a line of a jsonl file is a user's turn, and not the text as it is sent."""

    kind: Kind
    path: Path
    chat_template: bool = True

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file's bytes in hexadecimal, which identifies it wherever it lies."""
        return _sha256(self.path, _stamp(self.path))


class Lines(NamedTuple):
    """A file of JSON lines: `longest_answer` is the largest `output_tokens`, None where a line has none."""

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
    lengths = [line.output_tokens for _, line in _read(path, _Line)]
    counted = [length for length in lengths if length is not None]
    return Lines(len(lengths), max(counted) if counted and len(counted) == len(lengths) else None)
