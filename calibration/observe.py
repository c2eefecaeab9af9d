"""Ranges from measurements, under the names of the checkpoint.

    ranges = observe(load_resident(folder, "cpu"), batches)

measures a model on one device; `calibration.calibrate` does so for models of any size, on several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from calibration.errors import CalibrationError
from calibration.measurement import Key, Measurement, first_not_finite
from calibration.names import on_disk, sources
from calibration.observers import Observation
from calibration.ranges import Ranges
from calibration.replica import Replica, load_resident
from calibration.resident import run_resident

if TYPE_CHECKING:
    import torch

__all__ = ["load_resident", "observe", "ranges_of", "require_sound"]

_KINDS = {"input": "input", "k": "K", "v": "V"}


def observe(
    replica: Replica,
    batches: Iterable[torch.Tensor],
    observation: Observation | None = None,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Ranges:
    """Measure a model that is resident on its device.

    Args:
        replica: a loaded model (`load_resident`).
        batches: int64 token ids of [batch, sequence]; no padding.
        observation: what is measured, and how; the largest magnitudes where nothing is said.
        advance: told the number of samples after each batch.

    Raises:
        CalibrationError: an observed value is not finite, or an attention layer cached nothing.
    """
    measurement = Measurement(observation or Observation())
    run_resident(replica, batches, measurement, advance)
    found = measurement.finish()
    require_sound(replica, found)
    return ranges_of(replica, found)


def require_sound(replica: Replica, found: Mapping[Key, torch.Tensor], part: str = "") -> None:
    """Raise `CalibrationError` for what is not finite, and for attention below ``part`` that cached nothing.

    Of several, the module that a forward meets first is named: the others may have inherited from it.
    """
    broken = first_not_finite(found)
    if broken is not None:
        kind, name = broken
        named = {own: disk for disk, own in sources(replica.model, replica.owned).items()}
        stored = named.get(name, name) if kind == "input" else on_disk(name, replica.owned)
        raise CalibrationError(
            f"the {_KINDS[kind]} of {stored} is not finite on the calibration data: {found[broken].tolist()}"
        )
    for name in replica.attention.values():
        if name.startswith(part) and ("k", name) not in found:
            raise CalibrationError(f"{name} cached neither K nor V: its ranges cannot be measured this way")


def ranges_of(replica: Replica, found: Mapping[Key, torch.Tensor]) -> Ranges:
    """Name what was found as the checkpoint does; a module on disk may be a part of one of the model's."""
    named = sources(replica.model, replica.owned)
    caches = {name: on_disk(name, replica.owned) for name in replica.attention.values()}
    return Ranges(
        inputs={disk: found["input", own] for disk, own in named.items() if ("input", own) in found},
        keys={disk: found["k", own] for own, disk in caches.items() if ("k", own) in found},
        values={disk: found["v", own] for own, disk in caches.items() if ("v", own) in found},
    )
