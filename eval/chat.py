"""Items that a server is asked through its chat endpoint, and the answers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantmint.eval.errors import DefinitionError
from quantmint.eval.harness import digest
from quantmint.eval.samples import Sample

MOST_BYTES = 1 << 24
"""Largest file of items that is read."""


@dataclass(frozen=True, slots=True)
class ChatItem:
    """One item of an endpoint that is asked by chat: the messages, the functions on offer, and the right answer.

    ``target`` is a JSON value; ``number`` is the item's place in its list, from 0.
    """

    number: int
    messages: tuple[Mapping[str, Any], ...]
    target: Any
    tools: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def prompt(self) -> str:
        """Return the text of the messages, for a reader."""
        return "\n".join(str(message["content"]) for message in self.messages)

    def sample(self, task: str, score: float) -> Sample:
        """Return the item's score on a task, with the hashes that two sides must share to be compared."""
        prompt = digest([list(self.messages), list(self.tools)])
        return Sample(task, self.number, "none", digest([prompt, self.target]), prompt, digest(self.target), score)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer of a server: the text, the function calls as (name, arguments as text), and the reason of its end.

    ``finish`` is "stop", "length" or "tool_calls"; ``tokens`` counts the tokens of the answer, thoughts included.
    """

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    tokens: int = 0

    @classmethod
    def from_choice(cls, choice: Mapping[str, Any], tokens: int) -> ChatAnswer:
        """Return the answer in an element of `choices` of a response; raises `KeyError` or `TypeError` without one.

        Thoughts that the server separated from the answer come first in the text.
        """
        message = choice["message"]
        thoughts = message.get("reasoning") or message.get("reasoning_content") or ""
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        calls = tuple((str(function["name"]), str(function["arguments"])) for function in functions)
        return cls(f"{thoughts}{message.get('content') or ''}", calls, str(choice["finish_reason"]), tokens)


def read_lines(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, object) for each line of a JSONL file, whose objects have these keys.

    Raises `DefinitionError` with file and line for a file that cannot be read, for other JSON and for other keys.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DefinitionError(f"{path}: {path.stat().st_size:,} bytes, expected at most {MOST_BYTES:,}")
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DefinitionError(f"{path}: cannot be read: {reason}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DefinitionError(f"{path}:{number}: not JSON: {error}") from error
        valid = {*keys, *optional}
        if not isinstance(row, dict) or not set(keys) <= row.keys() or not row.keys() <= valid:
            names = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)[:60]
            raise DefinitionError(
                f"{path}:{number}: found {names or 'no keys'}, expected {', '.join([*keys, *optional])}"
            )
        rows.append((number, row))
    return rows
