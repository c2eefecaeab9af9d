"""Boundaries against published tables and against a random walk."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from quantmint.eval.statistics.sequential import boundary, crossing, inflation, spent

# Lan-DeMets, O'Brien-Fleming type, one-sided 0.025, equal looks: Reboussin, DeMets, Kim and Lan, "Computations for
# group sequential boundaries using the Lan-DeMets spending function method", Controlled Clinical Trials 21 (2000);
# the same numbers come from R's ldbounds and gsDesign (sfLDOF).
PUBLISHED = {
    2: (2.9626, 1.9686),
    3: (3.7103, 2.5114, 1.9930),
    4: (4.3326, 2.9631, 2.3590, 2.0141),
    5: (4.8769, 3.3569, 2.6803, 2.2898, 2.0310),
}


@pytest.mark.parametrize("looks", PUBLISHED)
def test_boundaries_are_the_published_ones(looks: int) -> None:
    levels = boundary([(number + 1) / looks for number in range(looks)], 0.975)
    assert stats.norm.ppf(levels) == pytest.approx(PUBLISHED[looks], abs=1.5e-4)


def test_one_look_is_the_fixed_test() -> None:
    for confidence in (0.5, 0.8, 0.95, 0.999):
        assert boundary([1.0], confidence) == (confidence,)


def walk(rng: np.random.Generator, information: list[float], drift: float, runs: int) -> np.ndarray:
    """The statistic Z at each look, shape (runs, looks)."""
    steps = np.diff([0.0, *information])
    position = np.cumsum(rng.normal(drift * steps, np.sqrt(steps), size=(runs, len(steps))), axis=1)
    return np.asarray(position / np.sqrt(information))


@pytest.mark.parametrize("information", [[0.25, 0.5, 0.75, 1.0], [0.1, 0.15, 0.6, 1.0], [0.3, 0.9, 1.12], [0.4, 0.7]])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_all_looks_together_spend_what_they_may(information: list[float], confidence: float) -> None:
    """Unequal steps, more items than planned, an evaluation that ends early: the error is spent by its information."""
    runs = 400_000
    z = walk(np.random.default_rng(11), information, 0.0, runs)
    limits = stats.norm.ppf(boundary(information, confidence))
    crossed = np.maximum.accumulate(z > limits, axis=1).mean(axis=0)
    allowed = [spent(fraction, 1 - confidence) for fraction in information]
    error = np.sqrt(np.array(allowed) / runs)
    assert np.all(np.abs(crossed - allowed) <= 4 * error + 1e-6)


@pytest.mark.parametrize("drift", [0.0, 1.3, 2.5])
def test_chances_of_crossing_are_those_of_a_random_walk(drift: float) -> None:
    information, runs = [0.2, 0.5, 0.8, 1.0], 400_000
    z = walk(np.random.default_rng(12), information, drift, runs)
    limits = stats.norm.ppf(boundary(information, 0.95))
    outside = np.abs(z) > limits
    first = np.where(outside.any(axis=1), outside.argmax(axis=1), -1)
    sign = np.sign(z[np.arange(runs), first])
    for look, chances in enumerate(crossing(information, 0.95, drift)):
        seen = [((first == look) & (sign == side)).mean() for side in (1, -1)]
        assert seen == pytest.approx(chances, abs=4 * np.sqrt(0.25 / runs))


def test_integration_does_not_depend_on_the_grid() -> None:
    """A step of almost no information asks for a fine grid: the limit is the look before it."""
    levels = boundary([0.5, 0.5005, 1.0], 0.95)
    assert levels[2] == pytest.approx(boundary([0.5, 1.0], 0.95)[1], abs=2e-5)


def test_twenty_looks_have_finite_levels_that_fall() -> None:
    levels = boundary([(number + 1) / 20 for number in range(20)], 0.95)
    assert all(0.95 < later <= earlier < 1 for earlier, later in pairwise(levels))


def test_inflation_is_what_keeps_the_power() -> None:
    assert inflation(1, 0.95, 0.8) == 1
    for looks in (2, 4, 8):
        drift = (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) * np.sqrt(inflation(looks, 0.95, 0.8))
        information = [(number + 1) / looks for number in range(looks)]
        z = walk(np.random.default_rng(13), information, drift, 200_000)
        passed = (z > stats.norm.ppf(boundary(information, 0.95))).any(axis=1).mean()
        assert passed == pytest.approx(0.8, abs=4 * np.sqrt(0.16 / 200_000))
    assert 1 < inflation(2, 0.95, 0.8) < inflation(4, 0.95, 0.8) < 1.05


@pytest.mark.parametrize("information", [[], [0.0, 1.0], [0.5, 0.5, 1.0], [0.5, 0.4], [1.0, 1.2]])
def test_impossible_information_is_refused(information: list[float]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        boundary(information, 0.95)


def test_impossible_confidence_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        boundary([0.5, 1.0], 1.0)
