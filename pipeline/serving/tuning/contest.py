"""Prove that a plan beats the base plan: launch a few finalists in turns with it, and compare them by a rank test.

A screening with one launch a value always has a best value, and among ten values without effect the luckiest seems
better than the base plan by twice the noise. So the screening only nominates finalists. They and the base plan are
launched again, the gate's rank test compares these launches only, and its p-values are corrected (Holm) for the number
of finalists: at most 5 % of sweeps recommend a plan without effect, however many values were screened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from quantmint.eval.statistics.ranks import fewest_launches, rank_test, ratio_interval
from quantmint.pipeline.base.canonical import fingerprint
from quantmint.pipeline.serving.tuning.space import BASE, Point, SweepTrial

ALPHA = 0.05
"""The largest probability that a sweep recommends a plan that is no better than the base plan."""
MOST_FINALISTS = 3
"""With a fourth finalist, the correction would require more launches of every finalist."""


@dataclass(frozen=True, slots=True)
class Contest:
    """The finalists, and the number of launches of each and of the base plan."""

    points: tuple[Point, ...]
    launches: int

    @property
    def id(self) -> str:
        """The contest's id in the fingerprints of its trials.

        It keeps launches of another contest, perhaps from another day, from counting as turns of this one: the machine
        may have drifted in between.
        """
        return fingerprint([[list(change) for change in point] for point in self.points])

    def trials(self) -> list[SweepTrial]:
        """Return every launch in order: turns of all plans, forwards or backwards as in `eval.measurements.order`."""
        name = self.id
        plans = (BASE, *self.points)
        turns = (plans[::-1] if turn.bit_count() % 2 else plans for turn in range(self.launches))
        return [SweepTrial(point, turn, name) for turn, points in enumerate(turns) for point in points]


def contest_of(points: Sequence[Point], launches: int | None) -> Contest:
    """Return a contest of these finalists with ``launches`` of each, raised to the fewest that can prove a gain."""
    return Contest(tuple(points), max(launches or 0, fewest_launches(1 - ALPHA / len(points))))


@dataclass(frozen=True, slots=True)
class Standing:
    """The comparison of a finalist's scores with the base plan's.

    ``p`` is the p-value of the hypothesis that the finalist is no better, corrected for the number of finalists.
    ``ratio`` is the ratio of medians; ``low`` and ``high`` are simultaneous confidence bounds. ``launches`` counts the
    sound launches (base plan, finalist).
    """

    point: Point
    p: float
    ratio: float
    low: float
    high: float
    launches: tuple[int, int]

    @property
    def better(self) -> bool:
        """Whether the finalist is proven better than the base plan."""
        return self.p <= ALPHA + 1e-12


def standings(contest: Contest, scores: Mapping[Point, Sequence[float]]) -> dict[Point, Standing]:
    """Return the comparison of each finalist with the base plan; ``scores`` has one score for each sound launch.

    Finalists without sound launches are left out. P-values are corrected by Holm's method. Empty without scores of the
    base plan.
    """
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
    """Return the point with the fewest changes among those that are not proven worse than the best median score."""
    best = max(points, key=lambda point: median(scores[point]))
    order = sorted(points, key=lambda point: (len(point), -median(scores[point])))
    return next(point for point in order if point == best or not apart(best, point, scores, len(points) - 1))


def apart(above: Point, below: Point, scores: Mapping[Point, Sequence[float]], comparisons: int) -> bool:
    """Return whether ``above`` is proven better than ``below``, as one of ``comparisons`` comparisons."""
    return rank_test(scores[above], scores[below]) * comparisons <= ALPHA + 1e-12
