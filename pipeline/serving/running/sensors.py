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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from quantmint.eval.measurements import Machine
from quantmint.pipeline.base import machine as host
from quantmint.pipeline.serving.host.detect import CUDA, amd_gpus, nvidia_smi, select_devices, visible_amd

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
class SensorReading:
    """One look at all accelerators of a server, empty or None where nothing tells.

    `temperature_c` is the hottest, `power_w` that of all together. `throttled` names what slows them down right now;
    one of the `counters` that grows between two looks names what slowed them down in between.
    """

    clocks_mhz: tuple[float, ...] = ()
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)


Sensor = Callable[[], SensorReading | None]
"""The state now, for a look about once a second; None where it cannot be read."""


def summarize(cells: Sequence[Sequence[SensorReading]]) -> Machine:
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
    """The sensor of a server started with these variables beside our own; None where none of its GPUs tells."""
    machine = host.Machine(environ={**os.environ, **env})
    if kind == "cpu":
        return read_cpu
    if kind == "rocm":
        return amd_sensor(machine, gpus)
    found = [row[0] for row in nvidia_smi(machine, ("uuid",))]
    uuids = [found[index] for index in select_devices(machine.environ.get(CUDA), found)[:gpus]]
    return partial(read_nvidia, machine, uuids) if uuids else None


def amd_sensor(machine: host.Machine, gpus: int) -> Sensor | None:
    """The first so many GPUs that the environment leaves, each device once; None where there are no files of them."""
    found = amd_gpus(machine)
    used = visible_amd(machine.environ, [gpu.uuid for gpu in found])[:gpus]
    devices: Sequence[Path | None] = [found[index].device for index in used]
    folders = dict.fromkeys(device.resolve() for device in devices if device is not None)
    return partial(read_amd, machine, tuple(folders)) if folders else None


def read_amd(machine: host.Machine, devices: Sequence[Path]) -> SensorReading | None:
    """The state of devices by their folders on the bus."""
    clocks, temperatures, powers = [], [], []
    counters: dict[str, int] = {}
    for device in devices:
        for hwmon in sorted(device.glob("hwmon/hwmon*"))[:1]:
            clock = machine.number(hwmon / "freq1_input")
            power = machine.number(hwmon / "power1_average") or machine.number(hwmon / "power1_input")
            clocks += [clock / 1e6] if clock is not None else []
            powers += [power / 1e6] if power is not None else []
            # Those of the hottest point of the chip; "mem" and "edge" are other places.
            labels = [at for at in sorted(hwmon.glob("temp*_label")) if machine.text(at) == "junction"]
            values = [machine.number(at.with_name(at.name.replace("_label", "_input"))) for at in labels]
            temperatures += [value / 1000 for value in values if value is not None]
        for name, count in _limiters(device).items():
            counters[name] = counters.get(name, 0) + count
    if not clocks and not temperatures and not powers and not counters:
        return None
    return SensorReading(
        clocks_mhz=tuple(clocks),
        temperature_c=max(temperatures, default=None),
        power_w=sum(powers) if powers else None,
        counters=counters,
    )


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


def read_nvidia(machine: host.Machine, uuids: Sequence[str]) -> SensorReading | None:
    """The state of GPUs by UUID."""
    rows = nvidia_smi(machine, _FIELDS, "-i", ",".join(uuids))
    if not rows:
        return None
    # "[N/A]" and "[Not Supported]" stand where a GPU does not say.
    clocks, temperatures, powers = ([float(row[at]) for row in rows if row[at][:1].isdigit()] for at in range(3))
    bits = 0
    for row in rows:
        bits |= int(row[3], 16) if row[3].startswith("0x") else 0
    return SensorReading(
        clocks_mhz=tuple(clocks),
        temperature_c=max(temperatures, default=None),
        power_w=sum(powers) if powers else None,
        throttled=tuple(name for bit, name in _SLOWDOWNS.items() if bits & bit),
    )


def read_cpu() -> SensorReading | None:
    """The clocks of all cores; a virtual machine has its nominal clock at most."""
    import psutil

    clocks = tuple(core.current for core in psutil.cpu_freq(percpu=True) or ())
    return SensorReading(clocks_mhz=clocks) if clocks else None
