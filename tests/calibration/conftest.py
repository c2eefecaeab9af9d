from __future__ import annotations

from typing import Any

import pytest


class Letters:
    """A tokenizer of one token a character, with special tokens where they are asked for."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.bos_token_id] * add_special_tokens + [ord(letter) for letter in text]}


@pytest.fixture
def letters() -> Any:
    return Letters()
