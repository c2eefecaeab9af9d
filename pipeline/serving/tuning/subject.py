"""What is tuned: a checkpoint on a target and this machine, with the load and the launch plan that it starts from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from eval.workloads import Cell, Workload
from pipeline.base.canonical import fingerprint
from pipeline.base.errors import UserError
from pipeline.base.hardware import hardware
from pipeline.base.machine import Machine, cpu_name
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.host.detect import Detected, detect
from pipeline.serving.plan import LaunchPlan, Layout
from pipeline.serving.planning.target import Target
from pipeline.serving.tuning.space import TUNABLEOP, Point, Trial, Value

STAGE, VERSION = "tune", 1
TUNED_FILE = "tunableop_results%d.csv"
Planner: TypeAlias = Callable[[Mapping[str, Value]], LaunchPlan]
"""A plan with some knobs changed, by their names. UserError for what cannot be planned."""

_LAYOUT = frozenset(
    {"--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel"}
)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The files of a pass. ``shapes`` counts tuned operator shapes by device, ``operators`` those of each kind.

    ``validators`` are the versions that the files hold for: PyTorch ignores a file that was made with others.
    """

    folder: Path
    digest: str
    shapes: Mapping[int, int]
    operators: Mapping[str, int]
    validators: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Subject:
    """A sweep's constants. ``digest`` is the SHA-256 of the checkpoint; ``machine`` says what is measured on."""

    name: str
    model: Path
    digest: str
    target: str
    kind: str
    workload: Workload
    vllm: VllmEnvironment
    machine: Mapping[str, str]
    planner: Planner
    tuned: Tuned | None = None

    def plan(self, point: Point) -> LaunchPlan:
        """The launch of a point; UserError where the planner refuses it."""
        changes = dict(point)
        tunableop = changes.pop(TUNABLEOP, None)
        plan = self.planner(changes)
        return serving_with(plan, self.tuned.folder) if tunableop and self.tuned else plan

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The load of one server: a replica gets its share of the requests in flight."""
        replicas = self.plan(()).layout.replicas
        return tuple(_share(cell, replicas) for cell in self.workload.cells)

    def payload(self, trial: Trial) -> dict[str, object]:
        """All that shapes a trial's figures, for its fingerprint: equal trials of other sweeps are found by it."""
        return self.payload_of(self.plan(trial.point), run=trial.run)

    def payload_of(self, plan: LaunchPlan, **more: object) -> dict[str, object]:
        """The same for any plan. Where a TunableOp file lies is no content: its digest stands for it."""
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
            **more,
        }

    def fingerprint(self, trial: Trial) -> str:
        """The name of a trial's entry in the store."""
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


def tuning(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """The plan of the first pass: it searches, and writes what it finds into ``folder``."""
    return _with(plan, "1", folder / TUNED_FILE)


def serving_with(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """A plan that uses what was found and searches no more."""
    return _with(plan, "0", folder / TUNED_FILE)


def _with(plan: LaunchPlan, search: str, filename: Path) -> LaunchPlan:
    variables = {
        TUNABLEOP: "1",
        "PYTORCH_TUNABLEOP_TUNING": search,
        "PYTORCH_TUNABLEOP_FILENAME": str(filename),
    }
    return replace(plan, env=MappingProxyType({**plan.env, **variables}))


def planner(make: Callable[..., LaunchPlan], overrides: Mapping[str, Value]) -> Planner:
    """The plan that a sweep starts from, as a function of what is changed in it.

    ``make`` is `plan_serving` but for ``overrides`` and ``layout``. ``overrides`` hold for the base plan too, and what
    is changed goes on top of them. The layout stays that of the base plan unless it is what is changed: one knob at a
    time.
    """
    base: list[LaunchPlan] = []

    def changed(changes: Mapping[str, Value]) -> LaunchPlan:
        if not base:
            base.append(make(overrides=overrides, layout=None))
        layout: Layout | None = None if _LAYOUT & changes.keys() else base[0].layout
        return make(overrides={**overrides, **changes}, layout=layout) if changes else base[0]

    return changed


def machine_facts(target: Target, machine: Machine) -> dict[str, str]:
    """CPU, cores that we may use, and the accelerators that are there.

    UserError where the machine is not the target: a sweep measures, it cannot plan for another machine.
    """
    cores = len(os.sched_getaffinity(0))
    facts = {"target": str(target), "cpu": cpu_name(machine), "cores": str(cores)}
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
