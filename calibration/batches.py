"""Calibration text as samples of tokens: the same texts, tokenizer and settings give the same samples everywhere.

No sample is ever padded, so that no padding token can widen a range.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.lazy import torch
from quantmint.calibration.sets import CalibrationSet

Row = tuple[str, Mapping[str, Any]]
"""Where a row stands, for messages, and its columns."""


def read_rows(chosen: CalibrationSet) -> Iterator[Row]:
    """Return an iterator over the rows of a set's file or dataset: where a row stands, for messages, and its columns.

    Raises `CalibrationError` during iteration for a file or dataset that cannot be read, and for a line that is not
    JSON.
    """
    if chosen.file is None:
        return _dataset(chosen)
    match chosen.file.suffix:
        case ".parquet":
            return _parquet(chosen.file)
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
    began, lines = 1, list[str]()
    for number, line in _lines(path):
        began = began if lines else number
        lines.append(line)
        if sample_by == "line" or (sample_by == "paragraph" and not line.strip()):
            yield began, lines
            lines = []
    yield began, lines


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches(batch_size=256) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
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
    """Yield the texts of a set in the order of its rows; rows are read only when they are needed.

    Conversations are rendered by the tokenizer's chat template, see `rendered`. Raises `CalibrationError` for a set
    without rows, for a file or column that is not there, and for a conversation that cannot be rendered.
    """
    for place, said in _contents(chosen):
        yield _text(chosen, place, said, tokenizer)


def _contents(chosen: CalibrationSet) -> Iterator[tuple[str, Any]]:
    """Yield the place and the content of each row. Raises `CalibrationError` for an empty set."""
    place = None
    for place, row in read_rows(chosen):
        yield place, _said(chosen, place, row)
    if place is None:
        raise CalibrationError(f"the calibration set {chosen.name} is empty")


def require_texts(chosen: CalibrationSet, *, samples: int, packing: bool) -> None:
    """Raise `CalibrationError` where a set's file cannot be read, lacks a column, is empty, or has too few texts.

    Without ``packing`` there must be a text for each of the ``samples``. At most ``samples`` rows are read. Sets from
    the Hub are not checked.
    """
    if chosen.file is None:
        return
    texts = sum(1 for _ in islice(_contents(chosen), samples))
    if not packing and texts < samples:
        raise CalibrationError(f"{chosen.file}: found {texts:,} texts, expected one for each of {samples:,} samples")


def rendered(chosen: CalibrationSet, tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template makes a set's texts, and so adds the special tokens itself."""
    return chosen.text is None and chosen.chat and tokenizer.chat_template is not None


def _said(chosen: CalibrationSet, place: str, row: Mapping[str, Any]) -> Any:
    """Return a row's text, or its messages. Raises `CalibrationError` for a missing column or a text that is null."""
    try:
        if chosen.text is not None:
            if row[chosen.text] is None:
                raise CalibrationError(f"{place}: {chosen.text} is null, expected text")
            return str(row[chosen.text])
        if chosen.messages is not None:
            return row[chosen.messages]
        return [{"role": role, "content": row[column]} for role, column in chosen.turns]
    except KeyError as error:
        raise CalibrationError(f"{place}: has no column {error}, only {', '.join(map(str, row))}") from error


def _text(chosen: CalibrationSet, place: str, messages: Any, tokenizer: Any) -> str:
    if isinstance(messages, str):
        return messages
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
    """Return the set with its revision resolved to a commit; a local set, or one at a commit already, is unchanged.

    ``commit_of`` maps a repository and a revision to a commit (None: `dataset_commit`). Raises `CalibrationError` where
    the Hub cannot be asked: a branch may have moved, so its name alone does not identify the rows.
    """
    if chosen.repo is None or chosen.revision is None or _COMMIT.fullmatch(chosen.revision):
        return chosen
    return replace(chosen, revision=(commit_of or dataset_commit)(chosen.repo, chosen.revision))


@cache
def dataset_commit(repo: str, revision: str) -> str:
    """Return the commit of a dataset's revision, asked of the Hub once per process.

    Raises `CalibrationError` where the Hub cannot be asked.
    """
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(repo, revision=revision).sha)
    except hub_errors() as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CalibrationError(
            f"the dataset {repo}@{revision} cannot be resolved to a commit: {reason} "
            "(without a network, write the 40-digit commit as `revision` of the set)"
        ) from error


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that the Hub's client raises: its own, those of its HTTP library, and `OSError`."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    # The HTTP library is httpx, from huggingface_hub 2 on httpx2; the Hub's error derives from the root of its errors.
    return HfHubHTTPError, HfHubHTTPError.__bases__[0], OfflineModeIsEnabled, RepositoryNotFoundError, OSError


WINDOW = 1024
"""Texts that are put in a seeded order together: what is read of a large dataset is at most one window too much."""


def samples_of(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    packing: bool,
    seed: int,
    special_tokens: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Return ``samples`` token sequences, int64 [n] each, of texts that are tokenized in an order decided by ``seed``.

    With ``packing`` the texts are joined, each ended by the tokenizer's end token if it has one, and cut into blocks of
    ``sequence_length``. Without, each text is one sample, truncated to ``sequence_length`` tokens, as in
    llm-compressor's examples; texts without a token are skipped. ``special_tokens`` is False for rendered
    conversations, whose template has written them already. Raises `CalibrationError` where the texts are too few or too
    short.
    """
    if not packing:
        tokenized = (tokenizer(text, add_special_tokens=special_tokens)["input_ids"] for text in _shuffled(texts, seed))
        cut = (ids[:sequence_length] for ids in tokenized)
        sequences = tuple(torch.tensor(ids, dtype=torch.int64) for ids in islice(filter(len, cut), samples))
        if len(sequences) < samples:
            raise CalibrationError(
                f"the calibration set has {len(sequences):,} texts; {samples:,} samples without packing need one each: "
                f"ask for at most {len(sequences):,}"
            )
        return sequences
    needed = samples * sequence_length
    stream: list[int] = []
    for ids in ended_texts(texts, tokenizer, seed, special_tokens=special_tokens):
        stream += ids
        if len(stream) >= needed:
            break
    if len(stream) < needed:
        raise CalibrationError(
            f"the calibration texts make {len(stream):,} tokens; "
            f"{samples} samples of {sequence_length} need {needed:,}: ask for at most {len(stream) // sequence_length}"
        )
    return tuple(torch.tensor(stream[:needed], dtype=torch.int64).reshape(samples, sequence_length))


def ended_texts(texts: Iterable[str], tokenizer: Any, seed: int, *, special_tokens: bool = True) -> Iterator[list[int]]:
    """Yield the token ids of each text in an order decided by ``seed``, ended by the tokenizer's end token if it has
    one."""
    end = tokenizer.eos_token_id
    for text in _shuffled(texts, seed):
        ids = list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])
        yield [*ids, end] if end is not None and (not ids or ids[-1] != end) else ids


def _shuffled(texts: Iterable[str], seed: int) -> Iterator[str]:
    """Yield the texts in an order decided by ``seed``, shuffled within windows of `WINDOW` texts."""
    numbers = _random_numbers(seed)
    rest = iter(texts)
    while window := list(islice(rest, WINDOW)):
        for index in _permutation(len(window), numbers):
            yield window[index]


def _permutation(count: int, numbers: Iterator[int]) -> list[int]:
    """Return the integers 0 to ``count`` - 1 in an order that follows from ``numbers``, random integers of 32 bits.

    Fisher-Yates shuffle, as NumPy 1.17 to 2.4 does it: a number is masked to the bits of the largest index that is
    wanted, and drawn again where it is larger. NumPy guarantees the stream of random numbers across versions, but not
    its shuffle.
    """
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        mask = (1 << last.bit_length()) - 1
        while (other := next(numbers) & mask) > last:
            pass
        order[last], order[other] = order[other], order[last]
    return order


def _random_numbers(seed: int) -> Iterator[int]:
    """Yield random integers of 32 bits without end: the halves of PCG64's 64-bit numbers, the lower half first."""
    import numpy

    generator = numpy.random.PCG64(seed)
    while True:
        for number in generator.random_raw(4096).tolist():
            yield number & 0xFFFFFFFF
            yield number >> 32


def batched(samples: Iterable[torch.Tensor], batch_size: int) -> Iterator[torch.Tensor]:
    """Stack samples of equal length into batches of at most ``batch_size``; yield int64 [batch, length].

    Samples of one length keep their order; lengths come in the order in which they first appear.
    """
    by_length: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for sample in samples:
        by_length[len(sample)].append(sample)
    for equal in by_length.values():
        for start in range(0, len(equal), batch_size):
            yield torch.stack(equal[start : start + batch_size])


def samples_digest(samples: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256, in hex, over the length and the token ids of each sample as little-endian int64."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample).to_bytes(8, "little"))
        digest.update(sample.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
