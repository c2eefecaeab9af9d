"""Student's t on logarithms of throughputs against SciPy, and against a shift between two days."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from quantmint.eval.statistics.means import are_alike, day_difference

RNG = np.random.default_rng(8)
CANDIDATE, BASELINE, REUSED = (RNG.normal(middle, 2, 4).tolist() for middle in (112, 100, 100))


def test_without_reused_launches_it_is_welchs_test() -> None:
    logs = np.log(CANDIDATE), np.log(BASELINE)
    expected = stats.ttest_ind(*logs, equal_var=False, alternative="greater")
    found = day_difference(CANDIDATE, BASELINE, ())
    assert found.p_above() == pytest.approx(expected.pvalue)
    shifted = stats.ttest_ind(logs[0] - math.log(1.1), logs[1], equal_var=False, alternative="greater")
    assert found.p_above(1.1) == pytest.approx(shifted.pvalue)
    both = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.9)
    assert found.bounds(0.95) == pytest.approx((math.exp(both.low), math.exp(both.high)))


def test_a_shift_of_the_reused_launches_changes_nothing() -> None:
    found = day_difference(CANDIDATE, BASELINE[:2], REUSED)
    later = day_difference(CANDIDATE, BASELINE[:2], [1.3 * value for value in REUSED])
    assert later.bounds(0.95) == pytest.approx(found.bounds(0.95))
    assert later.p_above(1.1) == pytest.approx(found.p_above(1.1))
    assert found.freedom > day_difference(CANDIDATE, BASELINE[:2], ()).freedom


def test_equal_values_have_no_spread() -> None:
    found = day_difference([150.0] * 4, [100.0, 100.0], [99.0, 99.0])
    assert found.bounds(0.95) == pytest.approx((1.5, 1.5))
    assert [found.p_above(ratio) for ratio in (1.4, 1.5, 1.6)] == [0, 0.5, 1]


@pytest.mark.parametrize("factor", [1.0, 1.02, 1.05, 0.9])
def test_launches_are_alike_by_students_test(factor: float) -> None:
    now = [factor * value for value in BASELINE[:3]]
    for alpha in (0.01, 0.05, 0.2):
        expected = stats.ttest_ind(np.log(REUSED), np.log(now)).pvalue > alpha
        assert are_alike(REUSED, now, alpha) is bool(expected)
    assert are_alike([100.0, 100.0], [100.0, 100.0], 0.05)
    assert not are_alike([100.0, 100.0], [99.0, 99.0], 0.05)


def test_one_value_has_no_spread() -> None:
    with pytest.raises(ValueError, match="have no spread"):
        are_alike([1.0], [1.0], 0.05)
    with pytest.raises(ValueError, match=r"1 and 1 \+ 0 launches have no spread"):
        day_difference([1.0], [1.0], ())
