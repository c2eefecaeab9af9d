"""Calibration text as token blocks: the same texts, tokenizer and settings give the same blocks everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from calibration.errors import CalibrationError

if TYPE_CHECKING:
    import torch


def token_blocks(
    texts: Sequence[str],
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    special_tokens: bool = True,
) -> torch.Tensor:
    """Pack texts into blocks without padding, so that no padding token can widen a range.

    The texts are put in a seeded order, each is tokenized, and the stream is cut into blocks. ``special_tokens`` is
    False for rendered conversations, whose template has written them already.

    Returns:
        int64 tensor of [samples, sequence_length].

    Raises:
        CalibrationError: the texts are too short for that many blocks.
    """
    import numpy
    import torch

    order = numpy.random.default_rng(seed).permutation(len(texts))
    needed = samples * sequence_length
    stream: list[int] = []
    for index in order:
        if len(stream) >= needed:
            break
        ids = tokenizer(texts[int(index)], add_special_tokens=special_tokens)["input_ids"]
        stream += ids
        if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
            stream.append(tokenizer.eos_token_id)
    if len(stream) < needed:
        raise CalibrationError(
            f"the calibration texts make {len(stream):,} tokens; "
            f"{samples} samples of {sequence_length} need {needed:,}: ask for at most {len(stream) // sequence_length}"
        )
    return torch.tensor(stream[:needed], dtype=torch.int64).reshape(samples, sequence_length)


def batched(blocks: torch.Tensor, batch_size: int) -> Iterator[torch.Tensor]:
    """Cut [samples, sequence_length] into batches of at most ``batch_size`` blocks, in order."""
    for start in range(0, blocks.shape[0], batch_size):
        yield blocks[start : start + batch_size]


def blocks_digest(blocks: torch.Tensor) -> str:
    """SHA-256 of the token ids, little-endian int64: what a report quotes as the calibration data."""
    return hashlib.sha256(blocks.numpy().astype("<i8").tobytes()).hexdigest()
