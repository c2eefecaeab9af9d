"""A sweep: which launches it plans, and what their figures come to.

What is done is read from the store: a killed sweep goes on where it was. By default every value is screened against the
same base plan. What won there is put together, because effects need not add up, and the best few are launched again
beside the base plan, which decides (`contest.py`). A grid finds what only works in combination, at the price of a
product.
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
from quantmint.pipeline.serving.tuning.space import BASE, Axis, Point, SweepTrial, TuningSubject
from quantmint.pipeline.serving.tuning.trials import TrialResult

FIGURES = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99")
"""Fields of `CellResult` that a sweep looks at: tokens/s, and milliseconds."""

LEAST = 1.01
"""The least noise that is believed: a factor."""
Goal: TypeAlias = Literal["throughput", "latency"]


Figures: TypeAlias = Mapping[str, Mapping[str, float]]
"""A point's medians over its sound runs: figure by cell and name."""


def figures(outcomes: Iterable[TrialResult]) -> Figures | None:
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
    """The shape of a sweep: ``repeat`` launches a point, interleaved, so that a drift meets all of them alike.

    ``launches`` is how often each finalist and the base plan are launched to decide; None for as few as can prove a
    gain.
    """

    axes: tuple[Axis, ...]
    mode: Mode = "one-at-a-time"
    repeat: int = 1
    launches: int | None = None


def planned(design: Design) -> list[SweepTrial]:
    """Every trial of the screening. The base plan comes again at its end: its spread is the noise, drift included."""
    points = [BASE, *(combinations(design.axes) if design.mode == "grid" else singles(design.axes))]
    return [
        *(SweepTrial(point, run) for run in range(design.repeat) for point in points),
        SweepTrial(BASE, design.repeat),
    ]


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
class KnobSweep:
    """A sweep as far as it got, and what it comes to; ``refused`` has what the planner would not plan, and why."""

    subject: TuningSubject
    design: Design
    objective: Objective
    outcomes: dict[SweepTrial, TrialResult] = field(default_factory=dict)
    refused: dict[Point, str] = field(default_factory=dict)
    not_tried: list[Point] = field(default_factory=list)
    out_of_time: bool = False
    contest: Contest | None = None

    @property
    def id(self) -> str:
        """What makes two runs the same sweep: all but its budget, its objective and the launches that decide."""
        return fingerprint(
            {
                "base": self.subject.payload(SweepTrial(BASE)),
                "knobs": [[axis.knob, list(axis.values)] for axis in self.design.axes],
                "mode": self.design.mode,
                "repeat": self.design.repeat,
            }
        )

    def by_point(self) -> dict[Point, list[TrialResult]]:
        """Outcomes of each point, in the order in which points were first met."""
        found: dict[Point, list[TrialResult]] = {}
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

    def favourite(self) -> Point | None:
        """The point that the measurements favour, proven or not; None where none that was measured keeps the limits."""
        points = [point for point in self.points() if self.score(point) is not None]
        return self.choose(points) if points else None

    def best(self) -> Point | None:
        """The point to recommend; None where no measured point keeps the limits.

        It is the base plan unless the contest shows that a finalist is better. Where the base plan breaks a limit, it
        is no choice, and the favourite of the others is recommended.
        """
        if self.score(BASE) is None:
            return self.favourite()
        proven = [point for point, standing in self.standings().items() if standing.better]
        proven = [point for point in proven if self.score(point) is not None]
        return simplest(proven, self.contest_scores()) if proven else BASE

    def contest_scores(self) -> dict[Point, list[float]]:
        """The score of each sound launch of the contest, relative to the base plan's medians there."""
        runs = [
            (trial.point, medians)
            for trial, outcome in self.outcomes.items()
            if self.contest is not None and trial.contest == self.contest.id
            if (medians := figures([outcome])) is not None
        ]
        base = figures(outcome for trial, outcome in self.outcomes.items() if trial.contest and trial.point == BASE)
        scores: dict[Point, list[float]] = {}
        for point, medians in runs if base is not None else ():
            scores.setdefault(point, []).append(self.objective.score(relative(medians, base or {})))
        return scores

    def standings(self) -> dict[Point, Standing]:
        """How each finalist compares with the base plan; empty where nothing was launched again."""
        return {} if self.contest is None else standings(self.contest, self.contest_scores())

    def equals(self, best: Point) -> list[Point]:
        """The finalists, and the base plan, that the contest cannot tell apart from ``best``."""
        scores = self.contest_scores()
        if best not in scores or self.contest is None:
            return []
        if best == BASE:
            return [point for point, standing in self.standings().items() if not standing.better]
        others = [point for point in self.contest.points if point != best and point in scores]
        return [
            point
            for point in others
            if not apart(best, point, scores, len(others)) and not apart(point, best, scores, len(others))
        ]

    def finalists(self) -> list[Point]:
        """The points that the screening nominates, at most `MOST_FINALISTS`, by falling promise.

        Each scores more than the base plan by `LEAST` or more. With one knob at a time, the winners of all knobs
        together come first, although nobody has measured them yet.
        """
        points = [(point, score) for point in self.points() if point and (score := self.score(point)) is not None]
        promising = sorted((item for item in points if item[1] >= LEAST), key=lambda item: (-item[1], len(item[0])))
        ranked = [point for point, _ in promising]
        winners = self.winners() if self.design.mode == "one-at-a-time" else BASE
        together = [winners] if len(winners) > 1 and winners not in self.refused else []
        return list(dict.fromkeys([*together, *ranked]))[:MOST_FINALISTS]

    def winners(self) -> Point:
        """The best value of each knob, where it beats the base plan by more than noise."""
        axes = self.design.axes
        return tuple(
            change for axis in axes for change in self.choose([BASE, *(((axis.knob, value),) for value in axis.values)])
        )
