"""The device that something runs on here, as it was found: its name in the hardware table, and its own words.

>>> device_here("cpu")
Device(hardware='cpu', name='AMD EPYC 9654 96-Core Processor')
"""

from __future__ import annotations

from pipeline.machine import Device, Machine, cpu_name
from pipeline.serving import hardware as accelerators
from pipeline.serving.host.detect import detect

_GPU_NAME = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


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
