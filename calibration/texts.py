"""The texts of a calibration set, conversations rendered by the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet


def read_texts(chosen: CalibrationSet, tokenizer: Any, *, limit: int = 20_000) -> list[str]:
    """All texts of a set, at most ``limit`` of a dataset of the Hub, in its own order.

    Raises `CalibrationError` for a file, a line or a column that is not there.
    """
    rows = _rows_of_file(chosen.file) if chosen.file is not None else _rows_of_dataset(chosen, limit)
    texts = [_text(chosen, number, row, tokenizer) for number, row in enumerate(rows, start=1)]
    if not texts:
        raise CalibrationError(f"the calibration set {chosen.name} is empty")
    return texts


def _rows_of_file(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        # Not `splitlines`: JSON may hold the other separators of Unicode unescaped.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise CalibrationError(f"{path}:{number}: expected a JSON object")
        yield row


def _rows_of_dataset(chosen: CalibrationSet, limit: int) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(
            chosen.repo, chosen.config, split=chosen.split, revision=chosen.revision, streaming=False
        )
    except Exception as error:  # the library raises whatever its many back ends raise
        raise CalibrationError(f"the dataset {chosen.repo}@{chosen.revision} cannot be loaded: {error}") from error
    yield from dataset.select(range(min(limit, len(dataset))))


def _text(chosen: CalibrationSet, number: int, row: Mapping[str, Any], tokenizer: Any) -> str:
    try:
        if chosen.text is not None:
            return str(row[chosen.text])
        if chosen.messages is not None:
            messages = row[chosen.messages]
        else:
            messages = [{"role": role, "content": row[column]} for role, column in chosen.turns]
    except KeyError as error:
        raise CalibrationError(
            f"row {number} of {chosen.name} has no column {error}, only {', '.join(map(str, row))}"
        ) from error
    try:
        if tokenizer.chat_template is None:
            return "\n".join(str(message["content"]) for message in messages)
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program: it raises whatever it likes
        raise CalibrationError(
            f"row {number} of {chosen.name} is no conversation that can be rendered: {type(error).__name__}: {error}"
        ) from error
