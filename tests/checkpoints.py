"""Judged checkpoints on disk, as a run leaves them: `report.json`, the page, and the gate's record with its samples."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from quantmint.eval import record
from quantmint.eval.canary import Canary
from quantmint.eval.gate import GateReport, Policy, judge
from quantmint.eval.measurements import CellResult, Launch, MachineState, Measurements, Server, StructureCheck
from quantmint.eval.samples import Sample, SampleSet
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.store.gc import RunLog
from quantmint.pipeline.store.tree import Store

GB = 1_000_000_000
_JUDGED: dict[str, GateReport] = {}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def answers(task: str, scores: Sequence[float], metric: str = "acc", **options: Any) -> SampleSet:
    names = [digest(f"{task}{number}")[:16] for number in range(len(scores))]
    rows = zip(names, scores, strict=True)
    return SampleSet(
        task, metric, tuple(Sample(task, n, "none", x, x, x, float(s)) for n, (x, s) in enumerate(rows)), **options
    )


def perplexity(task: str, nats: float) -> tuple[SampleSet, SampleSet]:
    """Forty documents of 50 words, each of which costs the candidate about `nats` a word more."""
    noise = np.random.RandomState(5).normal(0, 0.02, 40)
    sides = []
    for loss in (0.0, nats):
        rows = tuple(
            Sample(task, n, "none", f"{n:x}", f"{n:x}", f"{n:x}", -50 * (2.4 + 0.1 * (n % 7) + loss * (1 + e)), 50.0)
            for n, e in enumerate(noise)
        )
        sides.append(SampleSet(task, "word_perplexity", rows, kind="perplexity"))
    return sides[0], sides[1]


def cell(name: str, speed: float, latency: float = 1.0) -> CellResult:
    times = (52.4, 131.7, 9.82, 14.1, 9.61, 21.4, 361.2, 498.0)
    return CellResult(name, 64, 0, 10.0, speed, 3 * speed, *(time * latency for time in times))


@dataclass(frozen=True)
class Checkpoint:
    """What is to be written: shares of 2,000 and 400 items that are lost and gained, and speeds by cell."""

    name: str
    lost: Mapping[str, int] = field(default_factory=lambda: {"facts": 12, "sums": 6})
    gained: Mapping[str, int] = field(default_factory=lambda: {"facts": 10, "sums": 4})
    bytes: int = 9 * GB
    speeds: Mapping[str, float] = field(default_factory=lambda: {"c64": 1.3, "c256": 1.4})
    nats: float | None = 0.004
    hardware: str = "mi300x"
    device: str = "AMD Instinct MI300X"
    model: str = "meta-llama/Llama-3.1-8B-Instruct"
    scheme: str = "ptpc_fp8 with an FP8 KV cache, quark"
    created: str = "2026-03-14T09:26:53+00:00"
    first_loss: int = 0  # the first of the lost items
    faults: tuple[str, ...] = ()
    agreement: float = 0.981
    structure: Verdict = Verdict.PASS
    stopped: str | None = None

    def measurements(self) -> Measurements:
        samples = {}
        for task, (items, right) in {"facts": (2000, 1800), "sums": (400, 320)}.items():
            if task in self.lost:
                before = np.zeros(items)
                before[:right] = 1
                after = before.copy()
                after[self.first_loss : self.first_loss + self.lost[task]] = 0
                after[right : right + self.gained[task]] = 1
                samples[task] = (answers(task, before), answers(task, after))
        if self.nats is not None:
            samples["prose"] = perplexity("prose", self.nats)
        argv = ("vllm", "serve", "MODEL", "--max-model-len", "8192")
        place = {"hardware": self.hardware, "device": self.device}
        launches = []
        for number, letter in enumerate("ABBABAAB"):
            side = "baseline" if letter == "A" else "candidate"
            cells = {
                name: cell(name, 4000 * (1 + 0.004 * number) * (factor if side == "candidate" else 1))
                for name, factor in self.speeds.items()
            }
            tokens = 1_262_352 * (1 if side == "baseline" else 2)
            launches.append(Launch(side, number, cells, tokens, "auto", 40.0, 0.3, MachineState()))  # type: ignore[arg-type]
        return Measurements(
            artefact=digest(self.name),
            structure=StructureCheck(self.structure),
            baseline=Server("0.32.0", argv=argv, env={}, **place),
            candidate=Server("0.32.0", argv=argv, env={}, faults=self.faults, **place),
            samples=samples,
            canary=Canary(
                24, 1200, 0.95, self.agreement, self.agreement - 0.01, self.agreement + 0.01, 0.02, 0.015, 0.025,
                9.0, 9.1, (("Once upon a time", 0.2),),
            ),
            launches=tuple(launches) if self.speeds else (),
            weights=(16 * GB, self.bytes),
            stopped=self.stopped,
            claims={"memory_fp8": 2.0, "kv_tokens_fp8": 2.0, "throughput": 1.6},
        )  # fmt: skip

    def policy(self) -> Policy:
        margins = {"facts": 0.01, "sums": 0.04, "prose": 0.02}
        kept = {task: margin for task, margin in margins.items() if task in self.lost or task == "prose"}
        return Policy({t: m for t, m in kept.items() if t != "prose" or self.nats is not None}, launches=4)

    def judged(self) -> GateReport:
        """The judgement, made once for equal checkpoints: it takes a second."""
        if repr(self) not in _JUDGED:
            _JUDGED[repr(self)] = judge(self.measurements(), self.policy())
        return _JUDGED[repr(self)]

    def report(self) -> dict[str, Any]:
        """The parts of a report that are read again; the page's own tests look at the rest."""
        return {
            "name": self.name,
            "model": self.model,
            "scheme": self.scheme,
            "created": self.created,
            "gate": self.judged().to_json(),
            "size": {"baseline_bytes": 16 * GB, "candidate_bytes": self.bytes, "parts": []},
            "digests": {"source": f"{self.model} {digest(self.model)[:40]}"},
            "recipe": f"name: {self.name}\n",
            "kv_tokens": {"baseline": 1_262_352, "candidate": 2_524_704},
            "launches": [launch.to_json() for launch in self.measurements().launches],
        }

    def write(self, folder: Path) -> Path:
        """Write the evidence into a folder; returns the path of `report.json`."""
        record.write(folder, self.measurements(), self.judged())
        (folder / "report.html").write_text(f"<!doctype html><title>{self.name}</title><p>the report</p>")
        path = folder / "report.json"
        path.write_text(json.dumps(self.report()))
        return path


def run(root: Path, recipe: str, checkpoint: Checkpoint | None, started: str = "", **ended: Any) -> str:
    """Leave a run of a recipe in a store with what it made of a checkpoint: gate and report; returns the run's name.

    ``started`` replaces the time, ISO 8601; ``ended`` is how it ended where there is no checkpoint: ``error``,
    ``unfinished`` or ``until``.
    """
    store = Store(root)
    plan = [("quantize", digest(f"q{recipe}"))]
    if checkpoint is not None:
        gate = _entry(store, "gate", {}, checkpoint, {"gate.json", "samples"})
        report = _entry(store, "report", {"gate": gate}, checkpoint, {"report.json", "report.html"})
        plan += [("gate", gate), ("report", report)]
    log = RunLog.start(root, recipe, digest(recipe), plan)
    if not ended.get("unfinished"):
        stages = {stage: {"cached": False, "seconds": 1.0, "fingerprint": made} for stage, made in plan}
        if "until" in ended:
            log.finish(None, 0, facts={"stages": {ended["until"]: {"cached": False, "seconds": 1.0}}})
        elif checkpoint is None:
            log.finish(None, 5, facts={"error": ended["error"]})
        else:
            verdict = checkpoint.judged().verdict
            log.finish(verdict.value, verdict.exit_code, facts={"stages": stages})
    if started:
        path, data = log.run.path, json.loads(log.run.path.read_text())
        name = re.sub(r"^[^Z]+Z", re.sub("[-:]", "", started[:19]) + ".000000Z", path.name)
        path.unlink()
        (path.parent / name).write_text(json.dumps({**data, "started": started}))
        return name.removesuffix(".json")
    return log.run.id


def _entry(store: Store, stage: str, inputs: Mapping[str, str], checkpoint: Checkpoint, kept: set[str]) -> str:
    payload = {"stage": stage, "version": 1, "inputs": dict(inputs), "of": digest(repr(checkpoint))}
    made = fingerprint(payload)
    with store.working(stage, made) as work:
        if work.existing is None:
            checkpoint.write(work.path)
            for path in work.path.iterdir():
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            work.commit(payload=payload, result={}, started=datetime.now(UTC), tools={})
    return made


GOOD = Checkpoint("llama8b-ptpc-kv")
SMALL = Checkpoint(
    "llama8b-mxfp4", {"facts": 90, "sums": 40}, {"facts": 20, "sums": 9}, 5 * GB, {"c64": 1.15, "c256": 1.55}, 0.05,
    scheme="mxfp4, quark", first_loss=300, agreement=0.93,
)  # fmt: skip
WORSE = Checkpoint(
    "llama8b-fp8-block", {"facts": 44, "sums": 15}, {"facts": 12, "sums": 5}, 9 * GB, {"c64": 1.2, "c256": 1.25}, 0.01,
    scheme="fp8_block, compressed-tensors", first_loss=10, agreement=0.97,
)  # fmt: skip
