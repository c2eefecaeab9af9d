"""Paired proportions: two models answer the same items, each answer right or wrong.

Only the items that flip carry information: `gains` are right with the candidate alone, `losses` with the baseline
alone. Tango's score interval (Statistics in Medicine 17, 891-908, 1998) stays honest when few or no items flip, where
the textbook "difference +- z * SE" claims certainty: with no flips in n items its lower bound is -z**2 / (n + z**2).
"""

from __future__ import annotations

import math


def mcnemar(gains: int, losses: int) -> float:
    """Exact two-sided McNemar p-value: under no change each flip goes either way with probability 1/2."""
    from scipy.stats import binomtest

    return float(binomtest(gains, gains + losses, 0.5).pvalue) if gains + losses else 1.0


def tango_bounds(gains: float, losses: float, items: float, z: float) -> tuple[float, float]:
    """Lower and upper bound of (gains - losses) / items, fractions in [-1, 1], each at z standard deviations.

    The bounds are the differences at which the score statistic equals z and -z; it falls as the difference grows.
    Counts need not be whole: under a design effect they are effective counts. ValueError where z is negative.
    """
    from scipy.optimize import brentq

    if z < 0:
        raise ValueError(f"z must not be negative, found {z}")
    observed = (gains - losses) / items
    if z == 0:
        return observed, observed
    if math.isinf(z):
        return -1.0, 1.0

    def excess(difference: float, bound: float) -> float:
        return gains - losses - items * difference - bound * score_deviation(gains, losses, items, difference)

    # Without flips the statistic is 0/0 at the observed difference itself, so the search starts a hair beside it.
    below, above = max(observed - 1e-12, -1.0), min(observed + 1e-12, 1.0)
    low = -1.0 if losses == items else float(brentq(excess, -1.0, below, args=(z,), xtol=1e-13))
    high = 1.0 if gains == items else float(brentq(excess, above, 1.0, args=(-z,), xtol=1e-13))
    return low, high


def score_deviation(gains: float, losses: float, items: float, difference: float) -> float:
    """Standard deviation of gains - losses when `difference` is true, the loss rate at its restricted maximum."""
    a = 2 * items
    b = -gains - losses + (2 * items - gains + losses) * difference
    c = -losses * difference * (1 - difference)
    loss_rate = ((max(b * b - 4 * a * c, 0.0)) ** 0.5 - b) / (2 * a)
    return float(max(items * (2 * loss_rate + difference * (1 - difference)), 0.0) ** 0.5)
