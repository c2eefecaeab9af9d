"""The texts of a calibration set, conversations rendered by the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calibration.errors import CalibrationError
from calibration.rows import read_rows
from calibration.sets import CalibrationSet


def read_texts(chosen: CalibrationSet, tokenizer: Any) -> Iterator[str]:
    """The texts of a set in its own order, each read when it is asked for.

    Raises `CalibrationError` for a set without a row, and for a file, a line or a column that is not there.
    """
    place = None
    for place, row in read_rows(chosen):
        yield _text(chosen, place, row, tokenizer)
    if place is None:
        raise CalibrationError(f"the calibration set {chosen.name} is empty")


def rendered(chosen: CalibrationSet, tokenizer: Any) -> bool:
    """Whether a chat template makes the texts, which then hold their special tokens already."""
    return chosen.text is None and chosen.chat and tokenizer.chat_template is not None


def _text(chosen: CalibrationSet, place: str, row: Mapping[str, Any], tokenizer: Any) -> str:
    try:
        if chosen.text is not None:
            return str(row[chosen.text])
        if chosen.messages is not None:
            messages = row[chosen.messages]
        else:
            messages = [{"role": role, "content": row[column]} for role, column in chosen.turns]
    except KeyError as error:
        raise CalibrationError(f"{place}: has no column {error}, only {', '.join(map(str, row))}") from error
    try:
        if rendered(chosen, tokenizer):
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(str(message["content"]) for message in messages)
    except Exception as error:  # a template is a program: it raises whatever it likes
        raise CalibrationError(
            f"{place}: is no conversation that can be rendered: {type(error).__name__}: {error}"
        ) from error
