"""Between text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, first_line

_CONTEXT = 8  # tokens before a text that decide how it begins: a space, half a character


class Text:
    """A folder's tokenizer; ``ends`` are the tokens that end an answer, by its generation configuration."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:
        self._tokenizer, self.ends = tokenizer, ends
        self.token = cache(self._token)

    @staticmethod
    def of(folder: Path, config: Any, *, trust_remote_code: bool = False) -> Text:
        """Load it. Raises `UserError` where the folder has none."""
        from transformers import AutoTokenizer, GenerationConfig

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"{folder}: its tokenizer cannot be loaded: {first_line(error)}") from None
        found: list[Any] = [tokenizer.eos_token_id, getattr(config, "eos_token_id", None)]
        if (folder / "generation_config.json").is_file():
            found.append(GenerationConfig.from_pretrained(folder).eos_token_id)
        ends = {token for some in found for token in (some if isinstance(some, list) else [some]) if token is not None}
        return Text(tokenizer, frozenset(ends))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def added(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """What an answer adds to its prompt's text, without special tokens."""
        context = list(prompt[-_CONTEXT:])
        before, after = (
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (context, [*context, *ids])
        )
        if after.startswith(before):
            return str(after[len(before) :])
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stop_string(self, ids: Sequence[int], stop: Sequence[str]) -> str | None:
        """The string that the last of these tokens completed, the first where there are several."""
        # A token is at least one byte: what ends now began within as many tokens as the string has bytes.
        window = max(len(string.encode()) for string in stop) + 1
        tail = self._tokenizer.decode(list(ids[-window:]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return next((string for string in stop if string in tail), None)

    def _token(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))
