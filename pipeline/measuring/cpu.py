"""The cores of a CPU server: their clocks, and how often heat has slowed them down (Intel's counters)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.machine import Machine
from pipeline.measuring.reading import Reading

_CPUS = "sys/devices/system/cpu/cpu[0-9]*"
_MHZ = re.compile(r"^cpu MHz\s*:\s*([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CpuSensor:
    """All cores."""

    machine: Machine

    def read(self) -> Reading | None:
        """See `Sensor`. A virtual machine has its nominal clock at most."""
        clocks = self._clocks()
        counts = {
            name: [self.machine.number(at) or 0 for at in self.machine.glob(f"{_CPUS}/thermal_throttle/{file}")]
            for name, file in (
                ("core temperature", "core_throttle_count"),
                ("package temperature", "package_throttle_count"),
            )
        }
        counters = {name: sum(values) for name, values in counts.items() if values}
        return Reading(clocks_mhz=clocks, counters=counters) if clocks or counters else None

    def _clocks(self) -> tuple[float, ...]:
        files = self.machine.glob(f"{_CPUS}/cpufreq/scaling_cur_freq")
        kilohertz = [value for at in files if (value := self.machine.number(at)) is not None]
        if kilohertz:
            return tuple(value / 1000 for value in kilohertz)
        return tuple(float(value) for value in _MHZ.findall(self.machine.text("proc/cpuinfo") or ""))
