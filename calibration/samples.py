"""From a calibration set and a tokenizer to the samples that a model is run on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibration.batches import token_blocks, token_texts
from calibration.sets import CalibrationSet
from calibration.texts import read_texts, rendered

if TYPE_CHECKING:
    import torch


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
