"""What accelerators say of themselves at one moment, and what many such moments say of a launch.

Instinct GPUs by the files that amdgpu has of each: hwmon, and the firmware's own table for what throttles.

gpu_metrics 1.6 to 1.8 (MI300 and later; Linux, drivers/gpu/drm/amd/include/kgd_pp_interface.h) count how long each
limiter was at work since the start; older tables have a status whose bits differ between chips, which is not read.
NVIDIA's GPUs by nvidia-smi; a CPU by its cores' clocks.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

from eval.measurements import Machine
from pipeline.base import machine as host
from pipeline.serving.host.detect import amd_gpus, nvidia_smi, visible_amd, visible_cuda

_HEADER = struct.Struct("<HBB")  # bytes of the table, its format, its content
_REVISIONS = {(1, 6), (1, 7), (1, 8)}
_AT = 36  # of the counters: prochot, package power, socket, voltage regulators, memory
_COUNTERS = struct.Struct("<5I")
# The package's power limit is not among them: under load it is what sets the clock.
_FAULTS = ("processor hot", None, "socket temperature", "voltage regulator temperature", "memory temperature")
_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")  # driver 535 and later
# Bits of NVML's nvmlClocksEventReasons. Idle, clocks that were set, and the power cap, which sets the clock under load,
# are as they should be.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "temperature (software slowdown)",
    0x40: "temperature (hardware slowdown)",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at all accelerators of a server, empty or None where nothing tells.

    `temperature_c` is the hottest, `power_w` that of all together. `throttled` names what slows them down right now;
    one of the `counters` that grows between two looks names what slowed them down in between.
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
        if len(cell) > 1:  # a counter that falls was set back, which says nothing
            first, last = cell[0].counters, cell[-1].counters
            throttled.update(name for name, count in last.items() if count > first.get(name, count))
    return Machine(
        clock_mhz=median(clocks) if clocks else None,
        clock_mhz_low=clocks[math.ceil(0.05 * len(clocks)) - 1] if clocks else None,
        temperature_c=max(temperatures, default=None),
        power_w=round(median(powers), 1) if powers else None,
        throttled=tuple(sorted(throttled)),
        samples=len(readings),
    )


def sensor_for(kind: Literal["rocm", "cuda", "cpu"], *, gpus: int, env: Mapping[str, str]) -> Sensor | None:
    """The sensor of a server on so many accelerators of a kind, started with these variables beside our own.

    None where a GPU server has no GPU that tells: its cores say nothing about it.
    """
    machine = host.Machine(environ={**os.environ, **env})
    if kind == "rocm":
        return amd_sensor(machine, gpus)
    return nvidia_sensor(machine, gpus) if kind == "cuda" else CpuSensor()


@dataclass(frozen=True, slots=True)
class AmdSensor:
    """The devices of a server, each once however it is partitioned, by their folders on the bus."""

    machine: host.Machine
    devices: tuple[Path, ...]

    def read(self) -> Reading | None:
        """See `Sensor`."""
        clocks, temperatures, powers = [], [], []
        counters: dict[str, int] = {}
        for device in self.devices:
            for hwmon in sorted(device.glob("hwmon/hwmon*"))[:1]:
                clock = self.machine.number(hwmon / "freq1_input")
                power = self.machine.number(hwmon / "power1_average") or self.machine.number(hwmon / "power1_input")
                clocks += [clock / 1e6] if clock is not None else []
                powers += [power / 1e6] if power is not None else []
                temperatures += self._temperatures(hwmon)
            for name, count in _limiters(device).items():
                counters[name] = counters.get(name, 0) + count
        if not clocks and not temperatures and not powers and not counters:
            return None
        return Reading(
            clocks_mhz=tuple(clocks),
            temperature_c=max(temperatures, default=None),
            power_w=sum(powers) if powers else None,
            counters=counters,
        )

    def _temperatures(self, hwmon: Path) -> list[float]:
        """Those of the hottest point of the chip; "mem" and "edge" are other places."""
        labels = [at for at in sorted(hwmon.glob("temp*_label")) if self.machine.text(at) == "junction"]
        values = [self.machine.number(at.with_name(at.name.replace("_label", "_input"))) for at in labels]
        return [value / 1000 for value in values if value is not None]


def amd_sensor(machine: host.Machine, gpus: int) -> AmdSensor | None:
    """The first so many GPUs that the environment leaves; None where there are none, or no files of them."""
    found = amd_gpus(machine)
    used = visible_amd(machine.environ, [gpu.uuid for gpu in found])[:gpus]
    devices: Sequence[Path | None] = [found[index].device for index in used]
    folders = dict.fromkeys(device.resolve() for device in devices if device is not None)
    return AmdSensor(machine, tuple(folders)) if folders else None


def _limiters(device: Path) -> dict[str, int]:
    try:
        table = (device / "gpu_metrics").read_bytes()
    except OSError:
        return {}
    if len(table) < _AT + _COUNTERS.size or _HEADER.unpack_from(table)[1:] not in _REVISIONS:
        return {}
    unknown = 0xFFFFFFFF
    counts = zip(_FAULTS, _COUNTERS.unpack_from(table, _AT), strict=True)
    return {name: count for name, count in counts if name is not None and count != unknown}


@dataclass(frozen=True, slots=True)
class NvidiaSensor:
    """The GPUs of a server by UUID."""

    machine: host.Machine
    uuids: tuple[str, ...]

    def read(self) -> Reading | None:
        """See `Sensor`."""
        rows = nvidia_smi(self.machine, _FIELDS, "-i", ",".join(self.uuids))
        if not rows:
            return None
        clocks, temperatures, powers = ([number for row in rows if (number := _number(row[at]))] for at in range(3))
        bits = 0
        for row in rows:
            bits |= int(row[3], 16) if row[3].startswith("0x") else 0
        return Reading(
            clocks_mhz=tuple(clocks),
            temperature_c=max(temperatures, default=None),
            power_w=sum(powers) if powers else None,
            throttled=tuple(name for bit, name in _SLOWDOWNS.items() if bits & bit),
        )


def nvidia_sensor(machine: host.Machine, gpus: int) -> NvidiaSensor | None:
    """The first so many GPUs that the environment leaves; None without nvidia-smi or without any."""
    found = [row[0] for row in nvidia_smi(machine, ("uuid",))]
    uuids = tuple(found[index] for index in visible_cuda(machine.environ, found)[:gpus])
    return NvidiaSensor(machine, uuids) if uuids else None


def _number(cell: str) -> float | None:
    """ "[N/A]" and "[Not Supported]" stand where a GPU does not say."""
    try:
        return float(cell)
    except ValueError:
        return None


class CpuSensor:
    """The clocks of all cores; a virtual machine has its nominal clock at most."""

    def read(self) -> Reading | None:
        """See `Sensor`."""
        import psutil

        clocks = tuple(core.current for core in psutil.cpu_freq(percpu=True) or ())
        return Reading(clocks_mhz=clocks) if clocks else None
