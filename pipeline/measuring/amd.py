"""Instinct GPUs by the files that amdgpu has of each: hwmon, and the firmware's own table for what throttles.

    /sys/bus/pci/devices/0000:0c:00.0/hwmon/hwmon3/freq1_input     Hz of the shader clock
                                                   temp*_input     thousandths of a degree, temp*_label says where
                                                   power1_average  microwatts (power1_input on newer kernels)
    /sys/bus/pci/devices/0000:0c:00.0/gpu_metrics                  binary, little-endian

gpu_metrics 1.6 to 1.8 (MI300 and later; Linux, drivers/gpu/drm/amd/include/kgd_pp_interface.h) count how long each
limiter was at work since the start; older tables have a status whose bits differ between chips, which is not read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.machine import Machine
from pipeline.measuring.reading import Reading
from pipeline.serving.host.topology import amd_gpus
from pipeline.serving.host.visible import visible_amd

_HEADER = struct.Struct("<HBB")  # bytes of the table, its format, its content
_REVISIONS = {(1, 6), (1, 7), (1, 8)}
_AT = 36  # of the counters: prochot, package power, socket, voltage regulators, memory
_COUNTERS = struct.Struct("<5I")
# The package's power limit is not among them: under load it is what sets the clock.
_FAULTS = ("processor hot", None, "socket temperature", "voltage regulator temperature", "memory temperature")


@dataclass(frozen=True, slots=True)
class AmdSensor:
    """The devices of a server, each once however it is partitioned, by their folders on the bus."""

    machine: Machine
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
        labels = sorted(hwmon.glob("temp*_label"))
        inputs = [at.with_name(at.name.replace("_label", "_input")) for at in labels if self._is_junction(at)]
        values = [self.machine.number(at) for at in inputs]
        return [value / 1000 for value in values if value is not None]

    def _is_junction(self, label: Path) -> bool:
        return self.machine.text(label) == "junction"


def amd_sensor(machine: Machine, gpus: int) -> AmdSensor | None:
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
