"""The plain way to measure a model, which others are held against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quantmint.calibration.observers import Observation
from quantmint.calibration.ranges import Ranges, ranges_of, require_sound, run_resident
from quantmint.calibration.replica import Replica

if TYPE_CHECKING:
    import torch


def observe(replica: Replica, batches: Iterable[torch.Tensor], observation: Observation | None = None) -> Ranges:
    """The ranges of a loaded model."""
    found = run_resident(replica, batches, observation or Observation()).finish()
    require_sound(replica, found)
    return ranges_of(replica, found)
