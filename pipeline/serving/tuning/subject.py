"""The subject of a sweep: the model, workload, machine and serving environment that all its launches share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from quantmint.eval.workloads import Cell, Workload
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Host, cores, cpu_name
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.host.detect import DetectedAccelerators, detect
from quantmint.pipeline.serving.knobs.overrides import LAYOUT
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import ServingTarget
from quantmint.pipeline.serving.tuning.space import TUNABLEOP, Point, SweepTrial, Value

STAGE, VERSION = "tune", 2
TUNED_FILE = "tunableop_results%d.csv"
Planner: TypeAlias = Callable[[Mapping[str, Value]], LaunchPlan]
"""Returns the plan with some knobs changed, by name. UserError for changes that cannot be planned."""


@dataclass(frozen=True, slots=True)
class TunedKernels:
    """Matrix kernels that TunableOp found.

    ``folder`` has their files, ``digest`` identifies the contents, ``shapes`` counts tuned shapes by device number.
    """

    folder: Path
    digest: str
    shapes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TuningSubject:
    """The constants of a sweep.

    ``digest`` is the SHA-256 of the checkpoint, ``machine`` are facts about the machine that measures, ``tuned`` the
    kernels that points with TunableOp use.
    """

    name: str
    model: Path
    digest: str
    target: str
    kind: str
    workload: Workload
    vllm: VllmEnvironment
    machine: Mapping[str, str]
    planner: Planner
    tuned: TunedKernels | None = None

    def plan(self, point: Point) -> LaunchPlan:
        """Return the launch plan of a point. Raises `UserError` when the planner refuses it."""
        changes = dict(point)
        tunableop = changes.pop(TUNABLEOP, None)
        plan = self.planner(changes)
        return with_tunableop(plan, self.tuned.folder, search=False) if tunableop and self.tuned else plan

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The load of one server: the workload's cells, with a replica's share of the requests in flight."""
        replicas = self.plan(()).layout.replicas
        return tuple(_share(cell, replicas) for cell in self.workload.cells)

    def payload(self, trial: SweepTrial) -> dict[str, object]:
        """Return everything that determines a trial's figures, for its fingerprint; equal trials share one entry."""
        contest = {"contest": trial.contest} if trial.contest else {}
        return self.plan_payload(self.plan(trial.point), run=trial.run, **contest)

    def plan_payload(self, plan: LaunchPlan, **extra: object) -> dict[str, object]:
        """Return the payload of any plan, with ``extra`` entries; TunableOp's path is replaced by its digest."""
        launch = plan.canonical()
        if TUNABLEOP in launch["env"]:
            launch["env"] = {
                name: value for name, value in launch["env"].items() if name != "PYTORCH_TUNABLEOP_FILENAME"
            }
            launch["tunableop"] = self.tuned.digest if self.tuned else "being tuned"
        return {
            "stage": STAGE,
            "version": VERSION,
            "inputs": {"model": self.digest},
            "launch": launch,
            "cells": [cell.to_json() for cell in self.cells],
            "vllm": self.vllm.version,
            "machine": dict(self.machine),
            **extra,
        }

    def fingerprint(self, trial: SweepTrial) -> str:
        """Return the fingerprint of a trial, which names its entry in the store."""
        return fingerprint(self.payload(trial))


def _share(cell: Cell, replicas: int) -> Cell:
    if replicas == 1:
        return cell
    in_flight = None if cell.concurrency is None else max(1, cell.concurrency // replicas)
    return replace(
        cell,
        concurrency=in_flight,
        num_prompts=max(1, cell.num_prompts // replicas, in_flight or 1),
        warmups=-(-cell.warmups // replicas),
        rate=None if cell.rate is None else cell.rate / replicas,
    )


def with_tunableop(plan: LaunchPlan, folder: Path, *, search: bool) -> LaunchPlan:
    """Return the plan with TunableOp on, which reads its kernels from ``folder``.

    With ``search`` the servers search for kernels and write them there.
    """
    variables = {
        TUNABLEOP: "1",
        "PYTORCH_TUNABLEOP_TUNING": "1" if search else "0",
        "PYTORCH_TUNABLEOP_FILENAME": str(folder / TUNED_FILE),
    }
    return replace(plan, env=MappingProxyType({**plan.env, **variables}))


def planner(request: ServingRequest) -> Planner:
    """Return a function that plans the request with changed knobs.

    It keeps the base plan's layout unless the changes set another one.
    """
    base_plan = cache(partial(plan_serving, request))

    def plan(changes: Mapping[str, Value]) -> LaunchPlan:
        base = base_plan()
        if not changes:
            return base
        layout = None if LAYOUT & changes.keys() else base.layout
        return plan_serving(replace(request, overrides={**request.overrides, **changes}, layout=layout))

    return plan


def machine_facts(target: ServingTarget, machine: Host) -> dict[str, str]:
    """Return the machine's CPU, usable cores and accelerators. Raises `UserError` when it is not the target."""
    facts = {"target": str(target), "cpu": cpu_name(machine), "cores": str(cores())}
    if target.accelerator.kind == "cpu":
        return facts
    detected = detect(machine)
    row = hardware(detected.hardware)
    if row.kind != target.accelerator.kind or detected.gpus < target.gpus:
        raise UserError(
            f"the target is {target}, but this machine has {_accelerator_words(detected)}",
            hint="tune on the machine that will serve; --dry-run shows what a sweep would try on another",
        )
    return {**facts, "accelerators": _accelerator_words(detected)}


def device_name(facts: Mapping[str, str]) -> str:
    """Return the machine's name for the page, from `machine_facts`."""
    cpu = f"{facts['cpu']}, {facts['cores']} {'core' if facts['cores'] == '1' else 'cores'}"
    return f"{facts['accelerators']} ({cpu})" if "accelerators" in facts else cpu


def _accelerator_words(detected: DetectedAccelerators) -> str:
    row = hardware(detected.hardware)
    if row.kind == "cpu":
        return "no GPU"
    mode = detected.compute_partition if detected.partitioned else None
    return f"{detected.gpus} x {row.title}" + (f" in {mode} mode" if mode else "")
