"""Tango's interval against an independent likelihood, and its error rates by complete enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from quantmint.eval.statistics.paired import LOWER_CORRECTION, UPPER_CORRECTION, mcnemar, score_deviation, tango_bounds


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (5, 5), (3, 12), (30, 11)])
def test_mcnemar_is_the_exact_binomial_tail(gains: int, losses: int) -> None:
    n, k = gains + losses, min(gains, losses)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert mcnemar(gains, losses) == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize(
    ("gains", "losses", "items"), [(12, 2, 50), (2, 12, 50), (4, 9, 300), (0, 7, 200), (40, 38, 2000)]
)
def test_bounds_solve_the_corrected_score_equation(gains: int, losses: int, items: int) -> None:
    """The restricted maximum is found numerically here, and by formula in the code."""

    def statistic(difference: float, correction: float) -> float:
        def negative(loss_rate: float) -> float:
            gain_rate = loss_rate + difference
            rest = 1 - gain_rate - loss_rate
            terms = ((gains, gain_rate), (losses, loss_rate), (items - gains - losses, rest))
            return -sum(n * math.log(max(p, 1e-300)) for n, p in terms if n)

        low, high = max(0.0, -difference), (1 - difference) / 2
        loss_rate = optimize.minimize_scalar(negative, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
        variance = items * (2 * loss_rate + difference - difference**2)
        return float((gains - losses - items * difference - correction) / math.sqrt(variance))

    z = stats.norm.ppf(0.975)
    low, high = tango_bounds(gains, losses, items, z)
    assert low < (gains - losses) / items < high
    assert statistic(low, LOWER_CORRECTION) == pytest.approx(z, abs=2e-3)
    assert statistic(high, -UPPER_CORRECTION) == pytest.approx(-z, abs=2e-3)


@pytest.mark.parametrize("items", [50, 198, 2000])
def test_no_flips_are_no_certainty(items: int) -> None:
    """With no flips the statistic is (n * m - 1/2) / sqrt(n * m * (1 - m)): a quadratic in m."""
    z = stats.norm.ppf(0.95)
    low, high = tango_bounds(0, 0, items, z)
    for m, correction in ((-low, 0.5), (high, 1.0)):
        assert (items * m - correction) == pytest.approx(z * math.sqrt(items * m * (1 - m)), rel=1e-6)


def test_higher_confidence_is_wider_and_its_ends_are_finite() -> None:
    bounds = [tango_bounds(5, 17, 400, z) for z in (0.0, 0.5, 1.6, 3.0, 7.0)]
    assert [low for low, _ in bounds] == sorted((low for low, _ in bounds), reverse=True)
    assert [high for _, high in bounds] == sorted(high for _, high in bounds)
    assert bounds[-1][0] > -1
    assert bounds[-1][1] < 1
    with pytest.raises(ValueError, match="negative"):
        tango_bounds(1, 1, 10, -1.0)


def decided(items: int, margin: float, gain_rate: float, z: float) -> tuple[float, float]:
    """Exact chances of a lower bound above, an upper bound below -margin, when the true drop is the margin.

    All tables of losses and gains that are likelier than 1e-8 are counted with their trinomial probability. The bound
    is above -margin exactly where the statistic at -margin is above z, which `test_the_enumeration_...` confirms.
    """
    loss_rate = gain_rate + margin
    fewest, most = stats.binom.ppf((1e-8, 1 - 1e-8), items, loss_rate).astype(int)
    losses = np.arange(fewest, most + 1)
    gains = np.arange(int(stats.binom.ppf(1 - 1e-8, items, gain_rate)) + 1)
    lost, won = (grid.ravel() for grid in np.meshgrid(losses, gains))
    lost, won = lost[lost + won <= items], won[lost + won <= items]
    chance = stats.binom.pmf(lost, items, loss_rate)
    chance *= stats.binom.pmf(won, items - lost, gain_rate / (1 - loss_rate))
    excess, deviation = won - lost + items * margin, score_deviation(won, lost, items, -margin)
    passes, fails = excess - LOWER_CORRECTION > z * deviation, excess + UPPER_CORRECTION < -z * deviation
    return float(chance[passes].sum()), float(chance[fails].sum())


GAIN_RATES = (0.0, 1e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.015, 0.03, 0.06)


@pytest.mark.slow
@pytest.mark.parametrize("items", [50, 75, 100, 150, 198, 250, 400, 541, 1000, 1319])
def test_exact_error_rates_never_exceed_five_percent(items: int) -> None:
    """Not simulated: at a drop of exactly the margin, for margins of 0.3 to 12 points and from no gains to many."""
    z = stats.norm.ppf(0.95)
    rates = [decided(items, margin, gain, z) for margin in np.geomspace(0.003, 0.12, 40) for gain in GAIN_RATES]
    passes, fails = np.max(rates, axis=0)
    assert passes <= 0.05
    assert fails <= 0.05
    # Far from needlessly careful, too: some designs use most of the error that they may make.
    assert max(passes, fails) > 0.035


def test_the_enumeration_asks_what_the_gate_asks() -> None:
    rng = np.random.default_rng(4)
    z = stats.norm.ppf(0.95)
    seen = set()
    for _ in range(300):
        items = int(rng.integers(50, 2000))
        losses, gains = rng.integers(0, 40, 2)
        margin = float(rng.uniform(0.001, 0.05))
        low, high = tango_bounds(gains, losses, items, z)
        excess, deviation = gains - losses + items * margin, score_deviation(gains, losses, items, -margin)
        assert (low > -margin) == (excess - LOWER_CORRECTION > z * deviation)
        assert (high < -margin) == (excess + UPPER_CORRECTION < -z * deviation)
        seen.add((low > -margin, high < -margin))
    assert seen == {(True, False), (False, True), (False, False)}
