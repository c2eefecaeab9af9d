"""What is tuned: a checkpoint on a target, with the load that it is tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from eval.workloads import Cell, Workload
from pipeline.canonical import fingerprint
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.plan import LaunchPlan
from pipeline.tuning.base_plan import Planner
from pipeline.tuning.space import TUNABLEOP, Point, Trial
from pipeline.tuning.tunableop import Tuned, serving_with

STAGE, VERSION = "tune", 1


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
        plan = self.planner({knob: value for knob, value in point if knob != TUNABLEOP})
        return (
            serving_with(plan, self.tuned.folder)
            if any(knob == TUNABLEOP for knob, _ in point) and self.tuned
            else plan
        )

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

    def with_tuned(self, tuned: Tuned) -> Subject:
        """The same with the result of a TunableOp pass."""
        return replace(self, tuned=tuned)


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


def frozen(facts: Mapping[str, str]) -> Mapping[str, str]:
    """A read-only copy."""
    return MappingProxyType(dict(facts))
