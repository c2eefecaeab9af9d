"""Calibration text as samples of tokens: the same texts, tokenizer and settings give the same samples everywhere.

No sample is ever padded, so that no padding token can widen a range.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from calibration.errors import CalibrationError
from calibration.sets import CalibrationSet
from calibration.texts import read_texts, rendered

if TYPE_CHECKING:
    import torch


WINDOW = 1024
"""Texts that are put in a seeded order together: what is read of a large dataset is at most one window too much."""


def token_blocks(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    special_tokens: bool = True,
) -> torch.Tensor:
    """Pack texts into blocks: they are put in a seeded order, joined, and the stream is cut.

    ``special_tokens`` is False for rendered conversations, whose template has written them already.

    Returns:
        int64 tensor of [samples, sequence_length].

    Raises:
        CalibrationError: the texts are too short for that many blocks.
    """
    import torch

    needed = samples * sequence_length
    stream: list[int] = []
    for text in _shuffled(texts, seed):
        ids = tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        stream += ids
        if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
            stream.append(tokenizer.eos_token_id)
        if len(stream) >= needed:
            break
    if len(stream) < needed:
        raise CalibrationError(
            f"the calibration texts make {len(stream):,} tokens; "
            f"{samples} samples of {sequence_length} need {needed:,}: ask for at most {len(stream) // sequence_length}"
        )
    return torch.tensor(stream[:needed], dtype=torch.int64).reshape(samples, sequence_length)


def token_texts(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    special_tokens: bool = True,
) -> tuple[torch.Tensor, ...]:
    """One text a sample, in a seeded order, cut after ``sequence_length`` tokens; shorter ones keep their length.

    What llm-compressor's examples calibrate on. Texts without a token are passed over.

    Returns:
        int64 tensors of [n], 1 <= n <= sequence_length.

    Raises:
        CalibrationError: there are too few texts.
    """
    import torch

    tokenized = (
        tokenizer(text, add_special_tokens=special_tokens)["input_ids"][:sequence_length]
        for text in _shuffled(texts, seed)
    )
    found = tuple(torch.tensor(ids, dtype=torch.int64) for ids in islice(filter(len, tokenized), samples))
    if len(found) < samples:
        raise CalibrationError(
            f"the calibration set has {len(found):,} texts; {samples:,} samples without packing need one each: "
            f"ask for at most {len(found):,}"
        )
    return found


def _shuffled(texts: Iterable[str], seed: int) -> Iterator[str]:
    """The texts in an order that the seed decides, a window at a time."""
    import numpy

    generator = numpy.random.default_rng(seed)
    rest = iter(texts)
    while window := list(islice(rest, WINDOW)):
        for index in generator.permutation(len(window)):
            yield window[int(index)]


def batched(samples: Iterable[torch.Tensor], batch_size: int) -> Iterator[torch.Tensor]:
    """Stack samples of equal length into batches of at most ``batch_size``: int64 [batch, length].

    Samples keep their order within a length, and lengths come as they first appear.
    """
    import torch

    by_length: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for sample in samples:
        by_length[len(sample)].append(sample)
    for equal in by_length.values():
        for start in range(0, len(equal), batch_size):
            yield torch.stack(equal[start : start + batch_size])


def samples_digest(samples: Iterable[torch.Tensor]) -> str:
    """SHA-256 over the length and the token ids of each sample, little-endian int64: what a report quotes."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample).to_bytes(8, "little"))
        digest.update(sample.numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def read_samples(
    chosen: CalibrationSet, tokenizer: Any, *, samples: int, sequence_length: int, packing: bool, seed: int
) -> tuple[torch.Tensor, ...]:
    """Read as much of a set as it takes, and make samples of it.

    Returns:
        As many int64 tensors of [n]: with ``packing`` n is ``sequence_length``, without it is at most that.

    Raises:
        CalibrationError: the set cannot be read, or holds too little.
    """
    make = token_blocks if packing else token_texts
    made = make(
        read_texts(chosen, tokenizer),
        tokenizer,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        special_tokens=not rendered(chosen, tokenizer),
    )
    return tuple(made)
