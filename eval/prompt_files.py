"""Files that a load's prompts come from: conversations of ShareGPT, or JSON lines of one's own.

A file of JSON lines has one object a line, the columns of vLLM's dataset "custom"::

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
