"""What accelerators say of themselves at one moment, and what many such moments say of a launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from eval.bench import Machine


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at all accelerators of a server, empty or None where nothing tells.

    `clocks_mhz` has one value an accelerator, `temperature_c` is the hottest, `power_w` that of all together.
    `throttled` names what slows them down right now; `counters` count since the machine's start, by what they count:
    one that grows between two looks names what slowed them down in between.
    """

    clocks_mhz: tuple[float, ...] = ()
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)


class Sensor(Protocol):
    """What can be looked at about once a second."""

    def read(self) -> Reading | None:
        """The state now; None where it cannot be read."""
        ...


def summary(cells: Sequence[Sequence[Reading]]) -> Machine:
    """A launch's state from the readings of each of its cells, taken while the load was on."""
    readings = [reading for cell in cells for reading in cell]
    clocks = sorted(clock for reading in readings for clock in reading.clocks_mhz)
    temperatures = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    throttled = {name for reading in readings for name in reading.throttled}
    for cell in cells:
        throttled.update(_grown(cell))
    return Machine(
        clock_mhz=median(clocks) if clocks else None,
        clock_mhz_low=clocks[math.ceil(0.05 * len(clocks)) - 1] if clocks else None,
        temperature_c=max(temperatures, default=None),
        power_w=round(median(powers), 1) if powers else None,
        throttled=tuple(sorted(throttled)),
        samples=len(readings),
    )


def _grown(cell: Sequence[Reading]) -> Iterator[str]:
    """A counter that falls was set back, which says nothing."""
    if len(cell) > 1:
        first, last = cell[0].counters, cell[-1].counters
        yield from (name for name, count in last.items() if count > first.get(name, count))
