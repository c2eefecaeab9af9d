"""Exact inference from a handful of launches: a rank test and the bootstrap of a median, neither of them sampled."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence


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


def median_law(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The bootstrap's distribution of the median: (median, probability) for all medians that a resample can have.

    All n**n resamples are counted by their middle order statistics (Maritz and Jarrett, JASA 73, 194-196, 1978, for odd
    n; the same argument for the middle two of an even n), so nothing is drawn at random.
    """
    ordered, n = sorted(values), len(values)
    if not n:
        raise ValueError("no values, no median")
    half = n // 2
    found: defaultdict[float, float] = defaultdict(float)

    def at_most(rank: int) -> float:
        """Probability that the order statistic number `half`, or `half + 1` of an odd n, is among the first `rank`."""
        least = half + n % 2
        return sum(math.comb(n, k) * (rank / n) ** k * (1 - rank / n) ** (n - k) for k in range(least, n + 1))

    for i in range(1, n + 1):
        alone = at_most(i) - at_most(i - 1)
        if n % 2 == 0:
            # Half of the draws end exactly at i, the other half begins exactly at a later j.
            below = (i / n) ** half - ((i - 1) / n) ** half
            for j in range(i + 1, n + 1):
                above = ((n - j + 1) / n) ** half - ((n - j) / n) ** half
                both = math.comb(n, half) * below * above
                found[(ordered[i - 1] + ordered[j - 1]) / 2] += both
                alone -= both
        found[ordered[i - 1]] += alone
    return tuple(sorted((value, max(chance, 0.0)) for value, chance in found.items()))


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Two-sided percentile interval of the median at `confidence`, from all resamples."""
    return _percentiles(median_law(values), confidence)


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float], confidence: float) -> tuple[float, float]:
    """Two-sided percentile interval of median(numerator) / median(denominator), each side resampled on its own.

    All values must be above 0. With four values a side it is the interval of all 65536 pairs of resamples.
    """
    below = median_law(denominator)
    law: defaultdict[float, float] = defaultdict(float)
    for above, chance in median_law(numerator):
        for value, other in below:
            law[above / value] += chance * other
    return _percentiles(tuple(sorted(law.items())), confidence)


def _percentiles(law: Sequence[tuple[float, float]], confidence: float) -> tuple[float, float]:
    """The smallest value with at least (1 - confidence) / 2 of the probability up to it, and its mirror from above."""
    tail = (1 - confidence) / 2

    def first(ordered: Sequence[tuple[float, float]]) -> float:
        total = 0.0
        for value, chance in ordered:
            total += chance
            if total >= tail:
                return value
        return ordered[-1][0]

    return first(law), first(law[::-1])


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the 1-based rank of each value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    first = {value: number for number, value in reversed(list(enumerate(ordered, start=1)))}
    counts = Counter(ordered)
    return [2 * first[value] + counts[value] - 1 for value in values]
