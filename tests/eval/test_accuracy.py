"""What is said about one task: each number by hand, or against another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from quantmint.eval import accuracy
from quantmint.eval.errors import MeasurementError
from quantmint.eval.samples import Pairs
from quantmint.eval.statistics.paired import tango_bounds


def pairs(baseline: np.ndarray, candidate: np.ndarray) -> Pairs:
    return Pairs("t", "acc", tuple(map(float, baseline)), tuple(map(float, candidate)))


def test_numbers_of_a_small_table_by_hand() -> None:
    # 3 kept right, 2 lost, 1 gained, 4 kept wrong.
    result = accuracy.compare(pairs(np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0]), np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0])))
    assert (result.items, result.planned, result.clusters, result.kind) == (10, 10, None, "binary")
    assert (result.baseline, result.candidate) == (0.5, 0.4)
    assert (result.losses, result.gains, result.flip_rate) == (2, 1, 0.3)
    assert result.difference == pytest.approx(-0.1)
    assert result.recovery == pytest.approx(0.8)
    # Sample variance of (-1, -1, +1, 0 x 7) about -0.1: (3 - 10 * 0.01) / 9.
    assert result.standard_error == pytest.approx(math.sqrt((3 - 0.1) / 9 / 10))
    assert result.mcnemar_p == pytest.approx(2 * (0.5**3 + 3 * 0.5**3))
    assert result.method == "Tango score interval"
    assert (result.lower, result.upper) == pytest.approx(tango_bounds(1, 2, 10, stats.norm.ppf(0.95)))
    assert (result.interval_low, result.interval_high) == pytest.approx(tango_bounds(1, 2, 10, stats.norm.ppf(0.975)))


def test_bounds_of_an_early_look_are_wider_and_the_interval_stays() -> None:
    scores = np.array([1, 1, 0, 1, 0] * 40), np.array([1, 1, 0, 1, 1] * 30 + [1, 0, 0, 1, 0] * 10)
    fixed = accuracy.compare(pairs(*scores), 0.95)
    early = accuracy.compare(pairs(*scores), 0.95, bound_confidence=0.999)
    assert (fixed.bound_confidence, early.bound_confidence) == (0.95, 0.999)
    assert early.lower < fixed.lower < fixed.upper < early.upper
    assert (early.interval_low, early.recovery_low) == (fixed.interval_low, fixed.recovery_low)


def test_graded_scores_of_many_items_get_about_students_interval() -> None:
    rng = np.random.default_rng(7)
    baseline, candidate = rng.random(6000), rng.random(6000)
    result = accuracy.compare(pairs(baseline, candidate), 0.95)
    expected = stats.ttest_rel(candidate, baseline).confidence_interval(0.95)
    near = 0.03 * (expected.high - expected.low)
    assert (result.interval_low, result.interval_high) == pytest.approx((expected.low, expected.high), abs=near)
    one_sided = stats.ttest_rel(candidate, baseline, alternative="greater").confidence_interval(0.95)
    assert result.lower == pytest.approx(one_sided.low, abs=near)
    assert (result.mcnemar_p, result.kind, result.method) == (None, "graded", "score interval")


def test_identical_graded_scores_are_not_certainty() -> None:
    scores = np.full(10, 0.25)
    assert accuracy.compare(pairs(scores, scores)).lower < -0.1


def test_items_that_share_passages_widen_the_bounds() -> None:
    """Ten questions a passage, all of them lost together in six passages of sixty."""
    baseline = np.ones(600)
    candidate = np.where(np.arange(600) < 60, 0.0, 1.0)
    alone = pairs(baseline, candidate)
    shared = Pairs("t", "acc", alone.baseline, alone.candidate, clusters=tuple(str(n // 10) for n in range(600)))
    apart, together = accuracy.compare(alone), accuracy.compare(shared)
    assert (apart.clusters, together.clusters) == (None, 60)
    assert apart.difference == together.difference
    assert together.standard_error == pytest.approx(apart.standard_error * math.sqrt(10), rel=0.02)
    assert together.lower < apart.lower < apart.upper < together.upper
    assert together.method == "Tango score interval, effective counts of clusters"


@pytest.mark.parametrize(
    "alone",
    [
        Pairs("t", "acc", (1.0,), (1.0,)),
        Pairs("t", "acc", (1.0, 0.0), (1.0, 1.0), clusters=("same", "same")),
        Pairs("t", "ppl", (-9.0,), (-8.0,), "perplexity", weights=(4.0,)),
    ],
)
def test_one_unit_cannot_be_compared(alone: Pairs) -> None:
    with pytest.raises(MeasurementError, match="cannot be compared"):
        accuracy.compare(alone)


def test_margins_have_the_units_of_the_difference() -> None:
    assert accuracy.margin_in_units("binary", 0.01) == accuracy.margin_in_units("graded", 0.01) == 0.01
    # Two per cent more perplexity, said in nats, is two per cent more perplexity.
    baseline = 7.06
    assert baseline * math.exp(accuracy.margin_in_units("perplexity", 0.02)) == pytest.approx(1.02 * baseline)
