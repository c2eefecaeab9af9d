"""A sweep: the launches that it plans, their results, and the plan that it recommends.

By default every value is screened on its own against the base plan. The winners are also combined, because effects need
not add up, and the best few plans are launched again in turns with the base plan, which decides (`contest.py`). A grid
tries all combinations. Finished trials are in the store, so a killed sweep continues where it ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Literal, TypeAlias

from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.serving.tuning.contest import (
    MOST_FINALISTS,
    Contest,
    Standing,
    apart,
    simplest,
    standings,
)
from quantmint.pipeline.serving.tuning.space import BASE, Axis, Point, SweepTrial
from quantmint.pipeline.serving.tuning.subject import TuningSubject
from quantmint.pipeline.serving.tuning.trials import TrialResult

FIGURES = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99")
"""Fields of `CellResult` that a sweep compares: output tokens/s, and latencies in milliseconds."""

MINIMUM_NOISE = 1.01
"""The smallest noise to assume, as a factor between two launches of one plan."""
Goal: TypeAlias = Literal["throughput", "latency"]


Figures: TypeAlias = Mapping[str, Mapping[str, float]]
"""Medians over the sound launches of a point: by cell, then by name of the figure."""


def figures(results: Iterable[TrialResult]) -> Figures | None:
    """Return the medians of the sound results; None without any."""
    sound = [result for result in results if result.status == "ok"]
    if not sound:
        return None
    return {
        cell: {name: median(getattr(result.cells[cell], name) for result in sound) for name in FIGURES}
        for cell in sound[0].cells
    }


@dataclass(frozen=True, slots=True)
class Objective:
    """The goal of a sweep, and limits in ms for the 99th percentiles of time to first token and of token gaps."""

    goal: Goal = "throughput"
    max_ttft: float | None = None
    max_itl: float | None = None

    def keeps(self, medians: Figures) -> bool:
        """Return whether the medians of every cell keep the limits."""
        limits = (("ttft_p99", self.max_ttft), ("itl_p99", self.max_itl))
        return all(limit is None or cell[name] <= limit for cell in medians.values() for name, limit in limits)

    def score(self, ratios: Mapping[str, float]) -> float:
        """Return the score of ratios to the base plan: 1 for the base plan, higher is better.

        For throughput it is the ratio of output tokens/s; for latency the geometric mean of the inverse ratios of time
        to first token and gap between tokens, both at the 99th percentile.
        """
        if self.goal == "throughput":
            return ratios["output_throughput"]
        return geometric_mean([1 / ratios["ttft_p99"], 1 / ratios["itl_p99"]])


def relative(medians: Figures, base: Figures) -> dict[str, float]:
    """Return the ratio of each figure to the base plan's, as the geometric mean over the cells."""
    return {
        name: geometric_mean([max(cell[name], 1e-9) / max(base[key][name], 1e-9) for key, cell in medians.items()])
        for name in FIGURES
    }


def _range(values: Sequence[float]) -> float:
    return max(values) / min(values)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the Pareto-optimal points (throughput, latency), by rising latency.

    The first of equal points.
    """
    by_latency = sorted(range(len(points)), key=lambda index: (points[index][1], -points[index][0], index))
    optimal: list[int] = []
    for index in by_latency:
        if not optimal or points[index][0] > points[optimal[-1]][0]:
            optimal.append(index)
    return optimal


Mode: TypeAlias = Literal["one-at-a-time", "grid"]


@dataclass(frozen=True, slots=True)
class Design:
    """The design of a sweep.

    ``repeat`` is the number of screening launches of each point, interleaved so that drift affects all points alike.
    ``launches`` is the number of launches of each finalist and of the base plan in the contest; None for the fewest
    that can prove a gain.
    """

    axes: tuple[Axis, ...]
    mode: Mode = "one-at-a-time"
    repeat: int = 1
    launches: int | None = None


def screening_trials(design: Design) -> list[SweepTrial]:
    """Return the trials of the screening; the base plan runs again at the end to measure noise, including drift."""
    points = [BASE, *(combinations(design.axes) if design.mode == "grid" else singles(design.axes))]
    return [
        *(SweepTrial(point, run) for run in range(design.repeat) for point in points),
        SweepTrial(BASE, design.repeat),
    ]


def singles(axes: Sequence[Axis]) -> list[Point]:
    """Return a point for every value; one value of each knob comes first, so that a short budget tries every knob."""
    columns = [[((axis.knob, value),) for value in axis.values] for axis in axes]
    return [point for row in itertools.zip_longest(*columns) for point in row if point is not None]


def combinations(axes: Sequence[Axis]) -> list[Point]:
    """Return all combinations except the base plan: single changes first, then pairs, and so on."""
    columns: list[list[Point]] = [[(), *(((axis.knob, value),) for value in axis.values)] for axis in axes]
    points = (tuple(itertools.chain.from_iterable(row)) for row in itertools.product(*columns))
    return sorted((point for point in points if point), key=len)


def grid_size(axes: Sequence[Axis]) -> int:
    """Return the number of combinations of a grid, including the base plan."""
    return math.prod(len(axis.values) + 1 for axis in axes)


@dataclass
class KnobSweep:
    """A sweep, its results so far and its conclusions.

    ``refused`` has the planner's reason for each point that cannot be planned, ``not_tried`` the points for which the
    budget had no time.
    """

    subject: TuningSubject
    design: Design
    objective: Objective
    results: dict[SweepTrial, TrialResult] = field(default_factory=dict)
    refused: dict[Point, str] = field(default_factory=dict)
    not_tried: list[Point] = field(default_factory=list)
    out_of_time: bool = False
    contest: Contest | None = None

    @property
    def id(self) -> str:
        """The fingerprint that two runs of the same sweep share; budget, objective and contest do not change it."""
        return fingerprint(
            {
                "base": self.subject.payload(SweepTrial(BASE)),
                "knobs": [[axis.knob, list(axis.values)] for axis in self.design.axes],
                "mode": self.design.mode,
                "repeat": self.design.repeat,
            }
        )

    def by_point(self) -> dict[Point, list[TrialResult]]:
        """Return the results of each point, in the order of their first trials."""
        by_point: dict[Point, list[TrialResult]] = {}
        for trial, result in self.results.items():
            by_point.setdefault(trial.point, []).append(result)
        return by_point

    def points(self) -> dict[Point, Figures]:
        """Return the medians of each point with at least one sound launch."""
        all_medians = {point: figures(runs) for point, runs in self.by_point().items()}
        return {point: medians for point, medians in all_medians.items() if medians is not None}

    def ratios(self, point: Point) -> dict[str, float] | None:
        """Return a point's ratios to the base plan; None when either was not measured."""
        points = self.points()
        return relative(points[point], points[BASE]) if point in points and BASE in points else None

    def repeats(self) -> list[list[dict[str, float]]]:
        """Return, for each plan with several sound launches, the ratios of each launch to their median."""
        repeated = []
        for runs in self.by_point().values():
            sound = [launch for run in runs if (launch := figures([run])) is not None]
            medians = figures(runs)
            if medians is not None and len(sound) > 1:
                repeated.append([relative(launch, medians) for launch in sound])
        return repeated

    def noise(self) -> dict[str, float] | None:
        """Return, for each figure, the largest factor between two launches of one plan, at least `MINIMUM_NOISE`.

        None when no plan was launched twice.
        """
        repeats = self.repeats()
        if not repeats:
            return None
        return {
            name: max(MINIMUM_NOISE, *(_range([run[name] for run in runs]) for runs in repeats)) for name in FIGURES
        }

    def score_noise(self) -> float:
        """Return the largest factor between the scores of two launches of one plan, at least `MINIMUM_NOISE`."""
        return max([MINIMUM_NOISE, *(_range([self.objective.score(run) for run in runs]) for runs in self.repeats())])

    def score(self, point: Point) -> float | None:
        """Return a point's score; None when it was not measured or breaks a limit."""
        medians, ratios = self.points().get(point), self.ratios(point)
        if medians is None or ratios is None or not self.objective.keeps(medians):
            return None
        return self.objective.score(ratios)

    def choose(self, points: Sequence[Point]) -> Point:
        """Return the point with the fewest changes among those within noise of the best score.

        Without any score it is the first point.
        """
        scored = [(point, score) for point in points if (score := self.score(point)) is not None]
        if not scored:
            return points[0]
        threshold = max(score for _, score in scored) / self.score_noise()
        within_noise = [(point, score) for point, score in scored if score >= threshold]
        return min(within_noise, key=lambda item: (len(item[0]), -item[1]))[0]

    def favourite(self) -> Point | None:
        """Return the best measured point, proven or not; None when no measured point keeps the limits."""
        points = [point for point in self.points() if self.score(point) is not None]
        return self.choose(points) if points else None

    def best(self) -> Point | None:
        """Return the point to recommend; None when no measured point keeps the limits.

        It is the base plan unless the contest proves a finalist better. If the base plan breaks a limit, it is the
        favourite of the others.
        """
        if self.score(BASE) is None:
            return self.favourite()
        proven = [point for point, standing in self.standings().items() if standing.better]
        proven = [point for point in proven if self.score(point) is not None]
        return simplest(proven, self.contest_scores()) if proven else BASE

    def contest_scores(self) -> dict[Point, list[float]]:
        """Return the scores of each point's sound launches in the contest, relative to its base plan's medians."""
        runs = [
            (trial.point, medians)
            for trial, result in self.results.items()
            if self.contest is not None and trial.contest == self.contest.id
            if (medians := figures([result])) is not None
        ]
        base = figures(result for trial, result in self.results.items() if trial.contest and trial.point == BASE)
        scores: dict[Point, list[float]] = {}
        for point, medians in runs if base is not None else ():
            scores.setdefault(point, []).append(self.objective.score(relative(medians, base or {})))
        return scores

    def standings(self) -> dict[Point, Standing]:
        """Return how each finalist compares with the base plan; empty without a contest."""
        return {} if self.contest is None else standings(self.contest, self.contest_scores())

    def equals(self, best: Point) -> list[Point]:
        """Return the finalists that the contest cannot tell apart from ``best``."""
        scores = self.contest_scores()
        if best not in scores or self.contest is None:
            return []
        if best == BASE:
            return [point for point, standing in self.standings().items() if not standing.better]
        rivals = [point for point in self.contest.points if point != best and point in scores]
        return [
            point
            for point in rivals
            if not apart(best, point, scores, len(rivals)) and not apart(point, best, scores, len(rivals))
        ]

    def finalists(self) -> list[Point]:
        """Return the points that the screening nominates, the most promising first, at most `MOST_FINALISTS`.

        Each scores at least `MINIMUM_NOISE` times the base plan. With one knob at a time, the combined winners of all
        knobs come first, although they have not been measured yet.
        """
        points = [(point, score) for point in self.points() if point and (score := self.score(point)) is not None]
        promising = sorted(
            (item for item in points if item[1] >= MINIMUM_NOISE), key=lambda item: (-item[1], len(item[0]))
        )
        ranked = [point for point, _ in promising]
        winners = self.winners() if self.design.mode == "one-at-a-time" else BASE
        combined = [winners] if len(winners) > 1 and winners not in self.refused else []
        return list(dict.fromkeys([*combined, *ranked]))[:MOST_FINALISTS]

    def winners(self) -> Point:
        """Return the point that combines, for each knob, the best value that beats the base plan by more than noise."""
        axes = self.design.axes
        return tuple(
            change for axis in axes for change in self.choose([BASE, *(((axis.knob, value),) for value in axis.values)])
        )
