"""The machine that a sweep measures, in the facts that make figures comparable: no host name, nothing personal."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping

from pipeline.errors import UserError
from pipeline.serving.hardware import hardware
from pipeline.serving.host.detect import Detected, detect
from pipeline.serving.host.machine import Machine
from pipeline.serving.planning.target import Target


def machine_facts(target: Target, machine: Machine) -> dict[str, str]:
    """CPU, cores that we may use, and the accelerators that are there.

    UserError where the machine is not the target: a sweep measures, it cannot plan for another machine.
    """
    cores = len(os.sched_getaffinity(0))
    facts = {"target": str(target), "cpu": _cpu(machine), "cores": str(cores)}
    if target.accelerator.kind == "cpu":
        return facts
    found = detect(machine)
    row = hardware(found.hardware)
    if row.kind != target.accelerator.kind or found.gpus < target.gpus:
        raise UserError(
            f"the target is {target}, but this machine has {_named(found)}",
            hint="tune on the machine that will serve; --dry-run shows what would be tried on another",
        )
    return {**facts, "accelerators": _named(found)}


def device_name(facts: Mapping[str, str]) -> str:
    """What a page calls the machine."""
    cpu = f"{facts['cpu']}, {facts['cores']} {'core' if facts['cores'] == '1' else 'cores'}"
    return f"{facts['accelerators']} ({cpu})" if "accelerators" in facts else cpu


def _named(found: Detected) -> str:
    row = hardware(found.hardware)
    if row.kind == "cpu":
        return "no GPU"
    parts = found.compute_partition if found.partitioned else None
    return f"{found.gpus} x {row.title}" + (f" in {parts} mode" if parts else "")


def _cpu(machine: Machine) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", machine.text("proc/cpuinfo") or "", re.MULTILINE)
    return found[1].strip() if found else platform.machine()
