"""Exact inference from a handful of launches: a rank test and its interval, neither of them sampled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final


def rank_test(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Return the exact one-sided p-value of the Wilcoxon-Mann-Whitney test that `higher` tends to be above `lower`.

    It is the share of all ways to deal the values out to two groups of these sizes whose rank sum is at least as large
    as seen. Ties get mean ranks, and the share stays exact: it is counted over these very ranks, doubled to be whole,
    by the shift algorithm of Streitberg and Röhmel (Statistical Software Newsletter 12, 10-17, 1986). Raises
    `ValueError` if a side is empty.
    """
    if not higher or not lower:
        raise ValueError(f"{len(higher)} and {len(lower)} values cannot be ranked")
    doubled = _doubled_ranks((*higher, *lower))
    observed = sum(doubled[: len(higher)])
    extreme = sum(count for total, count in rank_sums(doubled, len(higher)).items() if total >= observed)
    return extreme / math.comb(len(doubled), len(higher))


def rank_sums(ranks: Sequence[int], chosen: int) -> Counter[int]:
    """Return how many ways there are to choose `chosen` of the ranks, by the sum of the chosen ranks."""
    # ways[k][s]: in how many ways k of the ranks so far have a sum of s.
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(chosen))]
    for rank in ranks:
        for size in range(chosen, 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + rank] += count
    return ways[-1]


def fewest_launches(confidence: float) -> int:
    """Return the least number of launches a side with which `rank_test` can be significant at 1 - confidence.

    Raises `ValueError` for a confidence outside [0, 1).

    >>> fewest_launches(0.95), fewest_launches(0.99)
    (3, 5)
    """
    if not 0 <= confidence < 1:
        raise ValueError(f"confidence {confidence} is outside [0, 1)")
    launches = 1
    while 1 / math.comb(2 * launches, launches) > 1 - confidence:
        launches += 1
    return launches


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the lower and upper bound of numerator / denominator, each one-sided at `confidence`.

    All values are above 0. The bounds invert `rank_test`: at 1 - confidence it is significant for every ratio below the
    lower bound and for no other. So each is a ratio of two values (Moses, in Walker and Lev, Statistical Inference,
    1953; Hollander and Wolfe, 4.3). With so few values that nothing is significant, they are the least and the greatest
    such ratio.
    """
    ratios = sorted(above / below for above in numerator for below in denominator)
    left = len(ratios) - (critical_pairs(len(numerator), len(denominator), 1 - confidence) or len(ratios))
    return ratios[left], ratios[-1 - left]


def critical_pairs(higher: int, lower: int, alpha: float) -> int | None:
    """Return the least significant number of pairs in `rank_test` at `alpha`; None if no number is significant.

    `higher` and `lower` are the sizes of the two groups; a pair is a value of each, the first group's being the higher.
    Their number is Mann and Whitney's U: the sum of ranks less the least possible sum (Ann. Math. Statist. 18, 1947).
    """
    ways = rank_sums(range(higher + lower), higher)
    limit = alpha * math.comb(higher + lower, higher) * (1 + 1e-9)
    sums = sorted(ways, reverse=True)
    significant = [
        total for total, tail in zip(sums, accumulate(ways[total] for total in sums), strict=True) if tail <= limit
    ]
    return significant[-1] - sums[-1] if significant else None


MOST_LOOKS: Final = 7
"""Launches a side up to which looks are counted out: there are 3,432 orders of seven of each."""


@dataclass(frozen=True, slots=True)
class SequentialLook:
    """One look of a test that may end early, with probabilities under the null hypothesis.

    `least` is the least significant number of pairs at this look (None: no number is), `spent` the chance of a decision
    at an earlier look. `chances` maps a number of pairs at this look to its chance without an earlier decision.
    """

    least: int | None
    spent: float
    chances: Mapping[int, float]

    def tail(self, pairs: float) -> float:
        """Return the chance of at least `pairs` pairs here without an earlier decision; a half pair is rounded down."""
        return sum(chance for count, chance in self.chances.items() if count >= math.floor(pairs))

    @property
    def spent_here(self) -> float:
        """Return the chance of a decision at this look or an earlier one."""
        return self.spent + (0.0 if self.least is None else self.tail(self.least))


def look_boundaries(launches: int, alpha: float) -> Mapping[int, int]:
    """Return the boundaries of a test that may end early: the least significant number of pairs by launches a side.

    Looks at which nothing can be significant are left out. Raises `ValueError` for more launches than `MOST_LOOKS`.

    >>> dict(look_boundaries(6, 0.05))
    {4: 15, 5: 22, 6: 31}
    """
    looks = sequential_looks(launches, alpha)
    return {number: look.least for number, look in enumerate(looks, start=1) if look.least is not None}


@cache
def sequential_looks(launches: int, alpha: float) -> tuple[SequentialLook, ...]:
    """Return every look of a test that may end early, the first after one launch of each side.

    A pair is a value of each side whose first is the higher one, as in `critical_pairs`. Each look adds a value to both
    sides, so that under the null the rank of each new value among those before is uniform and independent of them;
    every order of the two sides is followed from look to look with its probability. The first boundary that is reached
    decides. Up to a look of n launches the boundaries spend at most alpha n / launches (Lan and DeMets, Biometrika 70,
    1983, with a linear spending), so that all of them together err at most alpha. ValueError for more launches than
    `MOST_LOOKS`.
    """
    if launches > MOST_LOOKS:
        raise ValueError(
            f"{launches} launches a side have too many orders to be counted, expected {MOST_LOOKS} at most"
        )
    # Orders of the sides from the lowest value to the highest, True for the first side, that crossed no boundary yet.
    orders: dict[tuple[bool, ...], float] = {(): 1.0}
    looks: list[SequentialLook] = []
    spent = 0.0
    for number in range(1, launches + 1):
        for side in (False, True):
            orders = _inserted(orders, side)
        chances: defaultdict[int, float] = defaultdict(float)
        for order, chance in orders.items():
            chances[_pairs(order)] += chance
        tail, least = 0.0, None
        for pairs in sorted(chances, reverse=True):
            if spent + tail + chances[pairs] > alpha * number / launches * (1 + 1e-9):
                break
            tail, least = tail + chances[pairs], pairs
        looks.append(SequentialLook(least, spent, dict(chances)))
        if least is not None:
            spent += tail
            orders = {order: chance for order, chance in orders.items() if _pairs(order) < least}
    return tuple(looks)


def _inserted(orders: Mapping[tuple[bool, ...], float], side: bool) -> dict[tuple[bool, ...], float]:
    """Return the orders of the values of both sides, and their probabilities, after one more value of a ``side``.

    An order lists the side of each value from the smallest to the largest. The new value has each place in an order
    with the same chance.
    """
    probabilities: defaultdict[tuple[bool, ...], float] = defaultdict(float)
    for order, chance in orders.items():
        for place in range(len(order) + 1):
            probabilities[(*order[:place], side, *order[place:])] += chance / (len(order) + 1)
    return dict(probabilities)


def _pairs(order: tuple[bool, ...]) -> int:
    lower = pairs = 0
    for first in order:
        pairs += lower if first else 0
        lower += not first
    return pairs


def decided(higher: Sequence[float], lower: Sequence[float], launches: int, alpha: float) -> int | None:
    """Return the first look, in launches a side, at which `higher` is significantly above `lower`; None without one.

    Values are in the order of the launches; `launches` a side are planned, and all looks together err at `alpha`. Equal
    values count for half a pair.
    """
    for look, least in look_boundaries(launches, alpha).items():
        if look <= min(len(higher), len(lower)) and _higher_pairs(higher[:look], lower[:look]) >= least:
            return look
    return None


def sequential_p(higher: Sequence[float], lower: Sequence[float], launches: int, alpha: float) -> float:
    """Return the one-sided p-value for the claim that `higher` is above `lower`, in a test that may end early.

    Values are in the order of the launches. Outcomes are ordered by the look that decided, then by its pairs (Jennison
    and Turnbull, "Group Sequential Methods", section 8.4): the p-value is the chance under the null of an earlier
    decision, or of as many pairs at this look. It is at most `alpha` exactly if `decided` names a look. A series that
    ended undecided before its last look, because of another cell, keeps the error that later looks would have spent.
    """
    looks, last = sequential_looks(launches, alpha), min(len(higher), len(lower), launches)
    number = decided(higher, lower, launches, alpha)
    here = number or last
    look = looks[here - 1]
    p = look.spent + look.tail(_higher_pairs(higher[:here], lower[:here]))
    if number is None and here < launches:
        p += alpha - look.spent_here
    return min(p, 1.0)


def sequential_interval(
    numerator: Sequence[float], denominator: Sequence[float], launches: int, alpha: float
) -> tuple[float, float]:
    """Return the lower and upper bound of numerator / denominator, in a test that may end early.

    Each bound errs at `alpha` over all looks together. They are repeated confidence intervals (Jennison and Turnbull,
    JRSS B 51, 305-361, 1989): each look's bounds follow from its boundary, as in `ratio_interval`, and the result is
    the narrowest of all looks so far. Before the first look that could decide they are the least and the greatest ratio
    of two values.
    """
    seen = min(len(numerator), len(denominator), launches)
    ratios = [above / below for above in numerator[:seen] for below in denominator[:seen]]
    low, high = min(ratios), max(ratios)
    for look, least in look_boundaries(launches, alpha).items():
        if look <= seen:
            ordered = sorted(above / below for above in numerator[:look] for below in denominator[:look])
            left = len(ordered) - least
            low, high = max(low, ordered[left]), min(high, ordered[-1 - left])
    return min(low, high), max(low, high)


def _higher_pairs(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Return the number of pairs whose first value is the higher one; equal values count for half a pair."""
    return sum((above > below) + 0.5 * (above == below) for above in higher for below in lower)


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Return twice the 1-based rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    first = {value: number for number, value in reversed(list(enumerate(ordered, start=1)))}
    counts = Counter(ordered)
    return [2 * first[value] + counts[value] - 1 for value in values]
