"""Which point is best, and what is no more than noise.

Every figure is compared as a ratio to the base plan's median, as a geometric mean over the workload's cells: a cell
with large numbers does not drown the others. The noise of a figure is the largest ratio between two launches of one
and the same plan, so a change counts only where it is larger than what nothing at all did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Literal, TypeAlias

from pipeline.serving.tuning.space import BASE, Point, Trial
from pipeline.serving.tuning.trials import Outcome

FIGURES = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99")
"""Fields of `CellResult` that a sweep looks at: tokens/s, and milliseconds."""

LEAST = 1.01
"""The least noise that is believed: a factor."""
Goal: TypeAlias = Literal["throughput", "latency", "balanced"]


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


def by_point(outcomes: Mapping[Trial, Outcome]) -> dict[Point, list[Outcome]]:
    """Outcomes of each point, in the order in which points were first met."""
    found: dict[Point, list[Outcome]] = {}
    for trial, outcome in outcomes.items():
        found.setdefault(trial.point, []).append(outcome)
    return found


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
        between tokens, both at the 99th percentile, of which each counts half. balanced: throughput and latency, of
        which each counts half.
        """
        speed = ratios["output_throughput"]
        quickness = geometric_mean([1 / ratios["ttft_p99"], 1 / ratios["itl_p99"]])
        return {"throughput": speed, "latency": quickness, "balanced": geometric_mean([speed, quickness])}[self.goal]


def ratios(found: Figures, base: Figures) -> dict[str, float]:
    """Each figure relative to the base plan: the geometric mean over the cells."""
    return {
        name: geometric_mean([max(cell[name], 1e-9) / max(base[key][name], 1e-9) for key, cell in found.items()])
        for name in FIGURES
    }


class Judge:
    """Compares the points of a sweep as far as it got; looks at ``outcomes`` anew with each question."""

    def __init__(self, outcomes: Mapping[Trial, Outcome], objective: Objective) -> None:
        self._outcomes = outcomes
        self.objective = objective

    def points(self) -> dict[Point, Figures]:
        """The points with at least one sound run."""
        found = {point: figures(runs) for point, runs in by_point(self._outcomes).items()}
        return {point: medians for point, medians in found.items() if medians is not None}

    def ratios(self, point: Point) -> dict[str, float] | None:
        """A point's figures relative to the base plan; None where one of them was not measured."""
        points = self.points()
        return ratios(points[point], points[BASE]) if point in points and BASE in points else None

    def repeats(self) -> list[list[dict[str, float]]]:
        """For each plan that was launched more than once: its sound runs, relative to their own median."""
        found = []
        for runs in by_point(self._outcomes).values():
            sound = [run for run in runs if run.status == "ok"]
            middle = figures(sound)
            if middle is not None and len(sound) > 1:
                found.append([ratios(one, middle) for run in sound if (one := figures([run])) is not None])
        return found

    def noise(self) -> dict[str, float] | None:
        """For each figure the largest factor between two launches of one plan; None before anything was repeated.

        Never less than `LEAST`: two launches can agree by chance.
        """
        repeats = self.repeats()
        if not repeats:
            return None
        return {name: max(LEAST, *(_range([run[name] for run in runs]) for runs in repeats)) for name in FIGURES}

    def score_noise(self) -> float:
        """The same for the score."""
        return max(LEAST, *(_range([self.objective.score(run) for run in runs]) for runs in self.repeats()), 1.0)

    def score(self, point: Point) -> float | None:
        """A point's score; None where it has none or breaks a limit."""
        found, relative = self.points().get(point), self.ratios(point)
        if found is None or relative is None or not self.objective.keeps(found):
            return None
        return self.objective.score(relative)

    def choose(self, points: Sequence[Point]) -> Point:
        """The best of the points; among those that noise cannot tell from it the one with the fewest changes.

        The first of the points stands in where none has a score.
        """
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


def _range(values: Sequence[float]) -> float:
    return max(values) / min(values)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (throughput, latency) that no other dominates, from the least latency to the most.

    Of equal points the first is named. O(n log n): by rising latency, what raises the best throughput so far.
    """
    by_latency = sorted(range(len(points)), key=lambda index: (points[index][1], -points[index][0], index))
    kept: list[int] = []
    for index in by_latency:
        if not kept or points[index][0] > points[kept[-1]][0]:
            kept.append(index)
    return kept
