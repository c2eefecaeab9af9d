"""Intervals of means, ratios and recoveries: closed forms, and how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from quantmint.eval import accuracy
from quantmint.eval.statistics import paired
from quantmint.eval.statistics.paired import recovery
from tests.eval.statistics.designs import asked, tolerated


def test_ratio_of_single_items_is_an_ordinary_mean() -> None:
    values = np.random.default_rng(0).normal(size=40)
    result = paired.ratio(values, np.ones(40))
    assert (result.value, result.standard_error) == pytest.approx((values.mean(), stats.sem(values)))
    with pytest.raises(ValueError, match="two units"):
        paired.ratio(np.ones(1), np.ones(1))


def test_clustered_standard_error_is_the_double_sum() -> None:
    """Miller's formula (arXiv 2411.00640, section 2.2): products of residuals within a cluster, with G / (G - 1)."""
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(12), 6)
    change = rng.normal(size=12)[clusters] + rng.normal(size=72)
    result = paired.change(asked(np.zeros(72), change, clusters=clusters, weights=np.ones(72), kind="perplexity"))
    residual = change - change.mean()
    together = clusters[:, None] == clusters[None, :]
    expected = np.sqrt((residual[:, None] * residual[None, :] * together).sum() * 12 / 11) / 72
    assert result.standard_error == pytest.approx(expected)
    # Johnson's correction lies on the side of the longer tail alone.
    skewed = stats.skew(np.bincount(clusters, residual))
    side = int(skewed > 0)
    t = stats.t.ppf(0.95, 11) * expected
    low, high = result.bounds(0.95)
    assert (low, high)[1 - side] == pytest.approx(change.mean() + (t, -t)[side])
    assert abs((low, high)[side] - change.mean()) > 1.05 * t
    assert result.method == "cluster-robust t with skewness, weighted by words"


def test_graded_scores_that_move_by_whole_points_have_tangos_bounds() -> None:
    """One item scored a half on both sides tells nothing: it must not change the interval of the others."""
    baseline = np.repeat([1.0, 0.0], [300, 100])
    for lost, won in ((1, 0), (0, 0), (9, 4), (30, 50)):
        candidate = baseline.copy()
        candidate[:lost], candidate[400 - won :] = 0, 1
        whole = paired.change(asked(baseline, candidate))
        halved = paired.change(asked(np.append(baseline[1:], 0.5), np.append(candidate[1:], 0.5)))
        whole_too = paired.change(asked(np.append(baseline[1:], 1.0), np.append(candidate[1:], 1.0)))
        assert (whole.kind, halved.kind) == ("binary", "graded")
        for confidence in (0.95, 0.99999):
            assert halved.bounds(confidence) == pytest.approx(whole_too.bounds(confidence), abs=1e-9)


def test_the_graded_deviation_is_the_likeliest_distributions() -> None:
    """Found numerically here: weights of the changes seen, and of a full point, whose mean is the difference."""
    changes = np.array([-0.4, -0.1, 0.0, 0.3])
    counts = np.array([3, 2, 30, 5])
    support = np.append(changes, (-1.0, 1.0))
    for difference in (-0.2, -0.03, 0.02, 0.15):
        free = optimize.minimize(
            lambda p: -np.sum(counts * np.log(np.maximum(p[:4], 1e-12))),
            np.full(6, 1 / 6),
            bounds=[(0, 1)] * 6,
            constraints=[
                {"type": "eq", "fun": lambda p: p.sum() - 1},
                {"type": "eq", "fun": lambda p, difference=difference: p @ support - difference},
            ],
            options={"ftol": 1e-12, "maxiter": 1000},
        ).x
        expected = np.sqrt(free @ (support - difference) ** 2)
        assert float(paired.graded_deviation(changes, counts, difference)) == pytest.approx(expected, rel=2e-3)


def test_few_passages_that_hold_most_items_are_few_items() -> None:
    sizes = np.array([200.0] * 3 + [10.0] * 60)
    nothing = paired.design_effect(np.zeros(63), np.zeros(63), sizes)
    # The mean item's passage has 105 items, as many as of passages of 105 are 11.
    assert nothing.factor == pytest.approx(105)
    assert nothing.freedom < 4
    clusters = np.repeat(np.arange(63), sizes.astype(int))
    baseline = (np.arange(1200) % 4 > 0).astype(float)
    candidate = np.where(np.arange(1200) % 40 == 1, 0.0, baseline)
    spread = paired.change(asked(baseline, candidate, clusters=clusters))
    assert spread.effect is not None
    assert 1 < spread.effect.factor < 10  # losses that come one by one are seen to
    together = paired.change(asked(baseline, np.where(clusters == 7, 0.0, baseline), clusters=clusters))
    assert together.effect is not None
    assert together.effect.factor > 90


def test_perplexity_is_weighted_by_words() -> None:
    """Two models on three documents, by hand; the error is the linearised one of a ratio of sums."""
    words = np.array([100.0, 300.0, 50.0])
    baseline, candidate = -words * [2.0, 1.9, 2.2], -words * [2.1, 1.9, 2.4]
    result = accuracy.compare(asked(baseline, candidate, weights=words, kind="perplexity"))
    assert result.baseline == pytest.approx(np.exp((200 + 570 + 110) / 450))
    assert result.candidate == pytest.approx(np.exp((210 + 570 + 120) / 450))
    assert result.difference == pytest.approx(-20 / 450)
    residual = np.array([-10, 0, -10]) + 20 / 450 * words
    assert result.standard_error == pytest.approx(np.sqrt(1.5 * (residual**2).sum()) / 450)
    assert result.recovery == pytest.approx(result.baseline / result.candidate)
    assert (result.gains, result.losses, result.kind) == (0, 2, "perplexity")


def coverage(rng: np.random.Generator, runs: int, items: int, losses: float, gains: float, passage: int = 1) -> float:
    """How often the two-sided interval of the recovery holds the true value, 0/1 scores."""
    held = 0
    for _ in range(runs):
        clusters = np.arange(items) // passage
        right = rng.random(items) < 0.7
        flipped = rng.random(clusters.max() + 1)[clusters]
        baseline = right.astype(float)
        candidate = np.where(right, flipped >= losses / 0.7, flipped < gains / 0.3).astype(float)
        _, low, high = recovery(paired.change(asked(baseline, candidate, clusters=clusters)), 0.9)
        assert low is not None
        assert high is not None
        held += low <= (0.7 + gains - losses) / 0.7 <= high
    return held / runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("items", "losses", "gains", "passage"), [(1319, 0.03, 0.015, 1), (400, 0.06, 0.06, 1), (600, 0.08, 0.02, 3)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(items: int, losses: float, gains: float, passage: int) -> None:
    runs = 500
    held = coverage(np.random.default_rng(items), runs, items, losses, gains, passage)
    # Its error is raised to Tango's.
    assert 0.90 - tolerated(0.9, runs) <= held <= 0.96 + tolerated(0.9, runs)


def test_no_flips_are_no_certainty() -> None:
    baseline = (np.arange(300) % 3 > 0).astype(float)
    result = accuracy.compare(asked(baseline, baseline))
    assert result.lower < 0 < result.upper
    assert result.recovery == 1
    assert result.recovery_low is not None
    assert result.recovery_high is not None
    assert result.recovery_low < 0.99
    assert result.recovery_high > 1.01


def test_recovery_of_a_baseline_near_zero_has_no_bounds() -> None:
    baseline = np.zeros(100)
    assert recovery(paired.change(asked(baseline, baseline)), 0.95) == (None, None, None)
    baseline[0] = 1
    assert recovery(paired.change(asked(baseline, np.zeros(100))), 0.95) == (0.0, None, None)


def test_recovery_is_fiellers_interval() -> None:
    """Both ends solve |candidate - r * baseline| = t * standard error of that difference, for many items."""
    rng = np.random.default_rng(8)
    baseline = rng.random(20_000)
    candidate = 0.9 * baseline + rng.uniform(0, 0.1, 20_000)
    for end in recovery(paired.change(asked(baseline, candidate)), 0.95)[1:]:
        residual = candidate - end * baseline
        assert abs(residual.mean()) == pytest.approx(stats.t.ppf(0.975, 19_999) * stats.sem(residual), rel=0.15)


def test_a_broken_models_perplexity_is_a_number() -> None:
    words = np.array([10.0, 12.0, 9.0])
    result = accuracy.compare(asked(-2 * words, -5000 * words * [1, 2, 3], weights=words, kind="perplexity"))
    assert result.candidate == pytest.approx(np.exp(700))
    assert result.recovery == pytest.approx(0)
    assert np.isfinite([result.recovery_high, result.lower, result.upper]).all()
