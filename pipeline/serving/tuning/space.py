"""What a sweep may change, the points that it measures, and the knobs that it tries by itself (`sweeps.yaml`).

A point is what is changed in the base plan: pairs of a knob and its value in the order of the sweep, ``()`` for the
base plan itself. `True` is a flag without a value, `False` a knob that the launch leaves out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from quantmint.eval.workloads import Cell, Workload
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.base.data import beside
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Machine, cores, cpu_name
from quantmint.pipeline.serving.environment import VllmEnvironment, parse_version
from quantmint.pipeline.serving.host.detect import DetectedAccelerators, detect
from quantmint.pipeline.serving.knobs.overrides import LAYOUT
from quantmint.pipeline.serving.knobs.table import knob as knob_of
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import ServingTarget

Value: TypeAlias = "str | bool"
Point: TypeAlias = tuple[tuple[str, Value], ...]

BASE: Point = ()
TUNABLEOP = "PYTORCH_TUNABLEOP_ENABLED"
_KILO = re.compile(r"(\d+)k", re.IGNORECASE)
_SWITCHES: Mapping[str, Value] = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True, slots=True)
class Axis:
    """One knob with the values to try."""

    knob: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """One launch of a point; ``run`` counts its repetitions from 0, in the screening or in a ``contest``."""

    point: Point
    run: int = 0
    contest: str = ""


def parse_knob(text: str) -> tuple[str, tuple[Value, ...]]:
    """Read ``NAME=v1,v2``: 16k is 16384, on and off are a switch; commas inside braces do not separate."""
    name, _, values = text.partition("=")
    words = (word.strip() for word in re.findall(r"(?:\{[^}]*\}|[^,{])+", values))
    found = tuple(dict.fromkeys(_value(word) for word in words if word))
    if not found or not name.strip():
        raise UserError(f"--knob {text!r}: expected NAME=v1,v2,...")
    return name.strip(), found


def _value(word: str) -> Value:
    kilo = _KILO.fullmatch(word)
    return str(int(kilo[1]) * 1024) if kilo is not None else _SWITCHES.get(word.lower(), word)


def value_in(plan: LaunchPlan, knob: str) -> Value:
    """What a plan says of a knob; False where it leaves it out. A switch's opposite (``--no-...``) counts as False."""
    if not knob.startswith("--"):
        return plan.env.get(knob, False)
    given = plan.option(knob)
    return False if given is None else given or True


def without_base_values(
    axes: Sequence[Axis], base: LaunchPlan, default: Callable[[str], str] = lambda _: ""
) -> tuple[Axis, ...]:
    """Leave out what the base plan has already; ``default`` is vLLM's, where a plan leaves a knob out."""

    def new(knob: str, value: Value) -> bool:
        before = value_in(base, knob)
        return not same(value, before) and not (before is False and same(value, default(knob)))

    left = (Axis(a.knob, tuple(v for v in a.values if new(a.knob, v))) for a in axes)
    return tuple(axis for axis in left if axis.values)


def same(one: Value, other: Value) -> bool:
    """Whether two values ask for the same: numbers and JSON by what they say, not by how they are written."""
    return one == other or (isinstance(one, str) and isinstance(other, str) and _plain(one) == _plain(other))


def _plain(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def label(point: Point) -> str:
    """What a point changes, in the words of a reader: ``max-num-seqs 64, no enforce-eager``."""
    return ", ".join(change_label(knob, value) for knob, value in point) or "base plan"


def change_label(knob: str, value: Value) -> str:
    """One change in words: ``max-num-batched-tokens 16384``, ``no enforce-eager``, ``cudagraph_mode FULL``."""
    if knob == TUNABLEOP:
        return "TunableOp"
    if knob.startswith("AITER_CONFIG_GEMM_"):  # a path
        return "AITER's tuned kernels"
    name = knob.removeprefix("--")
    if isinstance(value, bool):
        return name if value else name[3:] if name.startswith("no-") else f"no {name}"
    inner = _plain(value)
    if isinstance(inner, dict):
        return " ".join(f"{key} {item}" for key, item in inner.items())
    return f"{name} {value}"


def default_axes(
    kind: str, *, facts: Mapping[str, str], version: str, cores: int, concurrency: int
) -> tuple[Axis, ...]:
    """The axes for a target of ``kind`` (rocm, cuda, cpu) that a vLLM knows; ``facts`` are those of `when`."""
    numbers = {
        "{cores}": str(cores),
        "{half_cores}": str(max(1, cores // 2)),
        "{half_concurrency}": str(max(1, concurrency // 2)),
        "{double_concurrency}": str(2 * concurrency),
    }
    axes = []
    for row in beside(__file__, "sweeps.yaml")[kind]:
        holds = all(facts.get(fact) in values for fact, values in row.get("when", {}).items())
        knob = knob_of(row["knob"])
        if holds and knob.exists_in(parse_version(version)):
            values = row.get("values") or knob.sweep
            found = dict.fromkeys(numbers.get(value, value) for value in values)
            axes.append(Axis(knob.name, tuple(found)))
    return tuple(axes)


def given_axes(given: Sequence[tuple[str, tuple[Value, ...]]], *, version: str) -> tuple[Axis, ...]:
    """The axes of ``--knob``; a repeated knob collects its values. UserError for one that this vLLM does not have."""
    axes: dict[str, Axis] = {}
    for knob, values in given:
        entry = knob_of(knob)
        if entry.kind not in {"flag", "env"}:
            raise UserError(f"--knob {knob}: a sweep changes arguments and variables of vLLM, this is a {entry.kind}'s")
        if not entry.exists_in(parse_version(version)):
            raise UserError(f"--knob {knob}: vLLM {version} does not know it")
        earlier = axes[knob].values if knob in axes else ()
        axes[knob] = Axis(knob, tuple(dict.fromkeys((*earlier, *values))))
    return tuple(axes.values())


@cache
def gated() -> frozenset[str]:
    """The knobs that change what a model answers and not only how fast: the file's, and what decides number formats."""
    listed = {row["knob"] for rows in beside(__file__, "sweeps.yaml").values() for row in rows if row.get("gated")}
    return frozenset(
        listed | {"--kv-cache-dtype", "--dtype", "--quantization", "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"}
    )


STAGE, VERSION = "tune", 2
TUNED_FILE = "tunableop_results%d.csv"
Planner: TypeAlias = Callable[[Mapping[str, Value]], LaunchPlan]
"""A plan with some knobs changed, by their names. UserError for what cannot be planned."""


@dataclass(frozen=True, slots=True)
class TunedKernels:
    """The files of a pass; ``shapes`` is how many operator shapes were tuned, by the number of the device."""

    folder: Path
    digest: str
    shapes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TuningSubject:
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
    tuned: TunedKernels | None = None

    def plan(self, point: Point) -> LaunchPlan:
        """The launch of a point; UserError where the planner refuses it."""
        changes = dict(point)
        tunableop = changes.pop(TUNABLEOP, None)
        plan = self.planner(changes)
        return with_tunableop(plan, self.tuned.folder, search=False) if tunableop and self.tuned else plan

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The load of one server: a replica gets its share of the requests in flight."""
        replicas = self.plan(()).layout.replicas
        return tuple(_share(cell, replicas) for cell in self.workload.cells)

    def payload(self, trial: SweepTrial) -> dict[str, object]:
        """All that shapes a trial's figures, for its fingerprint: equal trials of other sweeps are found by it."""
        contest = {"contest": trial.contest} if trial.contest else {}
        return self.payload_of(self.plan(trial.point), run=trial.run, **contest)

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

    def fingerprint(self, trial: SweepTrial) -> str:
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


def with_tunableop(plan: LaunchPlan, folder: Path, *, search: bool) -> LaunchPlan:
    """The plan of the first pass, which searches and writes what it finds into ``folder``; or one that only uses it."""
    variables = {
        TUNABLEOP: "1",
        "PYTORCH_TUNABLEOP_TUNING": "1" if search else "0",
        "PYTORCH_TUNABLEOP_FILENAME": str(folder / TUNED_FILE),
    }
    return replace(plan, env=MappingProxyType({**plan.env, **variables}))


def planner(request: ServingRequest) -> Planner:
    """Return a function that plans the request with changed knobs; it keeps the base plan's layout unless the changes
    set another one.
    """
    base_plan = cache(partial(plan_serving, request))

    def plan(changes: Mapping[str, Value]) -> LaunchPlan:
        base = base_plan()
        if not changes:
            return base
        layout = None if LAYOUT & changes.keys() else base.layout
        return plan_serving(replace(request, overrides={**request.overrides, **changes}, layout=layout))

    return plan


def machine_facts(target: ServingTarget, machine: Machine) -> dict[str, str]:
    """CPU, cores that we may use, accelerators; UserError where this is not the target: a sweep measures."""
    facts = {"target": str(target), "cpu": cpu_name(machine), "cores": str(cores())}
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


def _named(found: DetectedAccelerators) -> str:
    row = hardware(found.hardware)
    if row.kind == "cpu":
        return "no GPU"
    parts = found.compute_partition if found.partitioned else None
    return f"{found.gpus} x {row.title}" + (f" in {parts} mode" if parts else "")
