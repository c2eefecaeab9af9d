"""The rows of a calibration set, one at a time and in their own order: no more are read than are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, for messages, and its columns."""


def read_rows(chosen: CalibrationSet) -> Iterator[Row]:
    """The rows of a set's file or dataset.

    Raises `CalibrationError` for a file, a line or a column that is not there, when it is reached.
    """
    if chosen.file is None:
        return _dataset(chosen)
    match chosen.file.suffix:
        case ".parquet":
            return _parquet(chosen.file, chosen.columns)
        case ".txt":
            return _text(chosen.file, chosen.sample_by)
        case _:
            return _jsonl(chosen.file)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        # Only "\n" ends a line: texts may hold the other separators of Unicode unescaped.
        with path.open(encoding="utf-8", newline="\n") as stream:
            yield from enumerate(stream, start=1)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8: {error}") from error


def _jsonl(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CalibrationError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise CalibrationError(f"{path}:{number}: expected a JSON object")
        yield f"{path}:{number}", row


def _text(path: Path, sample_by: str) -> Iterator[Row]:
    for number, lines in _pieces(path, sample_by):
        text = "".join(lines).strip("\r\n")
        if text.strip():
            yield f"{path}:{number}", {"text": text}


def _pieces(path: Path, sample_by: str) -> Iterator[tuple[int, list[str]]]:
    began, held = 1, list[str]()
    for number, line in _lines(path):
        began = began if held else number
        held.append(line)
        if sample_by == "line" or (sample_by == "paragraph" and not line.strip()):
            yield began, held
            held = []
    yield began, held


def _parquet(path: Path, columns: Iterable[str]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            known = table.schema_arrow.names
            for column in columns:
                if column not in known:
                    raise CalibrationError(f"{path}: has no column {column!r}, only {', '.join(known)}")
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=list(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number} of {path}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}") from error


def _dataset(chosen: CalibrationSet) -> Iterator[Row]:
    from datasets import load_dataset
    from huggingface_hub import constants

    # Streamed, so that a thousand rows of a large dataset are not its download; what is cached needs no network.
    streaming = not constants.HF_HUB_OFFLINE
    try:
        dataset = load_dataset(
            chosen.repo, chosen.config, split=chosen.split, revision=chosen.revision, streaming=streaming
        )
        for number, row in enumerate(dataset, start=1):
            yield f"row {number} of {chosen.name}", row
    except Exception as error:  # the library raises whatever its many back ends raise
        raise CalibrationError(f"the dataset {chosen.repo}@{chosen.revision} cannot be read: {error}") from error
