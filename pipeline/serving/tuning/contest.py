"""Proof that a plan beats the base plan: a few finalists, launched again beside it by turns, and a rank test.

A screening with one launch a value always has a best value, and among ten values without any effect the luckiest looks
two noises better than the base plan. So the screening only nominates. Finalists and base plan are launched anew, the
rank test of the gate compares these launches alone, and its p-values are corrected (Holm) for the number of finalists:
that some plan without effect is recommended happens in 5 % of sweeps at most, however many values were screened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quantmint.eval.statistics.ranks import fewest_launches, rank_test, ratio_interval
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.serving.tuning.space import BASE, Point, SweepTrial

ALPHA = 0.05
"""The chance that a sweep recommends a plan that is no better than the base plan."""
MOST_FINALISTS = 3
"""A fourth would cost launches of all others as well: the correction asks for more of each."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Finalists and how often each of them, and the base plan, is launched."""

    points: tuple[Point, ...]
    launches: int

    @property
    def id(self) -> str:
        """Name of the contest in its trials' fingerprints.

        Launches of another contest, perhaps of another day, must not stand in for turns of this one: the machine may
        have drifted in between.
        """
        return fingerprint([[list(change) for change in point] for point in self.points])

    def trials(self) -> list[SweepTrial]:
        """Every launch in order: in turns, forwards or backwards as `eval.measurements.order` has it, against drift."""
        name = self.id
        plans = (BASE, *self.points)
        turns = (plans[::-1] if turn.bit_count() % 2 else plans for turn in range(self.launches))
        return [SweepTrial(point, turn, name) for turn, points in enumerate(turns) for point in points]


def contest_of(points: Sequence[Point], launches: int | None) -> Contest:
    """Return the contest of these finalists with ``launches``, but no fewer than can prove anything about one."""
    return Contest(tuple(points), max(launches or 0, fewest_launches(1 - ALPHA / len(points))))


@dataclass(frozen=True, slots=True)
class Standing:
    """How a finalist compares with the base plan, by score.

    ``p`` is the chance of launches as clear as these if the finalist were no better, corrected for the number of
    finalists. ``ratio`` is of the medians; ``low`` and ``high`` are bounds that hold for all finalists together.
    ``launches`` counts the sound ones (base plan, finalist).
    """

    point: Point
    p: float
    ratio: float
    low: float
    high: float
    launches: tuple[int, int]

    @property
    def better(self) -> bool:
        """Whether it is shown that the finalist beats the base plan."""
        return self.p <= ALPHA + 1e-12


def standings(contest: Contest, scores: Mapping[Point, Sequence[float]]) -> dict[Point, Standing]:
    """Compare every finalist that has sound launches with the base plan; ``scores`` has one number a sound launch."""
    base = scores.get(BASE, ())
    if not base:
        return {}
    count = len(contest.points)
    tested = [(rank_test(scores[point], base), point) for point in contest.points if scores.get(point)]
    table: dict[Point, Standing] = {}
    corrected = 0.0
    for number, (p, point) in enumerate(sorted(tested, key=lambda test: test[0])):
        corrected = min(1.0, max(corrected, (count - number) * p))  # Holm, Scand. J. Statist. 6 (1979)
        low, high = ratio_interval(scores[point], base, 1 - ALPHA / count)
        ratio = median(scores[point]) / median(base)
        table[point] = Standing(point, corrected, ratio, low, high, (len(base), len(scores[point])))
    return table


def simplest(points: Sequence[Point], scores: Mapping[Point, Sequence[float]]) -> Point:
    """Return, of the points that cannot be told apart from the best one, the one with the fewest changes."""
    best = max(points, key=lambda point: median(scores[point]))
    order = sorted(points, key=lambda point: (len(point), -median(scores[point])))
    return next(point for point in order if point == best or not apart(best, point, scores, len(points) - 1))


def apart(above: Point, below: Point, scores: Mapping[Point, Sequence[float]], comparisons: int) -> bool:
    """Return whether one point is shown to be better than another, as one of so many comparisons."""
    return rank_test(scores[above], scores[below]) * comparisons <= ALPHA + 1e-12
