"""The device that something runs on here, as it was found: its name in the hardware table, and its own words.

>>> device_here("cpu")
Device(hardware='cpu', name='AMD EPYC 9654 96-Core Processor')
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass

from pipeline.serving import hardware as accelerators
from pipeline.serving.host.detect import detect
from pipeline.serving.host.machine import Machine

_GPU_NAME = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class Device:
    """``hardware`` is a name of the table, ``name`` what the driver or the kernel calls the device."""

    hardware: str
    name: str

    def to_json(self) -> dict[str, str]:
        """A plain mapping of the fields."""
        return asdict(self)


def device_here(kind: str, machine: Machine | None = None) -> Device:
    """The device of this machine that PyTorch calls ``kind`` ("cpu", "cuda", "cuda:1"; "cuda" is also ROCm's).

    A machine without a GPU has its CPU alone. Raises `UserError` for an Instinct GPU that the table does not know.
    """
    machine = machine or Machine()
    if kind.startswith("cpu"):
        return Device("cpu", cpu_name(machine))
    found = detect(machine)
    if found.hardware == "cpu":
        return Device("cpu", cpu_name(machine))
    told = (machine.run(_GPU_NAME) or "").strip().splitlines() if found.accelerator.kind == "cuda" else []
    return Device(found.hardware, told[0].strip() if told else accelerators.hardware(found.hardware).title)


def cpu_name(machine: Machine) -> str:
    """The CPU's model as the kernel has it; the architecture where it has none."""
    for line in (machine.text("proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
