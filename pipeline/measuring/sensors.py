"""Which sensor tells about the machine that a plan is served on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from pipeline.machine import Machine
from pipeline.measuring.amd import amd_sensor
from pipeline.measuring.cpu import CpuSensor
from pipeline.measuring.nvidia import nvidia_sensor
from pipeline.measuring.reading import Sensor


def sensor_for(kind: Literal["rocm", "cuda", "cpu"], *, gpus: int, env: Mapping[str, str]) -> Sensor | None:
    """The sensor of a server on so many accelerators of a kind, started with these variables beside our own."""
    return sensor_of(kind, gpus=gpus, machine=Machine(environ={**os.environ, **env}))


def sensor_of(kind: Literal["rocm", "cuda", "cpu"], *, gpus: int, machine: Machine) -> Sensor | None:
    """The same on any machine. None where a GPU server has no GPU that tells: its cores say nothing about it."""
    if kind == "rocm":
        return amd_sensor(machine, gpus)
    return nvidia_sensor(machine, gpus) if kind == "cuda" else CpuSensor(machine)
