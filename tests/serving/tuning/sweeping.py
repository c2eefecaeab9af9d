"""A sweep against the stand-in for vLLM, from a folder that says all of it: also a program, for tests that kill it.

``python sweeping.py FOLDER [SECONDS]`` sweeps what FOLDER/sweep.json says, within a budget of so many seconds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantmint.eval.workloads import Cell, Workload
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.runs.tuning import KernelTuning, tune
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout
from quantmint.pipeline.serving.tuning.report import TuningReport
from quantmint.pipeline.serving.tuning.space import Axis, Value
from quantmint.pipeline.serving.tuning.subject import TuningSubject
from quantmint.pipeline.serving.tuning.sweep import Design, KnobSweep, Objective
from quantmint.pipeline.store.tree import Store

CELL = Cell("in8-out4-c2", 8, 4, 2, 4, 1)
FAKE = Path(__file__).with_name("fake_vllm.py")


@dataclass(frozen=True)
class FakeVllm:
    """What a sweep asks of a serving environment."""

    executable: Path
    version: str = "0.32.0+fake"

    @property
    def python(self) -> Path:
        return self.executable.with_name("python")


def command_in(folder: Path) -> Path:
    command = folder / "bin" / "vllm"
    if not command.exists():
        command.parent.mkdir(parents=True, exist_ok=True)
        partial = command.with_name(f"vllm.{id(command)}")
        partial.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text(encoding='utf-8')}", encoding="utf-8")
        partial.chmod(0o755)
        partial.replace(command)
    return command


def planner_for(model: Path, base: dict[str, Value], tensor: int = 1) -> Any:
    """The plan is what is asked for: no table stands between a test and what it sees."""

    def plan(changes: dict[str, Value]) -> LaunchPlan:
        env, argv = {}, ["vllm", "serve", str(model), "--served-model-name", "model"]
        for knob, value in {**base, **changes}.items():
            if not knob.startswith("--"):
                env |= {} if value is False else {knob: str(value)}
            elif value is not False:
                argv += [knob] if value is True else [knob, str(value)]
        return LaunchPlan(MappingProxyType(env), tuple(argv), "model", tensor, (), ParallelLayout(tensor=tensor))

    return plan


def subject_in(
    folder: Path, *, base: dict[str, Value] | None = None, kind: str = "cpu", tensor: int = 1
) -> TuningSubject:
    return TuningSubject(
        name="fake",
        model=folder / "model",
        digest="a" * 64,
        target="cpu:1",
        kind=kind,
        workload=Workload("small", "A test.", "throughput", (CELL,)),
        vllm=FakeVllm(command_in(folder)),  # type: ignore[arg-type]
        machine=MappingProxyType({"cpu": "fake CPU", "cores": "2"}),
        planner=planner_for(folder / "model", base or {}, tensor),
    )


def sweep_of(folder: Path, axes: dict[str, list[Value]], **options: Any) -> KnobSweep:
    """A sweep over axes; ``options`` are those of `Design`, ``objective`` and those of `subject_in`."""
    objective = options.pop("objective", Objective())
    design = {key: options.pop(key) for key in ("mode", "repeat") if key in options}
    made = tuple(Axis(knob, tuple(values)) for knob, values in axes.items())
    return KnobSweep(subject_in(folder, **options), Design(made, **design), objective)


def run(folder: Path, sweep: KnobSweep, *, budget: float | None = None, **more: Any) -> TuningReport:
    """Sweep to the end; the report."""
    reporter = PlainReporter()
    store = Store(folder / "store", on_warning=reporter.warn)
    kernels = KernelTuning(more.pop("tunableop", False), more.pop("products", None))
    options = {"existing": {}, "kernels": kernels, "redo": False} | more
    return tune(sweep, store, budget, reporter, folder / "out", **options)[0]


def starts(folder: Path) -> list[dict[str, str]]:
    """Every server that was started, with its knobs."""
    path = folder / "model" / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    place = Path(sys.argv[1])
    asked = json.loads((place / "sweep.json").read_text())
    run(place, sweep_of(place, asked), budget=float(sys.argv[2]) if len(sys.argv) > 2 else None)
