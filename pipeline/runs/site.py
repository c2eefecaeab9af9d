"""Write a static index of all runs: the verdict of each recipe, run by run, and the reports themselves.

    site/index.html                    the index: it loads nothing and runs no script; its style sheet filters
    site/index.json                    its rows; the row of a run stays, also when the store forgets the run
    site/reports/<digest>/             each report once, named by the digest of its files

Reports are written first and the index last, and the index links only to reports that are there: a reader gets the old
file or the new one, and no link is dead.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from quantmint.eval.accuracy import margin_in_units
from quantmint.eval.comparison.model import ComparedReport, read
from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record
from quantmint.eval.report.model import DATA, PAGE
from quantmint.eval.report.page import environment
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.runs.reports import of_run
from quantmint.pipeline.store.disk import disk_errors, write_atomic
from quantmint.pipeline.store.gc import RunRecord, list_runs
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store

PAGE_DIGITS = 16
OPEN = 8
"""Runs of a recipe that are shown at once; older ones can be opened."""
INDEX, ROWS, REPORTS = "index.html", "index.json", "reports"
_PARTIAL = ".partial"
_LOCK = ".lock"
"""Also how the names begin that waiting processes use."""


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
    """The cell with the lowest ratio of output tokens per second, candidate over baseline, with its interval."""

    cell: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Judged(Record):
    """The figures of a run's report; `page` is the folder of the copied report, named by the digest of its files."""

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
        """The task that used up most of its margin; None without tasks."""
        return min(self.tasks, key=lambda t: t.difference / margin_in_units(t.kind, t.margin), default=None)


@dataclass(frozen=True, slots=True)
class RunRow(Record):
    """A run in the index, with the `reasons` of its `status`.

    The status is a verdict, NO VERDICT (the run ended before its gate), BROKEN or UNFINISHED.
    """

    run: str
    recipe: str
    started: str
    finished: str | None
    status: str
    reasons: tuple[str, ...]
    judged: Judged | None


def row_of(run: RunRecord, store: Store) -> tuple[RunRow, Path | None]:
    """Return a run's row, and the folder of its report in the store; None where there is none that can be read."""
    entry, judged = of_run(run, store), None
    reasons: list[str] = []
    if run.finished is None:
        status = "UNFINISHED"
        reasons.append("It still runs, or was killed: the same command goes on from its last finished stage.")
    elif "error" in run.facts:
        status = "BROKEN"
        reasons.append(str(run.facts["error"]))
    elif run.verdict is None:
        status = "NO VERDICT"
        stages = run.facts.get("stages")
        last = list(stages)[-1] if isinstance(stages, dict) and stages else "its first stage"
        reasons.append(f"It was only to run up to {last}.")
    else:
        status = run.verdict
    if entry is not None:
        page = entry.digest[:PAGE_DIGITS]
        try:
            data = read(entry.file(DATA), None)
            judged, reasons = judgement(data, page), list(data.gate.reasons)
        except MeasurementError as error:
            reasons.append(f"Its report is of another version: {error}")
    elif run.verdict is not None:
        reasons.append("Its report is not in the store any more.")
    row = RunRow(run.id, run.recipe, run.started, run.finished, status, tuple(reasons), judged)
    return row, None if entry is None or judged is None else entry.path


def judgement(report: ComparedReport, page: str) -> Judged:
    """Return the figures of a report that the index shows; `page` is the report's folder in the site."""
    gate = report.gate
    tasks = []
    for result in gate.accuracy:
        if (margin := gate.policy.margins.get(result.task)) is not None:
            verdict = gate.verdict_of("accuracy", result.task)
            ends = (result.interval_low, result.interval_high)
            tasks.append(Task(result.task, result.kind, result.difference, *ends, margin, verdict and verdict.value))
    cells = [cell for cell in gate.throughput if cell.cell not in report.paced]
    cell = min(cells, key=lambda cell: cell.ratio, default=None)
    return Judged(
        page=page,
        model=report.model,
        baseline=report.baseline,
        scheme=report.scheme,
        hardware=gate.hardware,
        device=gate.device,
        runtime=gate.runtime,
        size_ratio=report.size_ratio,
        tasks=tuple(tasks),
        speed=None if cell is None else Speed(cell.cell, cell.ratio, cell.ratio_low, cell.ratio_high),
    )


def render(rows: Sequence[RunRow], at_hand: Collection[str]) -> str:
    """Return the index of runs as HTML; `rows` come newest first, and reports in the folders `at_hand` are linked."""
    templates = environment(Path(__file__).parent)
    templates.globals |= {"OPEN": OPEN}
    recipes: list[dict[str, Any]] = []
    for number, name in enumerate(dict.fromkeys(row.recipe for row in rows)):
        runs = [row for row in rows if row.recipe == name]
        latest = next((row for row in runs if row.judged is not None), None)
        recipes.append({"name": name, "anchor": f"recipe-{number}", "runs": runs, "latest": latest})
    counts = Counter(recipe["runs"][0].status for recipe in recipes)
    return templates.get_template("site.html.j2").render(rows=rows, recipes=recipes, at_hand=at_hand, counts=counts)


def build(output: Path, store: Store) -> tuple[Sequence[RunRow], int]:
    """Update the site at `output` from a store; return its rows, newest run first, and the number of copied reports.

    Processes take turns by a lock. Raises `UserError` for a folder with other files.
    """
    _existing_rows(output)  # refuse before anything is made
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        with Lock(output / _LOCK):
            existing = _existing_rows(output)  # what another process added while this one waited
            rows, copied = dict(existing), 0
            for run in list_runs(store.root):
                before = existing.get(run.id)
                row, folder = row_of(run, store)
                if folder is not None and row.judged is not None:
                    copied += _copy(folder, output / REPORTS / row.judged.page)
                if before is None or before.judged is None or row.judged is not None:
                    rows[run.id] = row
            ordered = sorted(rows.values(), key=lambda row: row.run, reverse=True)
            data = {"schema": 1, "runs": [row.to_json() for row in ordered]}
            text = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            at_hand = {path.parent.name for path in (output / REPORTS).glob(f"*/{PAGE}")}
            for name, content in ((ROWS, text), (INDEX, render(ordered, at_hand))):
                write_atomic(output / name, content.encode(), temporary=output / (name + _PARTIAL))
    return ordered, copied


def _existing_rows(output: Path) -> Mapping[str, RunRow]:
    """Return the rows of the site at ``output`` by run; empty for an empty or missing folder.

    Raises `UserError` for a folder with other files, so that no other index.html is overwritten.
    """
    path = output / ROWS
    if not path.is_file():
        names = (path.name for path in output.iterdir()) if output.is_dir() else ()
        if any(name not in (REPORTS, ROWS + _PARTIAL) and not name.startswith(_LOCK) for name in names):
            raise UserError(
                f"--output: found a folder with other files, {output}, expected an empty one or a site",
                hint="name a folder of its own",
            )
        return {}
    try:
        rows = [RunRow.from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (MeasurementError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint="without it, it is made anew from the store") from None
    return {row.run: row for row in rows}


def _copy(source: Path, target: Path) -> int:
    """Copy a report's page and data to ``target``; return 1, or 0 where it exists, as its name is its digest."""
    if target.is_dir():
        return 0
    partial = target.with_name(target.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in (PAGE, DATA):
        shutil.copyfile(source / name, partial / name)
    partial.rename(target)
    return 1
