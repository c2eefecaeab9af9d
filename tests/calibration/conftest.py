from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quantmint.calibration.ranges import Ranges


class Letters:
    """A tokenizer of one token a character, with special tokens where they are asked for."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.bos_token_id] * add_special_tokens + [ord(letter) for letter in text]}


@pytest.fixture
def letters() -> Any:
    return Letters()


class Listener:
    """Remembers what a calibration tells."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.done, self.total, self.unit = 0, 0, ""

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        self.total, self.unit = total, unit
        yield self.advance

    def advance(self, count: int) -> None:
        self.done += count

    def say(self, message: str) -> None:
        self.said.append(message)

    def warn(self, message: str) -> None:
        self.warned.append(message)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="session")
def same() -> Callable[[Ranges, Ranges], None]:
    """``same(one, other)``: equal to the last bit, in the same order."""

    def check(one: Ranges, other: Ranges) -> None:
        for table in ("inputs", "keys", "values", "latents"):
            mine, theirs = getattr(one, table), getattr(other, table)
            assert list(mine) == list(theirs)
            for name, amax in mine.items():
                assert torch.equal(amax, theirs[name]), f"{name}: {amax} is not {theirs[name]}"

    return check
