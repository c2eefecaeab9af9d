"""How small a drop in accuracy a suite of a given size can rule out.

    >>> round(detectable_margin(1319, flip_rate=0.04), 4)   # GSM8K cannot test a margin of one point
    0.0137
    >>> items_needed(0.01, flip_rate=0.04)
    2474

Both models answer the same items, so only the items whose score changes ("flips") carry variance. With a flip rate f
and a true difference d, one item's difference has variance f - d**2, hence SE = sqrt((f - d**2) / n): the paired
standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640, section 4.2) for scores of 0 or 1. The sample
size is the one of section 5 there, one-sided because only a loss matters.
"""

from __future__ import annotations

import math
from statistics import NormalDist


def paired_standard_error(items: int, flip_rate: float, difference: float = 0.0) -> float:
    """Standard error of the mean paired difference, as a fraction.

    `flip_rate` is the share of items whose 0/1 score differs between the two models, `difference` the true mean
    difference. It cannot exceed the flip rate in size; `ValueError` if it does.
    """
    if items < 1:
        raise ValueError(f"items must be at least 1, found {items}")
    if not abs(difference) <= flip_rate <= 1:
        raise ValueError(f"flip rate {flip_rate} cannot produce a difference of {difference}")
    return math.sqrt((flip_rate - difference**2) / items)


def detectable_margin(items: int, flip_rate: float, confidence: float = 0.95, power: float = 0.8) -> float:
    """Smallest margin, as a fraction, that a lossless candidate clears with probability `power`.

    It is (z_confidence + z_power) * SE at no true difference: a smaller margin leaves most good models INCONCLUSIVE.
    """
    return _spread(confidence, power) * paired_standard_error(items, flip_rate)


def items_needed(
    margin: float, flip_rate: float, confidence: float = 0.95, power: float = 0.8, difference: float = 0.0
) -> int:
    """Number of items that make a margin (a fraction) testable when the true difference is `difference`.

    `ValueError` when the difference lies on the margin, because no number of items can tell the two apart then.
    """
    distance = abs(margin + difference)
    if distance == 0:
        raise ValueError("the difference lies on the margin: no number of items decides")
    one = paired_standard_error(1, flip_rate, difference)
    return max(1, math.ceil((_spread(confidence, power) * one / distance) ** 2))


def _spread(confidence: float, power: float) -> float:
    if not (0.5 <= confidence < 1 and 0.5 <= power < 1):
        raise ValueError(f"confidence {confidence} or power {power} is outside [0.5, 1)")
    return NormalDist().inv_cdf(confidence) + NormalDist().inv_cdf(power)
