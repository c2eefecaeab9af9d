"""How much of the baseline's score a candidate keeps, with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eval.statistics.paired import Change


@dataclass(frozen=True, slots=True)
class Recovery:
    """candidate / baseline (of perplexities: baseline / candidate), None where the baseline scores 0.

    The bounds are None where they are not finite: a baseline that cannot be told from 0.
    """

    value: float | None
    low: float | None
    high: float | None


def recovery(change: Change, confidence: float) -> Recovery:
    """The share that is left, with a two-sided interval at `confidence`.

    Of scores it is Fieller's interval (JRSS B 16, 175-185, 1954) of a ratio of two means measured on the same units:
    the ratios r for which the mean of candidate - r * baseline is within t standard errors of 0. Unlike the delta
    method on logarithms it needs no score above 0 and says so when there is no finite answer. The error of the
    difference is taken as half the width of `Change.bounds`, so that no flips are no certainty here either. Of
    perplexities it is exp of the difference and of its bounds.
    """
    import numpy as np
    from scipy.special import stdtrit

    low, high = change.bounds((1 + confidence) / 2)
    if change.kind == "perplexity":
        # Two documents can have bounds beyond what a float holds.
        return Recovery(*(math.exp(min(value, 700.0)) for value in (change.difference, low, high)))
    units, items = change.units, change.items
    count = len(units.weights)
    mean = float(np.sum(units.baseline)) / items
    if mean == 0:
        return Recovery(None, None, None)
    t = float(stdtrit(count - 1, (1 + confidence) / 2))
    moved = units.candidate - units.baseline - change.difference * units.weights
    level = units.baseline - mean * units.weights
    scale = count / (count - 1) / items**2
    level_variance = float(np.sum(level**2)) * scale
    covariance = float(np.sum(level * moved)) * scale
    moved_variance = max(float(np.sum(moved**2)) * scale, ((high - low) / 2 / t) ** 2)
    # |difference - s * mean| <= t * deviation(difference - s * mean), squared, for s = r - 1.
    a = mean**2 - t**2 * level_variance
    b = change.difference * mean - t**2 * covariance
    c = change.difference**2 - t**2 * moved_variance
    value = 1 + change.difference / mean
    if a <= 0 or b * b < a * c:
        return Recovery(value, None, None)
    root = math.sqrt(b * b - a * c)
    return Recovery(value, 1 + (b - root) / a, 1 + (b + root) / a)
