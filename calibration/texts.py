"""The texts of a calibration set: rows of a file or of a dataset of the Hub, as text by the model's own chat template.

Rows come one at a time and in their own order: no more are read than are asked for. A branch becomes a commit first,
because ranges must say which rows they were measured on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
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
            return _plain(chosen.file, chosen.sample_by)
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


def _plain(path: Path, sample_by: str) -> Iterator[Row]:
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


_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_commit(chosen: CalibrationSet, commit_of: Callable[[str, str], str] | None = None) -> CalibrationSet:
    """The set with its revision as a commit; a file, or what is a commit already, as it is.

    ``commit_of`` is asked for a repository and a revision (None: `dataset_commit`). Raises `CalibrationError` where the
    Hub cannot be asked: rows of a branch that may have moved would be measured under a name that says nothing.
    """
    if chosen.repo is None or chosen.revision is None or _COMMIT.fullmatch(chosen.revision):
        return chosen
    return replace(chosen, revision=(commit_of or dataset_commit)(chosen.repo, chosen.revision))


@cache
def dataset_commit(repo: str, revision: str) -> str:
    """The commit of a data set's revision: within one process a branch stays where it was first found.

    Raises `CalibrationError` where the Hub cannot be asked.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    connection = HfHubHTTPError.__bases__[0]  # the root of httpx's errors, or of httpx2's
    try:
        return str(HfApi().dataset_info(repo, revision=revision).sha)
    except (HfHubHTTPError, connection, OfflineModeIsEnabled, RepositoryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CalibrationError(
            f"the dataset {repo}@{revision} cannot be resolved to a commit: {reason} "
            "(without a network, write the 40-digit commit as `revision` of the set)"
        ) from error
