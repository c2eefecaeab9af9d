"""Exact tests over launches against complete enumeration."""

from __future__ import annotations

import itertools
from statistics import median

import numpy as np
import pytest
from scipy import stats

from eval.statistics.ranks import fewest_launches, median_interval, median_law, rank_test, ratio_interval


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


@pytest.mark.parametrize(
    "values", [[4.0], [1.0, 3.0], [3.0, 1.0, 8.0], [1.0, 4.0, 4.0, 9.0], [2.0, 5.0, 1.0, 7.0, 6.0]]
)
def test_law_of_the_median_counts_every_resample(values: list[float]) -> None:
    resamples = [median(chosen) for chosen in itertools.product(values, repeat=len(values))]
    law = dict(median_law(values))
    assert sum(law.values()) == pytest.approx(1)
    for value in set(resamples):
        assert law[value] == pytest.approx(resamples.count(value) / len(resamples), abs=1e-12)
    # A median that the enumeration does not know has no probability.
    assert sum(law[value] for value in law.keys() - set(resamples)) == pytest.approx(0, abs=1e-12)


def test_ratio_interval_is_that_of_all_pairs_of_resamples() -> None:
    above, below = [131.0, 128.0, 140.0, 133.0], [100.0, 97.0, 103.0, 99.0]
    ratios = sorted(
        median(a) / median(b) for a in itertools.product(above, repeat=4) for b in itertools.product(below, repeat=4)
    )
    low, high = ratio_interval(above, below, 0.95)
    # 65536 resamples: the value that 2.5 % lie at or below, and its mirror.
    assert low == pytest.approx(ratios[round(0.025 * 65536) - 1], abs=1e-3)
    assert high == pytest.approx(ratios[-round(0.025 * 65536)], abs=1e-3)
    assert low < 132 / 99.5 < high


def test_one_launch_has_a_point_for_an_interval() -> None:
    assert ratio_interval([3.0], [2.0], 0.95) == (1.5, 1.5)
    assert median_interval([7.0], 0.95) == (7.0, 7.0)


def test_interval_of_a_median_covers_it() -> None:
    """Twelve launches, skewed times: 95 % nominal; a percentile interval of so few is a little short of it."""
    rng = np.random.default_rng(8)
    runs = 600
    covered = 0
    for values in rng.lognormal(0.0, 0.5, size=(runs, 12)):
        low, high = median_interval(values.tolist(), 0.95)
        covered += low <= 1 <= high
    assert covered / runs >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / runs)


def test_nothing_cannot_be_ranked() -> None:
    with pytest.raises(ValueError, match="ranked"):
        rank_test([], [1.0])
    with pytest.raises(ValueError, match="no values"):
        median_law([])
