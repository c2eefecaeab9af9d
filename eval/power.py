"""Compute how small a drop in accuracy a suite of a given size can rule out.

    >>> round(detectable_margin(1319, flip_rate=0.04), 4)   # GSM8K cannot test a margin of one point
    0.0146
    >>> round(detectable_margin(1319, flip_rate=0.04, looks=4), 4)
    0.0148
    >>> items_needed(0.01, flip_rate=0.04)
    2661

Both models answer the same items, so only the items whose score changes ("flips") carry variance. With a flip rate f
and a true difference d, one item's difference has variance f - d**2, hence SE = sqrt((f - d**2) / n): the paired
standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640, section 4.2) for scores of 0 or 1. The test
holds the change against the margin by Tango's score interval, whose variance is the one with the margin true; its
sample size is Nam's (Biometrics 53, 1422-1430, 1997), one-sided because only a loss matters, here with the interval's
continuity correction. The power is never below the promised one, by more than half a point in the tests' simulations:
where fewer than `_FEWEST` flips are to be expected, of which one more would decide, so many are reckoned with.

Of a mean that is not of 0/1 scores, such as a perplexity's, the deviation between items stands for the flips.

`looks` is the number of times that the items are judged while they are asked (`eval.statistics.sequential`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from statistics import NormalDist

from quantmint.eval.accuracy import Accuracy
from quantmint.eval.statistics.paired import LOWER_CORRECTION, UPPER_CORRECTION, score_deviation
from quantmint.eval.statistics.sequential import crossing, inflation, plan_looks

_FEWEST = 1.2
# In standard errors, over the root of the items: found by simulation (62 and 300 documents, t with 5 degrees).
_UNEVEN = 6.0


def paired_standard_error(items: int, flip_rate: float, difference: float = 0.0) -> float:
    """Return the standard error of the mean paired difference, as a fraction.

    `flip_rate` is the share of items whose 0/1 score differs between the two models, `difference` the true mean
    difference. Raises `ValueError` if the difference exceeds the flip rate in size, or without items.
    """
    if items < 1:
        raise ValueError(f"items must be at least 1, found {items}")
    if not abs(difference) <= flip_rate <= 1:
        raise ValueError(f"flip rate {flip_rate} cannot produce a difference of {difference}")
    return math.sqrt((flip_rate - difference**2) / items)


def detectable_margin(
    items: int, flip_rate: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1
) -> float:
    """Return the smallest margin, as a fraction, that a lossless candidate clears with probability `power`.

    A smaller margin leaves most good models INCONCLUSIVE. Returns 1 if the items are too few for any margin. `looks` is
    the number of times that the items are judged while they are asked.
    """
    from scipy.optimize import brentq

    paired_standard_error(items, flip_rate)

    def missing(margin: float) -> float:
        return _items(margin, flip_rate, confidence, power, 0.0, len(plan_looks(items, looks))) - items

    return float(brentq(missing, 1e-9, 1.0, xtol=1e-12)) if missing(1.0) < 0 else 1.0


def items_needed(
    margin: float,
    flip_rate: float,
    confidence: float = 0.95,
    power: float = 0.8,
    difference: float = 0.0,
    looks: int = 1,
) -> int:
    """Return the number of items that decide about a margin with probability `power` if `difference` is true.

    `margin` and `difference` are fractions; a loss is below 0. Raises `ValueError` if the difference lies on the
    margin, because then no number of items can tell the two apart.
    """
    paired_standard_error(1, flip_rate, difference)
    if margin + difference == 0:
        raise ValueError("the difference lies on the margin: no number of items decides")
    return math.ceil(_items(margin, flip_rate, confidence, power, difference, looks))


def detectable_mean(
    items: int, deviation: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1
) -> float:
    """Return the smallest margin that a lossless candidate clears with probability `power`, for other than 0/1 scores.

    `deviation` is the standard deviation of the items' changes, in the units of the margin: nats per word between
    documents for a perplexity. Infinite below two items. Few documents make Student's t wide, so it takes the place of
    the normal in the bound; `_UNEVEN` stands for lengths that differ and for skewness seen by chance.

    >>> round(detectable_mean(62, deviation=0.02), 4)
    0.0083
    """
    if items < 2:
        return math.inf
    quantile = _bound(items, confidence) + _z(power)
    looks = len(plan_looks(items, looks))
    return quantile * deviation * math.sqrt(inflation(looks, confidence, power) / items)


def mean_items_needed(
    margin: float, deviation: float, confidence: float = 0.95, power: float = 0.8, looks: int = 1
) -> int:
    """Return the least number of items for which `detectable_mean` is at most `margin`.

    Raises `ValueError` for a margin of 0 or less.
    """
    if margin <= 0:
        raise ValueError(f"the margin must be above 0, found {margin}")
    enough = range(2, 1 << 40)
    return enough[bisect_left(enough, -margin, key=lambda n: -detectable_mean(n, deviation, confidence, power, looks))]


def more_items(
    result: Accuracy, margin: float, power: float = 0.8, *, expected_flip_rate: float = 0.04, looks: int = 1
) -> int | None:
    """Return how many more items an evaluation needs to decide with probability `power`, if the change stays.

    `margin` is in the units of the difference (`accuracy.margin_in_units`). The variance is the one seen, by clusters
    where items share passages; `expected_flip_rate` stands in where no 0/1 score flipped. None where the change lies
    on the margin. It is the size of a new evaluation less that of this one: items cannot be added to an evaluation
    that is over, because its error is spent.
    """
    distance = abs(result.difference + margin)
    if distance == 0:
        return None
    if result.kind != "binary":
        spread = (_z(result.confidence) + _z(power)) * math.sqrt(inflation(looks, result.confidence, power))
        needed = result.items * (spread * result.standard_error / distance) ** 2
    else:
        rate = result.flip_rate or expected_flip_rate
        single = paired_standard_error(result.items, rate, result.difference)
        effect = max(1.0, (result.standard_error / single) ** 2) if result.clusters and single else 1.0
        needed = effect * _items(margin, rate, result.confidence, power, result.difference, looks)
    return max(1, math.ceil(needed) - result.items)


@dataclass(frozen=True, slots=True)
class PlannedOutcome:
    """The chances of PASS and of FAIL over all looks, and the number of items that are asked on average."""

    passes: float
    fails: float
    items: float


def outcome(
    items: int, looks: int, margin: float, flip_rate: float, difference: float = 0.0, confidence: float = 0.95
) -> PlannedOutcome:
    """Return the chances of a planned evaluation of 0/1 scores if `difference` is the true mean difference.

    >>> found = outcome(14042, 4, margin=0.01, flip_rate=0.04)
    >>> round(found.passes, 4), round(found.items)
    (1.0, 6618)
    """
    planned_looks = plan_looks(items, looks)
    flip_rate = _reckoned(flip_rate, items)
    single = paired_standard_error(1, flip_rate, difference)
    running, total, passes = 1.0, 0.0, 0.0
    chances = crossing(
        [count / items for count in planned_looks],
        confidence,
        (margin + difference) * math.sqrt(items) / single,
        spread=_tested(flip_rate, difference, margin) / single,
        steps=(LOWER_CORRECTION / single / math.sqrt(items), UPPER_CORRECTION / single / math.sqrt(items)),
    )
    for before, count, (up, down) in zip((0, *planned_looks), planned_looks, chances, strict=False):
        total += running * (count - before)
        passes += up
        running -= up + down
    return PlannedOutcome(passes, 1 - running - passes, total)


def mean_passes(items: int, margin: float, deviation: float, confidence: float = 0.95, looks: int = 1) -> float:
    """Return the chance that a lossless candidate clears a margin, for scores other than 0 and 1.

    It is the inverse of `detectable_mean`, with the same units; 0 below two items.
    """
    from scipy.special import ndtr

    if items < 2:
        return 0.0
    clear = _bound(items, confidence)
    widened = math.sqrt(inflation(len(plan_looks(items, looks)), confidence) / items)
    return float(ndtr(margin / (deviation * widened) - clear))


def _bound(items: int, confidence: float) -> float:
    """Return the distance from a mean to its one-sided bound, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(items - 1, confidence)) + _UNEVEN / math.sqrt(items)


def _reckoned(flip_rate: float, items: float) -> float:
    return min(1.0, max(flip_rate, _FEWEST / items))


def _tested(flip_rate: float, difference: float, margin: float) -> float:
    """Return the standard deviation of one item's change in score under the null hypothesis, a loss of ``margin``.

    The rates of items that are gained and lost are estimated as a test would estimate them from a candidate that flips
    a share ``flip_rate`` of the items and whose score changes by ``difference``, negative for a loss. ``margin`` is
    positive.
    """
    return float(score_deviation((flip_rate + difference) / 2, (flip_rate - difference) / 2, 1.0, -margin))


def _items(margin: float, flip_rate: float, confidence: float, power: float, difference: float, looks: int) -> float:
    """Return the number of items, not rounded, that decide about a margin.

    It solves items * distance - flips = sqrt(items) * spread, where flips is the interval's continuity correction and
    spread holds the standard deviations of one item under the margin and under `difference`.
    """
    distance = margin + difference
    flips = LOWER_CORRECTION if distance > 0 else UPPER_CORRECTION
    distance = abs(distance)

    def solved(rate: float) -> float:
        spread = _z(confidence) * _tested(rate, difference, margin) + _z(power) * math.sqrt(rate - difference**2)
        spread *= math.sqrt(inflation(looks, confidence, power))
        return ((spread + math.sqrt(spread**2 + 4 * distance * flips)) / (2 * distance)) ** 2

    items = solved(flip_rate)
    if items * flip_rate >= _FEWEST:
        return items
    from scipy.optimize import brentq

    # So few items that the rate reckoned with depends on them: more items make it smaller, and fewer needed.
    return float(brentq(lambda found: solved(_reckoned(flip_rate, found)) - found, items, max(solved(1.0), items) + 1))


def _z(probability: float) -> float:
    if not 0.5 <= probability < 1:
        raise ValueError(f"confidence or power {probability} is outside [0.5, 1)")
    return NormalDist().inv_cdf(probability)
