"""Resident mode: the whole model is on the device, and batches run straight through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from calibration.cache import recording_cache
from calibration.hooks import watching
from calibration.measurement import Measurement
from calibration.replica import Replica

if TYPE_CHECKING:
    import torch


def run_resident(
    replica: Replica, batches: Iterable[torch.Tensor], measurement: Measurement, advance: Callable[[int], None]
) -> None:
    """Measure a loaded model; ``advance`` is told the number of samples after each batch."""
    import torch

    with watching(replica.model, "", measurement), torch.inference_mode():
        for batch in batches:
            replica.trunk(
                input_ids=batch.to(replica.device),
                past_key_values=recording_cache(measurement, replica.attention),
                use_cache=True,
            )
            measurement.forget_last()
            advance(batch.shape[0])
