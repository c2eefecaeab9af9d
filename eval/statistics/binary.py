"""Paired proportions: two models answer the same items, each answer right or wrong.

Only the items that flip carry information: `gains` are right with the candidate alone, `losses` with the baseline
alone. Tango's score interval (Statistics in Medicine 17, 891-908, 1998) stays honest when few or no items flip, where
the textbook "difference +- z * SE" claims certainty. By itself it still errs too often: counts are whole, and at a true
drop of a few flips its one-sided 5 % test errs up to 6.8 % of the time towards PASS and 9 % towards FAIL. Continuity
corrections bring both below 5 % (the tests enumerate this exactly, over margins and flip rates, for 50 to 1319 items).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

# In flips. Half a flip is the usual correction of a whole number. The upper bound needs another half: losses at the
# margin are rare, hence skewed upwards, so chance alone exceeds them further than it falls short of them.
LOWER_CORRECTION = 0.5
UPPER_CORRECTION = 1.0


def mcnemar(gains: int, losses: int) -> float:
    """Exact two-sided McNemar p-value: under no change each flip goes either way with probability 1/2."""
    from scipy.stats import binomtest

    return float(binomtest(gains, gains + losses, 0.5).pvalue) if gains + losses else 1.0


def tango_bounds(gains: float, losses: float, items: float, z: float) -> tuple[float, float]:
    """Lower and upper bound of (gains - losses) / items, fractions in [-1, 1], each at z standard deviations.

    The bounds are the differences at which the corrected score statistic equals z and -z; it falls as the difference
    grows. Counts need not be whole: under a design effect they are effective counts. ValueError where z is negative.

        >>> low, high = tango_bounds(0, 0, 198, 1.645)  # nothing flipped among 198 items
        >>> round(low, 4), round(high, 4)
        (-0.0181, 0.0223)
    """
    from scipy.optimize import brentq

    if not z >= 0:
        raise ValueError(f"z must not be negative, found {z}")
    observed = (gains - losses) / items

    def excess(difference: float, bound: float, correction: float) -> float:
        deviation = float(score_deviation(gains, losses, items, difference))
        return gains - losses - items * difference - correction - bound * deviation

    low, high = -1.0, 1.0
    if excess(-1.0, z, LOWER_CORRECTION) > 0:
        low = float(brentq(excess, -1.0, observed, args=(z, LOWER_CORRECTION), xtol=1e-13))
    if excess(1.0, -z, -UPPER_CORRECTION) < 0:
        high = float(brentq(excess, observed, 1.0, args=(-z, -UPPER_CORRECTION), xtol=1e-13))
    return low, high


def score_deviation(gains: Any, losses: Any, items: Any, difference: Any) -> NDArray[Any]:
    """Standard deviation of gains - losses when `difference` is true, the loss rate at its restricted maximum.

    Numbers, or arrays of one shape. With rates for counts and 1 for `items` it is that of a single item.
    """
    import numpy as np

    a = 2 * items
    b = -gains - losses + (2 * items - gains + losses) * difference
    c = -losses * difference * (1 - difference)
    loss_rate = (np.sqrt(np.maximum(b * b - 4 * a * c, 0)) - b) / (2 * a)
    deviation: NDArray[Any] = np.sqrt(np.maximum(items * (2 * loss_rate + difference * (1 - difference)), 0))
    return deviation
