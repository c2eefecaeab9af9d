"""The statistics against closed forms, an independent likelihood, and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from eval import accuracy, power
from eval.errors import MeasurementError
from eval.samples import Pairs


def pairs(baseline: np.ndarray, candidate: np.ndarray) -> Pairs:
    return Pairs("t", "acc", tuple(map(float, baseline)), tuple(map(float, candidate)))


def test_numbers_of_a_small_table_by_hand() -> None:
    # 3 kept right, 2 lost, 1 gained, 4 kept wrong.
    result = accuracy.compare(pairs(np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0]), np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])))
    assert (result.items, result.baseline, result.candidate) == (10, 0.5, 0.4)
    assert (result.losses, result.gains, result.flip_rate) == (2, 1, 0.3)
    assert result.difference == pytest.approx(-0.1)
    assert result.recovery == pytest.approx(0.8)
    # Sample variance of (-1, -1, +1, 0 x 7) about -0.1: (3 - 10 * 0.01) / 9.
    assert result.standard_error == pytest.approx(math.sqrt((3 - 0.1) / 9 / 10))
    assert result.mcnemar_p == pytest.approx(2 * (0.5**3 + 3 * 0.5**3))


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (5, 5), (3, 12), (30, 11)])
def test_mcnemar_is_the_exact_binomial_tail(gains: int, losses: int) -> None:
    n, k = gains + losses, min(gains, losses)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert accuracy.mcnemar(gains, losses) == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize(
    ("gains", "losses", "items"), [(12, 2, 50), (2, 12, 50), (4, 9, 300), (0, 7, 200), (40, 38, 2000)]
)
def test_tango_bounds_solve_the_score_equation(gains: int, losses: int, items: int) -> None:
    """The restricted maximum is found numerically here, and by formula in the code."""

    def statistic(difference: float) -> float:
        def negative(loss_rate: float) -> float:
            gain_rate = loss_rate + difference
            rest = 1 - gain_rate - loss_rate
            terms = ((gains, gain_rate), (losses, loss_rate), (items - gains - losses, rest))
            return -sum(n * math.log(max(p, 1e-300)) for n, p in terms if n)

        low, high = max(0.0, -difference), (1 - difference) / 2
        loss_rate = optimize.minimize_scalar(negative, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
        variance = items * (2 * loss_rate + difference - difference**2)
        return float((gains - losses - items * difference) / math.sqrt(variance))

    low, high = accuracy.tango_interval(gains, losses, items, 0.95)
    z = stats.norm.ppf(0.975)
    assert low < (gains - losses) / items < high
    assert statistic(low) == pytest.approx(z, abs=2e-3)
    assert statistic(high) == pytest.approx(-z, abs=2e-3)


def test_tango_without_flips_is_not_certainty() -> None:
    z2 = stats.norm.ppf(0.95) ** 2
    for items in (50, 198, 2000):
        assert accuracy.tango_interval(0, 0, items, 0.9) == pytest.approx(
            (-z2 / (items + z2), z2 / (items + z2)), rel=1e-4
        )


def test_tango_mirrors_when_sides_swap() -> None:
    low, high = accuracy.tango_interval(5, 17, 400, 0.95)
    assert accuracy.tango_interval(17, 5, 400, 0.95) == pytest.approx((-high, -low))
    assert accuracy.tango_interval(0, 44, 44, 0.95)[0] == -1


def test_graded_scores_get_students_interval() -> None:
    rng = np.random.default_rng(7)
    baseline, candidate = rng.random(60), rng.random(60)
    result = accuracy.compare(pairs(baseline, candidate), 0.95)
    expected = stats.ttest_rel(candidate, baseline).confidence_interval(0.95)
    assert (result.interval_low, result.interval_high) == pytest.approx((expected.low, expected.high))
    one_sided = stats.ttest_rel(candidate, baseline, alternative="greater").confidence_interval(0.95)
    assert result.lower == pytest.approx(one_sided.low)
    assert result.mcnemar_p is None


def test_identical_graded_scores_are_not_certainty() -> None:
    scores = np.full(10, 0.25)
    assert accuracy.compare(pairs(scores, scores)).lower < -0.1


def test_one_item_cannot_be_compared() -> None:
    with pytest.raises(MeasurementError, match="cannot be compared"):
        accuracy.compare(Pairs("t", "acc", (1.0,), (1.0,)))


def passes(rng: np.random.Generator, items: int, flip_rate: float, drop: float, margin: float, runs: int) -> float:
    """Share of simulated candidates with a true drop whose lower bound clears the margin."""
    losses, gains = (flip_rate + drop) / 2, (flip_rate - drop) / 2
    tables = rng.multinomial(items, [losses, gains, 1 - flip_rate], size=runs)
    cleared = [accuracy.tango_interval(int(gained), int(lost), items, 0.9)[0] > -margin for lost, gained, _ in tables]
    return float(np.mean(cleared))


@pytest.mark.parametrize(("items", "flip_rate"), [(2000, 0.03), (1319, 0.05), (400, 0.08)])
def test_a_drop_equal_to_the_margin_rarely_passes(items: int, flip_rate: float) -> None:
    rate = passes(np.random.default_rng(20), items, flip_rate, drop=0.01, margin=0.01, runs=2000)
    # 5 % with a binomial standard error of 0.5 % over 2000 runs.
    assert rate <= 0.05 + 3 * 0.005


@pytest.mark.parametrize(("items", "flip_rate"), [(2000, 0.03), (1319, 0.04), (14042, 0.04)])
def test_a_lossless_candidate_passes_with_the_promised_power(items: int, flip_rate: float) -> None:
    margin = power.detectable_margin(items, flip_rate)
    rate = passes(np.random.default_rng(21), items, flip_rate, drop=0.0, margin=margin, runs=1000)
    assert rate == pytest.approx(0.8, abs=0.05)


def test_power_matches_the_published_table() -> None:
    """At 4 % flips, one point and no drop: power 0.17 on 198 items, 0.57 on 1319."""
    for items, wanted in ((198, 0.17), (1319, 0.57)):
        error = power.paired_standard_error(items, 0.04)
        assert stats.norm.cdf(0.01 / error - stats.norm.ppf(0.95)) == pytest.approx(wanted, abs=0.02)


def test_items_needed_inverts_detectable_margin() -> None:
    for items in (150, 1319, 14042):
        assert power.items_needed(power.detectable_margin(items, 0.04), 0.04) == pytest.approx(items, abs=1)
    assert power.items_needed(0.01, 0.04, difference=-0.005) > power.items_needed(0.01, 0.04)


def test_standard_error_is_that_of_the_differences() -> None:
    change = np.array([1] * 13 + [-1] * 27 + [0] * 960)
    expected = change.std() / math.sqrt(1000)
    assert power.paired_standard_error(1000, 0.04, -0.014) == pytest.approx(expected)


@pytest.mark.parametrize(("items", "flip_rate", "difference"), [(0, 0.1, 0.0), (10, 0.1, 0.2), (10, 1.2, 0.0)])
def test_impossible_settings_are_refused(items: int, flip_rate: float, difference: float) -> None:
    with pytest.raises(ValueError, match=r"items|flip rate"):
        power.paired_standard_error(items, flip_rate, difference)


def test_a_change_on_the_margin_is_never_decided() -> None:
    with pytest.raises(ValueError, match="no number of items"):
        power.items_needed(0.01, 0.04, difference=-0.01)
