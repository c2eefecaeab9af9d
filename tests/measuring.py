"""The plain way to measure a model, which others are held against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from calibration.measurement import Measurement
from calibration.observers import Observation
from calibration.ranges import Ranges, ranges_of, require_sound, run_resident
from calibration.replica import Replica

if TYPE_CHECKING:
    import torch


def observe(replica: Replica, batches: Iterable[torch.Tensor], observation: Observation | None = None) -> Ranges:
    """The ranges of a loaded model."""
    measurement = Measurement(observation or Observation())
    run_resident(replica, batches, measurement, lambda _: None)
    found = measurement.finish()
    require_sound(replica, found)
    return ranges_of(replica, found)
