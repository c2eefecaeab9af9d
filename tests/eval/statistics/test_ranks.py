"""Exact tests over launches against complete enumeration."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from quantmint.eval.statistics.ranks import (
    MOST_LOOKS,
    critical_pairs,
    decided,
    fewest_launches,
    look_boundaries,
    rank_test,
    ratio_interval,
    sequential_interval,
    sequential_p,
)


def enumerated(higher: list[float], lower: list[float]) -> float:
    """The same p-value by dealing the values out in every way."""
    ranks = stats.rankdata(higher + lower)
    seen = ranks[: len(higher)].sum()
    deals = [ranks[list(chosen)].sum() for chosen in itertools.combinations(range(len(ranks)), len(higher))]
    return float(np.mean(np.array(deals) >= seen - 1e-9))


@pytest.mark.parametrize(
    ("higher", "lower"),
    [
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0]),
        ([5.0, 2.0, 7.0, 4.0], [1.0, 6.0, 3.0, 2.5]),
        ([5.0, 5.0, 7.0, 4.0], [5.0, 4.0, 3.0, 3.0]),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([3.0], [1.0, 2.0, 2.0, 3.0, 3.0]),
    ],
)
def test_p_value_is_the_share_of_all_deals(higher: list[float], lower: list[float]) -> None:
    assert rank_test(higher, lower) == pytest.approx(enumerated(higher, lower))


def test_p_value_is_scipys_where_nothing_ties() -> None:
    rng = np.random.default_rng(3)
    for sizes in ((4, 4), (3, 7), (12, 12), (20, 20)):
        higher, lower = (rng.normal(size=size).tolist() for size in sizes)
        expected = stats.mannwhitneyu(higher, lower, alternative="greater", method="exact").pvalue
        assert rank_test(higher, lower) == pytest.approx(expected)


def test_fewest_launches_is_where_a_clear_case_becomes_significant() -> None:
    for confidence in (0.8, 0.9, 0.95, 0.99, 0.999):
        fewest = fewest_launches(confidence)
        for launches, significant in ((fewest, True), (fewest - 1, False)):
            if launches:
                p = rank_test([2.0 + i for i in range(launches)], [1.0 - i for i in range(launches)])
                assert (p <= 1 - confidence) is significant
    assert fewest_launches(0.95) == 3


@pytest.mark.parametrize(("above", "below"), [(4, 4), (3, 3), (8, 8), (4, 7)])
def test_the_bounds_of_a_ratio_are_where_the_test_turns(above: int, below: int) -> None:
    rng = np.random.default_rng(5)
    candidate, baseline = rng.normal(130, 3, above).tolist(), rng.normal(100, 3, below).tolist()
    low, high = ratio_interval(candidate, baseline, 0.95)
    for bound, inside, sides in ((low, 1 + 1e-9, (0, 1)), (high, 1 - 1e-9, (1, 0))):
        for factor, shown in ((inside, False), (1 / inside, True)):
            both = candidate, [bound * factor * value for value in baseline]
            assert (rank_test(both[sides[0]], both[sides[1]]) <= 0.05 + 1e-12) is shown


def test_too_few_launches_have_the_range_for_an_interval() -> None:
    assert ratio_interval([3.0], [2.0], 0.95) == (1.5, 1.5)
    assert ratio_interval([3.0, 4.0], [2.0, 1.0], 0.95) == (1.5, 4.0)


def test_nothing_cannot_be_ranked() -> None:
    with pytest.raises(ValueError, match="ranked"):
        rank_test([], [1.0])


@pytest.mark.parametrize(("launches", "alpha"), [(3, 0.05), (3, 0.3), (4, 0.05), (4, 0.1), (4, 0.2)])
def test_all_looks_together_err_as_seldom_as_they_should(launches: int, alpha: float) -> None:
    """Over every order in which the values of two equal sides can come, of which each is as likely."""
    crossed = total = 0
    for values in itertools.permutations(range(2 * launches)):
        crossed += decided(values[:launches], values[launches:], launches, alpha) is not None
        total += 1
    assert crossed <= alpha * total
    least = look_boundaries(launches, alpha)[launches]
    assert least <= launches * launches, "the last look can decide"


def test_a_last_look_alone_is_the_fixed_test() -> None:
    """Three a side can only just decide at 95 %, so that four have nothing to spend before their last look."""
    for launches in (3, 4):
        assert dict(look_boundaries(launches, 0.05)) == {launches: critical_pairs(launches, launches, 0.05)}
    assert dict(look_boundaries(7, 0.05)) == {4: 15, 5: 23, 6: 31, 7: 41}
    with pytest.raises(ValueError, match="too many orders"):
        look_boundaries(MOST_LOOKS + 1, 0.05)


def test_equal_values_are_half_a_pair() -> None:
    even = [1.0] * 4
    assert decided(even, even, 4, 0.05) is None
    assert decided([1.1, 1.2, 1.3, 1.0], even, 4, 0.05) is None, "14 of 16 pairs"
    assert decided([1.1, 1.2, 1.3, 1.4], even, 4, 0.05) == 4


def stopped(higher: Sequence[float], lower: Sequence[float], launches: int, alpha: float) -> int:
    """Return the launches a side of a series that ends as soon as either side is shown to be the faster one."""
    return min(decided(*both, launches, alpha) or launches for both in ((higher, lower), (lower, higher)))


@pytest.mark.slow
@pytest.mark.parametrize(("launches", "alpha"), [(3, 0.3), (4, 0.1), (4, 0.3)])
def test_p_values_of_looks_are_exact(launches: int, alpha: float) -> None:
    """Over every order of the values, p is at most any level as seldom as it should; it says what the looks say."""
    found: Counter[float] = Counter()
    for values in itertools.permutations(range(2 * launches)):
        higher, lower = values[:launches], values[launches:]
        end = stopped(higher, lower, launches, alpha)
        p = sequential_p(higher[:end], lower[:end], launches, alpha)
        assert (p <= alpha) is (decided(higher[:end], lower[:end], launches, alpha) is not None)
        found[round(p, 9)] += 1
    total = math.factorial(2 * launches)
    for p in found:
        assert sum(count for other, count in found.items() if other <= p) <= (p + 1e-8) * total
    shares = list(itertools.accumulate(found[p] / total for p in sorted(found)))
    assert shares[0] == pytest.approx(min(found)), "the clearest outcome has its own chance"


def test_p_values_of_one_look_are_those_of_the_fixed_test() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        higher, lower = rng.normal(0.5, 1, 4).tolist(), rng.normal(0, 1, 4).tolist()
        assert sequential_p(higher, lower, 4, 0.05) == pytest.approx(rank_test(higher, lower))


def test_a_series_that_another_cell_ended_shows_nothing() -> None:
    assert sequential_p([1.0, 4.0, 3.0, 6.0], [2.0, 0.5, 5.0, 0.6], 7, 0.05) > 0.05
    assert sequential_p([4.0], [2.0], 7, 0.05) > 0.05, "before any look that could decide"


def test_bounds_of_looks_are_where_the_looks_turn() -> None:
    """A ratio within the bounds is shown by no look, and one outside by some look."""
    rng = np.random.default_rng(6)
    for made in (4, 5, 6):
        candidate, baseline = rng.normal(130, 3, made).tolist(), rng.normal(100, 3, made).tolist()
        low, high = sequential_interval(candidate, baseline, 6, 0.05)
        for bound, inside, sides in ((low, 1 + 1e-9, (0, 1)), (high, 1 - 1e-9, (1, 0))):
            for factor, shown in ((inside, False), (1 / inside, True)):
                both = candidate, [bound * factor * value for value in baseline]
                assert (decided(both[sides[0]], both[sides[1]], 6, 0.05) is not None) is shown
    assert sequential_interval([3.0, 4.0], [2.0, 1.0], 6, 0.05) == (1.5, 4.0)


def test_bounds_of_looks_hold_over_all_looks() -> None:
    """The fixed test's bounds at the look that ended a series miss the truth more often than they say."""
    rng, runs = np.random.default_rng(12), 3000
    misses = {"looks": 0, "fixed": 0}
    for _ in range(runs):
        candidate, baseline = np.exp(rng.normal(0, 0.02, (2, 7))).tolist()
        end = stopped(candidate, baseline, 7, 0.05)
        before, after = baseline[:end], candidate[:end]
        misses["looks"] += sequential_interval(after, before, 7, 0.05)[0] > 1
        misses["fixed"] += ratio_interval(after, before, 0.95)[0] > 1
    error = (0.05 * 0.95 / runs) ** 0.5
    assert misses["looks"] / runs < 0.05 + 3 * error
    assert misses["fixed"] / runs > 0.05 + 3 * error
