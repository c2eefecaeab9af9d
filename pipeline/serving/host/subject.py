"""A launch, as far as a machine must be ready for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import QuantmintError, UserError
from pipeline.machine import Machine
from pipeline.serving.environment import find_vllm
from pipeline.serving.host.detect import Detected, detect
from pipeline.serving.host.installed import Installed, installed
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.planning.target import Target, parse_target


@dataclass(frozen=True, slots=True)
class Wanted:
    """The checkpoint: its scheme, the cache's type ("auto" or "fp8"), its layout, and the bytes of its weights."""

    scheme: str
    kv_cache: str
    checkpoint_format: str
    weights: int | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A machine and what it is to serve.

    ``target`` counts the accelerators of every node; ``detected`` is what this one has, or ``unknown`` why that cannot
    be said. ``installed`` is the serving environment, or ``missing`` why there is none. ``utilization`` is the share of
    a GPU's memory that one server takes. ``port`` and ``wanted`` are None where nothing is known of them.
    """

    machine: Machine
    target: Target
    detected: Detected | None
    unknown: str = ""
    installed: Installed | None = None
    missing: str = ""
    port: int | None = None
    wanted: Wanted | None = None
    utilization: float = 0.92  # vLLM's own since 0.20

    @property
    def kind(self) -> str:
        """rocm, cuda or cpu."""
        return self.target.accelerator.kind

    @property
    def several(self) -> bool:
        """Whether more than one accelerator works on the launch."""
        return self.target.gpus * self.target.nodes > 1


def look(
    machine: Machine,
    *,
    target: Target | None = None,
    vllm: str | Path | None = None,
    port: int | None = None,
    wanted: Wanted | None = None,
    nodes: int = 1,
    utilization: float = 0.92,
) -> Subject:
    """Gather what checks need. Without a target the machine is it: UserError where it cannot be told what it is."""
    detected, unknown = None, ""
    try:
        detected = detect(machine)
    except UserError as error:
        if target is None:
            raise
        unknown = error.message
    if target is None:
        assert detected is not None  # noqa: S101 - detect() either returned or raised
        target = Target(detected.hardware, detected.gpus, nodes, detected.hbm_bytes)
    there, missing = _environment(machine, vllm)
    return Subject(
        machine=machine,
        target=target,
        detected=detected,
        unknown=unknown,
        installed=there,
        missing=missing,
        port=port,
        wanted=wanted,
        utilization=utilization,
    )


def target_of(plan: LaunchPlan) -> Target:
    """What a plan needs of each node; its own target may offer more."""
    offered, layout = parse_target(plan.target), plan.layout
    accelerators = math.ceil(layout.gpus * layout.replicas / (layout.packed * layout.nodes))
    hbm_bytes = plan.memory.total if plan.memory is not None and offered.accelerator.kind != "cpu" else None
    return Target(offered.hardware, accelerators, layout.nodes, hbm_bytes)


def _environment(machine: Machine, vllm: str | Path | None) -> tuple[Installed | None, str]:
    try:
        environment = find_vllm(vllm, environ=machine.environ)
        found = installed(environment, machine)
    except QuantmintError as error:
        return None, error.message
    return found, "" if found is not None else f"{environment.executable}: its Python does not answer"
