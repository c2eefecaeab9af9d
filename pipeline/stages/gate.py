"""gate: the verdict over both sides' measurements, recorded so that anyone can judge again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eval import bench, record
from eval.bench import Launch, Machine
from eval.gate import Policy, judge
from eval.measurements import Measurements, Structure
from eval.servers import Server
from eval.verdict import Verdict
from pipeline.digest import folder_digest
from pipeline.stage import Job, Output, Setting
from pipeline.stages.bench import result_file
from pipeline.stages.evaluate import read_samples
from pipeline.stages.inspect import reasons_of
from pipeline.stages.quantize import CHECKPOINT
from pipeline.stages.serve import LAUNCH, Side, measured_inputs
from pipeline.store.entries import Entry

if TYPE_CHECKING:
    from eval.samples import SampleSet

GATE = "gate.json"


@dataclass(frozen=True, slots=True)
class GateStage:
    """Pure over the entries before it."""

    key: str = "gate"
    family: str = "gate"
    version: int = 1

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The checkpoint with its proof, and both sides' measurements."""
        return {"quantize": "quantize", "inspect": "inspect", **measured_inputs()}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """What the recipe promises, task by task."""
        return {
            "policy": policy_of(setting).to_json(),
            "hardware": setting.recipe.target.hardware,
            "tasks": [task.task for task in setting.suite.tasks],
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """None: the statistics are ours, and versioned with the stage."""
        return {}

    def run(self, job: Job) -> Output:
        """Judge."""
        samples: dict[str, tuple[SampleSet, SampleSet]] = {}
        for task in job.setting.suite.tasks:
            baseline, candidate = (read_samples(job.inputs[f"evaluate-{side}"].path, task) for side in _ORDER)
            samples[task.task] = (baseline, candidate)
        measurements = Measurements(
            artefact=checkpoint_digest(job.inputs["quantize"]),
            structure=_structure(job.inputs["inspect"]),
            baseline=_server(job, "baseline"),
            candidate=_server(job, "candidate"),
            samples=samples,
            launches=_launches(job),
        )
        report = judge(measurements, policy_of(job.setting))
        record.write(job.path, measurements, report)
        return Output(
            result={"verdict": report.verdict.value, "artefact": report.artefact, "reasons": list(report.reasons)},
            summary=f"{report.verdict.value}: {next(iter(report.reasons), 'nothing was judged')}",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Nothing lies outside the store."""
        return True


_ORDER: tuple[Side, ...] = ("baseline", "candidate")


def policy_of(setting: Setting) -> Policy:
    """The recipe's promises on its suite."""
    gate = setting.recipe.gate
    policy = Policy.for_suite(
        setting.suite,
        margin=gate.accuracy.margin,
        confidence=gate.accuracy.confidence,
        power=gate.accuracy.power,
        min_ratio=gate.throughput.min_ratio,
        baseline_score=gate.accuracy.baseline_score,
        baseline_tolerance=gate.accuracy.baseline_tolerance,
    )
    rate = gate.accuracy.expected_flip_rate
    return policy if rate is None else replace(policy, expected_flip_rate=rate)


def checkpoint_digest(entry: Entry) -> str:
    """The digest of the checkpoint's files, the same wherever they lie."""
    prefix = f"{CHECKPOINT}/"
    return folder_digest(
        {
            name.removeprefix(prefix): (fact.size, fact.sha256)
            for name, fact in entry.record.files.items()
            if name.startswith(prefix)
        }
    )


def _structure(entry: Entry) -> Structure:
    return Structure(Verdict(str(entry.record.result["verdict"])), reasons_of(entry))


def _server(job: Job, side: Side) -> Server:
    serve = job.inputs[f"serve-{side}"]
    launch = json.loads(serve.file(LAUNCH).read_text(encoding="utf-8"))
    found = [job.inputs[f"{kind}-{side}"].record.result["faults"] for kind in ("serve", "evaluate")]
    faults = dict.fromkeys(str(line) for lines in found if isinstance(lines, list) for line in lines)
    return Server(
        version=serve.record.tools["vllm"],
        device=job.setting.recipe.target.hardware,
        hardware=job.setting.recipe.target.hardware,
        argv=tuple(launch["plan"]["argv"]),
        env=launch["plan"]["env"],
        faults=tuple(faults),
    )


def _launches(job: Job) -> tuple[Launch, ...]:
    """One launch a side, as the stage `bench` keeps it."""
    found = []
    for number, side in enumerate(_ORDER):
        folder = job.inputs[f"bench-{side}"].path
        cells = {cell.name: bench.read(result_file(folder, cell), cell) for cell in job.setting.workload.cells}
        found.append(Launch(side, number, cells, None, None, 0.0, None, Machine()))
    return tuple(found)
