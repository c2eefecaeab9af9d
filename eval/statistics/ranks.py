"""Exact inference from a handful of launches: a rank test and its interval, neither of them sampled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Final


def rank_test(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Exact one-sided p-value of the Wilcoxon-Mann-Whitney test that `higher` tends to be above `lower`.

    The share of all ways to deal the values out to two groups of these sizes whose rank sum is at least as large as
    seen. Ties get mean ranks, and the share stays exact: it is counted over these very ranks, doubled to be whole, by
    the shift algorithm of Streitberg and Röhmel (Statistical Software Newsletter 12, 10-17, 1986).
    ValueError where a side is empty.
    """
    if not higher or not lower:
        raise ValueError(f"{len(higher)} and {len(lower)} values cannot be ranked")
    doubled = _doubled_ranks((*higher, *lower))
    seen = sum(doubled[: len(higher)])
    extreme = sum(count for total, count in rank_sums(doubled, len(higher)).items() if total >= seen)
    return extreme / math.comb(len(doubled), len(higher))


def rank_sums(ranks: Sequence[int], chosen: int) -> Counter[int]:
    """In how many ways so many of the ranks have each sum."""
    # ways[k][s]: in how many ways k of the ranks so far have a sum of s.
    ways: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(chosen))]
    for rank in ranks:
        for size in range(chosen, 0, -1):
            for total, count in ways[size - 1].items():
                ways[size][total + rank] += count
    return ways[-1]


def fewest_launches(confidence: float) -> int:
    """Launches a side below which no outcome, however clear, is significant in `rank_test` at 1 - confidence.

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
    """Bounds of how many times as large `numerator` is, each of which holds at `confidence`; all values above 0.

    They are those of `rank_test`: it shows more than any ratio below the lower bound, at 1 - confidence, and more than
    no other. So each is a ratio of two values (Moses, in Walker and Lev, Statistical Inference, 1953; Hollander and
    Wolfe, 4.3). Where so few values show nothing, they are the least and the greatest such ratio.
    """
    ratios = sorted(above / below for above in numerator for below in denominator)
    left = len(ratios) - (critical_pairs(len(numerator), len(denominator), 1 - confidence) or len(ratios))
    return ratios[left], ratios[-1 - left]


def critical_pairs(higher: int, lower: int, alpha: float) -> int | None:
    """The least number of pairs whose first is the higher one that is significant in `rank_test`; None where none is.

    It is Mann and Whitney's U: the sum of ranks less the least that this can be (Ann. Math. Statist. 18, 1947).
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


@cache
def look_boundaries(launches: int, alpha: float) -> Mapping[int, int]:
    """Return the looks of a test that may end early: launches a side, and the least significant number of pairs.

    A pair is a value of each side whose first is the higher one, as in `critical_pairs`. Each look adds a value to both
    sides, so that under the null the rank of each new value among those before is uniform and independent of them;
    every order of the two sides is followed from look to look with its probability. The first boundary that is reached
    decides. Up to a look of n launches the boundaries spend at most alpha n / launches (Lan and DeMets, Biometrika 70,
    1983, with a linear spending), so that all of them together err at most alpha. Looks at which nothing could be
    significant are left out. `ValueError` for more launches than `MOST_LOOKS`.

    >>> dict(look_boundaries(6, 0.05))
    {4: 15, 5: 22, 6: 31}
    """
    if launches > MOST_LOOKS:
        raise ValueError(
            f"{launches} launches a side have too many orders to be counted, expected {MOST_LOOKS} at most"
        )
    # Orders of the sides from the lowest value to the highest, True for the first side, that crossed no boundary yet.
    orders: dict[tuple[bool, ...], float] = {(): 1.0}
    boundaries: dict[int, int] = {}
    spent = 0.0
    for look in range(1, launches + 1):
        for side in (False, True):
            orders = _inserted(orders, side)
        by_pairs: Counter[int] = Counter()
        for order, chance in orders.items():
            by_pairs[_pairs(order)] += chance  # type: ignore[assignment]
        tail, least = 0.0, None
        for pairs in sorted(by_pairs, reverse=True):
            if spent + tail + by_pairs[pairs] > alpha * look / launches * (1 + 1e-9):
                break
            tail, least = tail + by_pairs[pairs], pairs
        if least is not None:
            boundaries[look], spent = least, spent + tail
            orders = {order: chance for order, chance in orders.items() if _pairs(order) < least}
    return boundaries


def _inserted(orders: Mapping[tuple[bool, ...], float], side: bool) -> dict[tuple[bool, ...], float]:
    """Return the orders with one more value of a side, at each place with the same chance."""
    found: defaultdict[tuple[bool, ...], float] = defaultdict(float)
    for order, chance in orders.items():
        for place in range(len(order) + 1):
            found[(*order[:place], side, *order[place:])] += chance / (len(order) + 1)
    return dict(found)


def _pairs(order: tuple[bool, ...]) -> int:
    lower = pairs = 0
    for first in order:
        pairs += lower if first else 0
        lower += not first
    return pairs


def decided(higher: Sequence[float], lower: Sequence[float], launches: int, alpha: float) -> int | None:
    """Return the look at which values, in the order made, first show that `higher` is above `lower`; None at none.

    Equal values count for half a pair.
    """
    for look, least in look_boundaries(launches, alpha).items():
        if look <= min(len(higher), len(lower)):
            compared = [(above > below) + 0.5 * (above == below) for above in higher[:look] for below in lower[:look]]
            if sum(compared) >= least:
                return look
    return None


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the 1-based rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    first = {value: number for number, value in reversed(list(enumerate(ordered, start=1)))}
    counts = Counter(ordered)
    return [2 * first[value] + counts[value] - 1 for value in values]
