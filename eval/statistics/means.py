"""Student's t on the logarithms of throughputs: ratios of two groups of launches, whatever their common speed is.

A rank test of launches from two days compares the days too. A mean of the day's own launches does not, but two of them
say little about how far launches lie apart; launches of another day do, because they need only the same spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

_ROUNDING = 1e-9
"""Difference of two logarithms below which values count as equal."""


@dataclass(frozen=True, slots=True)
class LogDifference:
    """The difference of two means of logarithms, with its standard error and Student's t's degrees of freedom."""

    value: float
    standard_error: float
    freedom: float

    def p_above(self, ratio: float = 1.0) -> float:
        """Return the one-sided p-value for the claim that the first group is more than `ratio` times the second."""
        from scipy.special import stdtr

        distance = self.value - math.log(ratio)
        if self.standard_error == 0:
            return 0.5 if abs(distance) < _ROUNDING else float(distance < 0)
        return float(stdtr(self.freedom, -distance / self.standard_error))

    def bounds(self, confidence: float) -> tuple[float, float]:
        """Return the lower and upper bound of first / second, each one-sided at `confidence`."""
        from scipy.special import stdtrit

        reach = float(stdtrit(self.freedom, confidence)) * self.standard_error if self.standard_error else 0.0
        return math.exp(self.value - reach), math.exp(self.value + reach)


def day_difference(candidate: Sequence[float], baseline: Sequence[float], reused: Sequence[float]) -> LogDifference:
    """Return the difference of the mean logarithms of `candidate` and `baseline`, launches of one day.

    The baseline's variance is pooled from `baseline` (at least one value) and `reused`, its launches of an earlier day,
    each about its own mean: a shift between the days is in neither. The sides' variances may differ (Welch, Biometrika
    34, 28-35, 1947). Values are above 0. Raises `ValueError` if a side's variance has no degree of freedom.
    """
    spread, freedom = _pooled(baseline, reused)
    own_spread, own_freedom = _pooled(candidate)
    if not freedom or not own_freedom:
        raise ValueError(f"{len(candidate)} and {len(baseline)} + {len(reused)} launches have no spread")
    first, second = own_spread / len(candidate), spread / len(baseline)
    error = first + second
    welch = error**2 / (first**2 / own_freedom + second**2 / freedom) if error else float(own_freedom + freedom)
    return LogDifference(_mean(candidate) - _mean(baseline), math.sqrt(error), welch)


def are_alike(first: Sequence[float], second: Sequence[float], alpha: float) -> bool:
    """Return whether Student's two-sided test at `alpha` sees no difference between two groups of values above 0.

    The test compares mean logarithms. Raises `ValueError` if both groups together have no degree of freedom.
    """
    spread, freedom = _pooled(first, second)
    if not freedom:
        raise ValueError(f"{len(first)} and {len(second)} launches have no spread")
    error = math.sqrt(spread * (1 / len(first) + 1 / len(second)))
    difference = LogDifference(_mean(first) - _mean(second), error, float(freedom))
    return min(difference.p_above(), 1 - difference.p_above()) > alpha / 2


def _mean(values: Sequence[float]) -> float:
    return fmean(map(math.log, values))


def _pooled(*groups: Sequence[float]) -> tuple[float, int]:
    """Return the pooled variance of the groups' logarithms, about each group's own mean, and its degrees of freedom."""
    squares, freedom = 0.0, 0
    for group in groups:
        if group:
            middle = _mean(group)
            squares += sum((math.log(value) - middle) ** 2 for value in group)
            freedom += len(group) - 1
    if squares < _ROUNDING**2:  # logarithms of equal values may differ in their last bits
        squares = 0.0
    return (squares / freedom if freedom else 0.0), freedom
