"""A sweep: trial after trial until everything was tried or the budget is used up.

What is done is read from the store: a killed sweep goes on where it was. By default every value is measured against the
same base plan, then what won is measured together, because effects need not add up. A grid finds what only works in
combination, at the price of a product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Literal, TypeAlias

from eval.report.numbers import duration
from pipeline.base.canonical import fingerprint
from pipeline.base.errors import ServingError, UserError
from pipeline.base.progress import Reporter
from pipeline.serving.tuning.space import BASE, STAGE, Axis, Point, Subject, Trial, label
from pipeline.serving.tuning.trials import STARTUP_TIMEOUT_S, Budget, Outcome, OutOfTimeError, once
from pipeline.store.tree import Store

FIGURES = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99")
"""Fields of `CellResult` that a sweep looks at: tokens/s, and milliseconds."""

LEAST = 1.01
"""The least noise that is believed: a factor."""
Goal: TypeAlias = Literal["throughput", "latency"]


Figures: TypeAlias = Mapping[str, Mapping[str, float]]
"""A point's medians over its sound runs: figure by cell and name."""


def figures(outcomes: Iterable[Outcome]) -> Figures | None:
    """The medians of the sound outcomes; None where there is none."""
    sound = [outcome for outcome in outcomes if outcome.status == "ok"]
    if not sound:
        return None
    return {
        cell: {name: median(getattr(outcome.cells[cell], name) for outcome in sound) for name in FIGURES}
        for cell in sound[0].cells
    }


@dataclass(frozen=True, slots=True)
class Objective:
    """What is asked for. ``max_ttft`` and ``max_itl`` are ms that the 99th percentile of every cell must keep."""

    goal: Goal = "throughput"
    max_ttft: float | None = None
    max_itl: float | None = None

    def keeps(self, found: Figures) -> bool:
        """Whether a point stays below the limits."""
        limits = (("ttft_p99", self.max_ttft), ("itl_p99", self.max_itl))
        return all(limit is None or cell[name] <= limit for cell in found.values() for name, limit in limits)

    def score(self, ratios: Mapping[str, float]) -> float:
        """1 for the base plan, more is better.

        throughput: the ratio of output tokens/s. latency: the inverse ratio of the time to first token and the gap
        between tokens, both at the 99th percentile, of which each counts half.
        """
        if self.goal == "throughput":
            return ratios["output_throughput"]
        return geometric_mean([1 / ratios["ttft_p99"], 1 / ratios["itl_p99"]])


def relative(found: Figures, base: Figures) -> dict[str, float]:
    """Each figure relative to the base plan: the geometric mean over the cells."""
    return {
        name: geometric_mean([max(cell[name], 1e-9) / max(base[key][name], 1e-9) for key, cell in found.items()])
        for name in FIGURES
    }


def _range(values: Sequence[float]) -> float:
    return max(values) / min(values)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (throughput, latency) that no other dominates, by rising latency; the first of equals."""
    by_latency = sorted(range(len(points)), key=lambda index: (points[index][1], -points[index][0], index))
    kept: list[int] = []
    for index in by_latency:
        if not kept or points[index][0] > points[kept[-1]][0]:
            kept.append(index)
    return kept


Mode: TypeAlias = Literal["one-at-a-time", "grid"]


@dataclass(frozen=True, slots=True)
class Design:
    """The shape of a sweep: ``repeat`` launches a point, interleaved, so that a drift meets all of them alike."""

    axes: tuple[Axis, ...]
    mode: Mode = "one-at-a-time"
    repeat: int = 1


def planned(design: Design) -> list[Trial]:
    """Every trial known beforehand. The base plan comes again at the end: its spread is the noise, drift included."""
    points = [BASE, *(combinations(design.axes) if design.mode == "grid" else singles(design.axes))]
    return [*(Trial(point, run) for run in range(design.repeat) for point in points), Trial(BASE, design.repeat)]


def singles(axes: Sequence[Axis]) -> list[Point]:
    """Every value on its own. One value of each knob first: a cut budget then leaves no knob untouched."""
    columns = [[((axis.knob, value),) for value in axis.values] for axis in axes]
    return [point for row in itertools.zip_longest(*columns) for point in row if point is not None]


def combinations(axes: Sequence[Axis]) -> list[Point]:
    """The cartesian product without the base plan: single changes first, then pairs, and so on."""
    columns: list[list[Point]] = [[(), *(((axis.knob, value),) for value in axis.values)] for axis in axes]
    points = (tuple(itertools.chain.from_iterable(row)) for row in itertools.product(*columns))
    return sorted((point for point in points if point), key=len)


def grid_size(axes: Sequence[Axis]) -> int:
    """How many combinations a grid has, the base plan included."""
    return math.prod(len(axis.values) + 1 for axis in axes)


@dataclass
class Sweep:
    """A sweep as far as it got, and what it comes to; ``refused`` has what the planner would not plan, and why."""

    subject: Subject
    design: Design
    objective: Objective
    outcomes: dict[Trial, Outcome] = field(default_factory=dict)
    refused: dict[Point, str] = field(default_factory=dict)
    not_tried: list[Point] = field(default_factory=list)
    out_of_time: bool = False

    @property
    def id(self) -> str:
        """What makes two runs the same sweep: all but its budget and its objective."""
        return fingerprint(
            {
                "base": self.subject.payload(Trial(BASE)),
                "knobs": [[axis.knob, list(axis.values)] for axis in self.design.axes],
                "mode": self.design.mode,
                "repeat": self.design.repeat,
            }
        )

    def by_point(self) -> dict[Point, list[Outcome]]:
        """Outcomes of each point, in the order in which points were first met."""
        found: dict[Point, list[Outcome]] = {}
        for trial, outcome in self.outcomes.items():
            found.setdefault(trial.point, []).append(outcome)
        return found

    def points(self) -> dict[Point, Figures]:
        """The points with at least one sound run."""
        found = {point: figures(runs) for point, runs in self.by_point().items()}
        return {point: medians for point, medians in found.items() if medians is not None}

    def ratios(self, point: Point) -> dict[str, float] | None:
        """A point's figures relative to the base plan; None where one of them was not measured."""
        points = self.points()
        return relative(points[point], points[BASE]) if point in points and BASE in points else None

    def repeats(self) -> list[list[dict[str, float]]]:
        """For each plan that was launched more than once: its sound runs, relative to their own median."""
        found = []
        for runs in self.by_point().values():
            sound = [one for run in runs if (one := figures([run])) is not None]
            middle = figures(runs)
            if middle is not None and len(sound) > 1:
                found.append([relative(one, middle) for one in sound])
        return found

    def noise(self) -> dict[str, float] | None:
        """For each figure the largest factor between two launches of a plan, at least `LEAST`; None without any."""
        repeats = self.repeats()
        if not repeats:
            return None
        return {name: max(LEAST, *(_range([run[name] for run in runs]) for runs in repeats)) for name in FIGURES}

    def score_noise(self) -> float:
        """The same for the score."""
        return max([LEAST, *(_range([self.objective.score(run) for run in runs]) for runs in self.repeats())])

    def score(self, point: Point) -> float | None:
        """A point's score; None where it has none or breaks a limit."""
        found, ratios = self.points().get(point), self.ratios(point)
        if found is None or ratios is None or not self.objective.keeps(found):
            return None
        return self.objective.score(ratios)

    def choose(self, points: Sequence[Point]) -> Point:
        """The best, or of what noise cannot tell from it the fewest changes; the first where none has a score."""
        scored = [(point, score) for point in points if (score := self.score(point)) is not None]
        if not scored:
            return points[0]
        enough = max(score for _, score in scored) / self.score_noise()
        near = [(point, score) for point, score in scored if score >= enough]
        return min(near, key=lambda item: (len(item[0]), -item[1]))[0]

    def best(self) -> Point | None:
        """The point to recommend; None where no measured point keeps the limits."""
        points = [point for point in self.points() if self.score(point) is not None]
        return self.choose(points) if points else None

    def winners(self) -> Point:
        """The best value of each knob, where it beats the base plan by more than noise."""
        axes = self.design.axes
        return tuple(
            change for axis in axes for change in self.choose([BASE, *(((axis.knob, value),) for value in axis.values)])
        )


def run_sweep(sweep: Sweep, store: Store, budget: Budget, reporter: Reporter, *, redo: bool = False) -> None:
    """Fill ``sweep``; ``redo`` measures what the store has again. ServingError where the base plan does not serve."""
    runner = _Runner(sweep, store, budget, reporter, redo)
    *wanted, closing = planned(sweep.design)
    complete = runner.through(wanted, reserve=1)
    runner.through([closing], reserve=0)
    points = [trial.point for trial in wanted]
    if complete and sweep.design.mode == "one-at-a-time" and len(winner := sweep.winners()) > 1:
        points.append(winner)
        runner.through([Trial(winner, run) for run in range(sweep.design.repeat)], reserve=0)
    met = {trial.point for trial in sweep.outcomes} | set(sweep.refused)
    sweep.not_tried += [point for point in dict.fromkeys(points) if point not in met]


class _Runner:
    def __init__(self, sweep: Sweep, store: Store, budget: Budget, reporter: Reporter, redo: bool) -> None:
        self.sweep, self.store, self.budget, self.reporter, self.redo = sweep, store, budget, reporter, redo
        self.id = sweep.id
        self.total = len(planned(sweep.design))
        self.number = 0

    def through(self, wanted: Iterable[Trial], *, reserve: int) -> bool:
        """Run trials until one is not affordable with ``reserve`` more after it; whether all were run."""
        return all(
            trial in self.sweep.outcomes or trial.point in self.sweep.refused or self._one(trial, reserve)
            for trial in wanted
        )

    def _one(self, trial: Trial, reserve: int) -> bool:
        name = label(trial.point) + (f", run {trial.run + 1}" if trial.run else "")
        try:
            plan = self.sweep.subject.plan(trial.point)
        except UserError as error:
            if trial.point == BASE:
                raise
            self.sweep.refused[trial.point] = error.message
            self.reporter.warn(f"{name}: {error.message}")
            return True
        self.number += 1
        self.total = max(self.total, self.number)
        payload = self.sweep.subject.payload(trial)
        entry = self.store.find(STAGE, fingerprint(payload))
        if entry is not None and not self.redo:
            known = Outcome.from_json(entry.record.result)
            if known.sweep == self.id:
                self.budget.earlier += known.seconds
            self._keep(trial, known)
            self.reporter.cached(name, self.number, self.total, summary(known))
            return True
        if not self.budget.affords(1 + reserve):
            self._stop()
            return False
        if entry is not None:
            self.store.retire(entry)
        self.reporter.started(name, self.number, self.total)
        outcomes = self.sweep.outcomes.items()
        base_start = next((done.started_seconds for one, done in outcomes if one.point == BASE), None)

        def check(outcome: Outcome, _: Path) -> None:
            if trial.point == BASE and outcome.status != "ok":
                why = f"the base plan cannot be measured, and everything is compared with it: {outcome.why}"
                raise ServingError(why, hint=outcome.fix)

        timeout = STARTUP_TIMEOUT_S if base_start is None else 300 + 4 * base_start
        how: dict[str, Any] = {"sweep": self.id, "budget": self.budget, "startup_timeout": timeout}
        try:
            subject, reporter = self.sweep.subject, self.reporter
            told, _ = once(subject, self.store, payload, lambda _: plan, check, progress=reporter, **how)
            outcome = Outcome.from_json(told)
        except OutOfTimeError:
            self._stop(f"the budget ended during {name}, which does not count")
            return False
        self._keep(trial, outcome)
        if outcome.status != "ok":
            self.reporter.warn(f"{name}: {outcome.why}")
        self.reporter.finished(name, self.number, self.total, outcome.seconds, summary(outcome))
        return True

    def _keep(self, trial: Trial, outcome: Outcome) -> None:
        self.sweep.outcomes[trial] = outcome
        if outcome.status != "failed":
            self.budget.longest = max(self.budget.longest, outcome.seconds)

    def _stop(self, why: str | None = None) -> None:
        if not self.sweep.out_of_time:
            spent, whole = duration(self.budget.spent), duration(self.budget.seconds or 0)
            expected = duration(self.budget.expected)
            self.reporter.warn(
                why or f"{spent} of {whole} are spent, a trial takes about {expected}: the budget is used up"
            )
        self.sweep.out_of_time = True


def summary(outcome: Outcome) -> str:
    """One line about a trial."""
    if outcome.status != "ok":
        return f"{outcome.status}: {outcome.why}"
    parts = [
        f"{cell.output_throughput:,.0f} tok/s, TTFT p99 {cell.ttft_p99:,.0f} ms" for cell in outcome.cells.values()
    ]
    return "; ".join(parts)
