"""NVIDIA's GPUs by nvidia-smi."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from pipeline.machine import Machine
from pipeline.measuring.reading import Reading
from pipeline.serving.host.visible import visible_cuda

_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same bits: the second is their name before driver 535."""
# Bits of NVML's nvmlClocksEventReasons. Idle, clocks that were set, and the power cap, which sets the clock under load,
# are as they should be.
_FAULTS = {
    0x08: "hardware slowdown",
    0x20: "temperature (software slowdown)",
    0x40: "temperature (hardware slowdown)",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class NvidiaSensor:
    """The GPUs of a server by UUID; `reasons` is this driver's field for what slows a GPU down, None without one."""

    machine: Machine
    uuids: tuple[str, ...]
    reasons: str | None

    def read(self) -> Reading | None:
        """See `Sensor`."""
        fields = [*_FIELDS, *([self.reasons] if self.reasons else [])]
        rows = _ask(self.machine, fields, "-i", ",".join(self.uuids))
        if not rows:
            return None
        clocks, temperatures, powers = ([number for row in rows if (number := _number(row[at]))] for at in range(3))
        bits = 0
        for row in rows:
            bits |= _bits(row[3]) if self.reasons else 0
        return Reading(
            clocks_mhz=tuple(clocks),
            temperature_c=max(temperatures, default=None),
            power_w=sum(powers) if powers else None,
            throttled=tuple(name for bit, name in _FAULTS.items() if bits & bit),
        )


def nvidia_sensor(machine: Machine, gpus: int) -> NvidiaSensor | None:
    """The first so many GPUs that the environment leaves; None without nvidia-smi or without any."""
    found = [row[0] for row in _ask(machine, ["uuid"])]
    uuids = tuple(found[index] for index in visible_cuda(machine.environ, found)[:gpus])
    if not uuids:
        return None
    return NvidiaSensor(machine, uuids, next((name for name in _REASONS if _ask(machine, [name])), None))


def _ask(machine: Machine, fields: list[str], *more: str) -> list[list[str]]:
    """Rows of as many cells as there are fields; none where a field is not known here."""
    query = f"--query-gpu={','.join(fields)}"
    printed = machine.run(("nvidia-smi", query, "--format=csv,noheader,nounits", *more)) or ""
    rows = [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines())]
    return [row for row in rows if len(row) == len(fields)]


def _number(cell: str) -> float | None:
    """ "[N/A]" and "[Not Supported]" stand where a GPU does not say."""
    try:
        return float(cell)
    except ValueError:
        return None


def _bits(cell: str) -> int:
    try:
        return int(cell, 16)
    except ValueError:
        return 0
