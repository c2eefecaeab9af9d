"""Read clocks, temperature, power and throttling of accelerators, and summarize the readings of a launch.

Instinct GPUs are read from amdgpu's files: hwmon, and for throttling the firmware's table gpu_metrics. Its versions 1.6
to 1.8 (MI300 and later; Linux, drivers/gpu/drm/amd/include/kgd_pp_interface.h) count how long each limiter was active
since the start; older versions, whose status bits differ between chips, are not read. NVIDIA GPUs are read by
nvidia-smi, CPUs by the clocks of their cores.
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

from quantmint.eval.measurements import MachineState
from quantmint.pipeline.base import machine as host
from quantmint.pipeline.serving.host.detect import CUDA, amd_gpus, nvidia_smi, select_devices, visible_amd

_HEADER = struct.Struct("<HBB")  # size of the table in bytes, format and content revision
_REVISIONS = {(1, 6), (1, 7), (1, 8)}
_OFFSET = 36  # of the counters: prochot, package power, socket, voltage regulators, memory
_COUNTERS = struct.Struct("<5I")
# None stands for the package's power limit, which normally sets the clock under load.
_FAULTS = ("processor hot", None, "socket temperature", "voltage regulator temperature", "memory temperature")
_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")  # driver 535 and later
# Bits of NVML's nvmlClocksEventReasons that are faults. Others are normal: idle, clocks set by a user, and the power
# cap, which sets the clock under load.
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "temperature (software slowdown)",
    0x40: "temperature (hardware slowdown)",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class SensorReading:
    """The state of all accelerators of a server at one moment; empty or None for what cannot be read.

    ``temperature_c`` is of the hottest, ``power_w`` of all together. ``throttled`` names the limiters that are active
    at that moment. A ``counters`` entry that grows between two readings names a limiter that was active in between.
    """

    clocks_mhz: tuple[float, ...] = ()
    temperature_c: float | None = None
    power_w: float | None = None
    throttled: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)


Sensor = Callable[[], SensorReading | None]
"""Returns the state now; cheap enough to call once a second. None when it cannot be read."""


def summarize(cells: Sequence[Sequence[SensorReading]]) -> MachineState:
    """Return the state of a launch from the readings of each cell, taken under load."""
    readings = [reading for cell in cells for reading in cell]
    clocks = sorted(clock for reading in readings for clock in reading.clocks_mhz)
    temperatures = [reading.temperature_c for reading in readings if reading.temperature_c is not None]
    powers = [reading.power_w for reading in readings if reading.power_w is not None]
    throttled = {name for reading in readings for name in reading.throttled}
    for cell in cells:
        if len(cell) > 1:  # a counter that falls was reset and is ignored
            first, last = cell[0].counters, cell[-1].counters
            throttled.update(name for name, count in last.items() if count > first.get(name, count))
    return MachineState(
        clock_mhz=median(clocks) if clocks else None,
        clock_mhz_low=clocks[math.ceil(0.05 * len(clocks)) - 1] if clocks else None,
        temperature_c=max(temperatures, default=None),
        power_w=round(median(powers), 1) if powers else None,
        throttled=tuple(sorted(throttled)),
        samples=len(readings),
    )


def sensor_for(kind: Literal["rocm", "cuda", "cpu"], *, gpus: int, env: Mapping[str, str]) -> Sensor | None:
    """Return the sensor of a server that was started with ``env`` on top of our variables; None without one."""
    machine = host.Host(environ={**os.environ, **env})
    if kind == "cpu":
        return read_cpu
    if kind == "rocm":
        return amd_sensor(machine, gpus)
    present = [row[0] for row in nvidia_smi(machine, ("uuid",))]
    uuids = [present[index] for index in select_devices(machine.environ.get(CUDA), present)[:gpus]]
    return partial(read_nvidia, machine, uuids) if uuids else None


def amd_sensor(machine: host.Host, gpus: int) -> Sensor | None:
    """Return a sensor of the first ``gpus`` visible GPUs, each device once; None without their driver's files."""
    present = amd_gpus(machine)
    visible = visible_amd(machine.environ, [gpu.uuid for gpu in present])[:gpus]
    devices: Sequence[Path | None] = [present[index].device for index in visible]
    folders = dict.fromkeys(device.resolve() for device in devices if device is not None)
    return partial(read_amd, machine, tuple(folders)) if folders else None


def read_amd(machine: host.Host, devices: Sequence[Path]) -> SensorReading | None:
    """Return the state of AMD devices, by their folders on the bus; None when no file can be read."""
    clocks, temperatures, powers = [], [], []
    counters: dict[str, int] = {}
    for device in devices:
        for hwmon in sorted(device.glob("hwmon/hwmon*"))[:1]:
            clock = machine.number(hwmon / "freq1_input")
            power = machine.number(hwmon / "power1_average") or machine.number(hwmon / "power1_input")
            clocks += [clock / 1e6] if clock is not None else []
            powers += [power / 1e6] if power is not None else []
            # "junction" is the hottest point of the chip; "mem" and "edge" are other sensors.
            labels = [path for path in sorted(hwmon.glob("temp*_label")) if machine.text(path) == "junction"]
            values = [machine.number(path.with_name(path.name.replace("_label", "_input"))) for path in labels]
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
    if len(table) < _OFFSET + _COUNTERS.size or _HEADER.unpack_from(table)[1:] not in _REVISIONS:
        return {}
    unknown = 0xFFFFFFFF
    counts = zip(_FAULTS, _COUNTERS.unpack_from(table, _OFFSET), strict=True)
    return {name: count for name, count in counts if name is not None and count != unknown}


def read_nvidia(machine: host.Host, uuids: Sequence[str]) -> SensorReading | None:
    """Return the state of NVIDIA GPUs by their UUIDs; None when nvidia-smi reports none."""
    rows = nvidia_smi(machine, _FIELDS, "-i", ",".join(uuids))
    if not rows:
        return None
    # A GPU without a sensor has "[N/A]" or "[Not Supported]" in its cell.
    columns = ([float(row[column]) for row in rows if row[column][:1].isdigit()] for column in range(3))
    clocks, temperatures, powers = columns
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
    """Return the clocks of all cores; a virtual machine reports its nominal clock at most. None without clocks."""
    import psutil

    clocks = tuple(core.current for core in psutil.cpu_freq(percpu=True) or ())
    return SensorReading(clocks_mhz=clocks) if clocks else None
