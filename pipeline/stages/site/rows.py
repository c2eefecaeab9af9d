"""One run as a row of the index. `index.json` holds exactly these, so that a row outlives its run in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from eval.accuracy import margin_in_units
from eval.comparison.model import Contender, read
from eval.errors import MeasurementError
from eval.records import Record
from pipeline.stages.finished import of_run
from pipeline.stages.report import DATA
from pipeline.store.runs import Run
from pipeline.store.tree import Store

NO_VERDICT = "NO VERDICT"
UNFINISHED = "UNFINISHED"
BROKEN = "BROKEN"
PAGE_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Task(Record):
    """One gated task of a run: the difference with its two-sided interval as in `eval.accuracy`, and its margin."""

    task: str
    kind: str
    difference: float
    low: float
    high: float
    margin: float
    verdict: str | None


@dataclass(frozen=True, slots=True)
class Speed(Record):
    """The cell with the least ratio of output tokens per second, with its interval."""

    cell: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Judged(Record):
    """What a report says of its checkpoint; `page` is the copied report's folder, named by the digest of its files."""

    page: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{PAGE_DIGITS}}}$")]
    model: str
    baseline: str
    scheme: str
    hardware: str
    device: str
    runtime: str
    size_ratio: float
    tasks: tuple[Task, ...]
    speed: Speed | None

    @property
    def worst(self) -> Task | None:
        """The task that used up most of its margin."""
        return min(self.tasks, key=lambda t: t.difference / margin_in_units(t.kind, t.margin), default=None)


@dataclass(frozen=True, slots=True)
class Row(Record):
    """A run: `status` is a verdict, NO VERDICT (it was not to go so far), BROKEN or UNFINISHED; `reasons` say why."""

    run: str
    recipe: str
    started: str
    finished: str | None
    status: str
    reasons: tuple[str, ...]
    judged: Judged | None


def row_of(run: Run, store: Store) -> tuple[Row, Path | None]:
    """A run's row, and the folder that its report is copied from (None: it has no report, or it is gone)."""
    entry = of_run(run, store)
    judged, status, reasons = None, run.verdict or NO_VERDICT, list(_reasons(run))
    if run.finished is None:
        status = UNFINISHED
    elif "error" in run.facts:
        status = BROKEN
    if entry is not None:
        page = entry.digest[:PAGE_DIGITS]
        try:
            found = read(entry.file(DATA), None)
            judged, reasons = judgement(found, page), list(found.gate.reasons)
        except MeasurementError as error:
            reasons.append(f"Its report is of another version: {error}")
    elif run.verdict is not None:
        reasons.append("Its report is not in the store any more.")
    row = Row(run.id, run.recipe, run.started, run.finished, status, tuple(reasons), judged)
    return row, None if entry is None or judged is None else entry.path


def judgement(found: Contender, page: str) -> Judged:
    """What the index shows of a report."""
    gate = found.gate
    tasks = []
    for result in gate.accuracy:
        if (margin := gate.policy.margins.get(result.task)) is not None:
            verdict = gate.verdict_of("accuracy", result.task)
            ends = (result.interval_low, result.interval_high)
            word = None if verdict is None else verdict.value
            tasks.append(Task(result.task, result.kind, result.difference, *ends, margin, word))
    cells = [cell for cell in gate.throughput if cell.cell not in found.paced]
    cell = min(cells, key=lambda cell: cell.ratio, default=None)
    return Judged(
        page=page,
        model=found.model,
        baseline=found.baseline,
        scheme=found.scheme,
        hardware=gate.hardware,
        device=gate.device,
        runtime=gate.runtime,
        size_ratio=found.size_ratio,
        tasks=tuple(tasks),
        speed=None if cell is None else Speed(cell.cell, cell.ratio, cell.ratio_low, cell.ratio_high),
    )


def _reasons(run: Run) -> list[str]:
    if run.finished is None:
        return ["It still runs, or was killed: the same command goes on from its last finished stage."]
    if "error" in run.facts:
        return [str(run.facts["error"])]
    if run.verdict is None:
        stages = run.facts.get("stages")
        last = list(stages)[-1] if isinstance(stages, dict) and stages else "its first stage"
        return [f"It was only to run up to {last}."]
    return []
