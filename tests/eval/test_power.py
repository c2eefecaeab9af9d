"""Sizes and margins against the error formula, each other, and published ones. Simulations: tests/eval/statistics."""

from __future__ import annotations

import doctest
import math
from types import ModuleType

import pytest
from scipy import stats

from quantmint.eval import accuracy, power
from quantmint.eval.samples import Pairs
from quantmint.eval.statistics import paired, ranks, sequential
from quantmint.eval.statistics.sequential import inflation


def result(items: int, losses: int, gains: int, clusters: tuple[str, ...] = ()) -> accuracy.Accuracy:
    baseline = [float(n < items // 2) for n in range(items)]
    candidate = [0.0 if n < losses else 1.0 if n >= items - gains else score for n, score in enumerate(baseline)]
    return accuracy.compare(Pairs("t", "acc", tuple(baseline), tuple(candidate), clusters=clusters))


def test_large_suites_approach_the_textbook_margin() -> None:
    """(z + z) * SE: what Tango's variance and the correction add disappears as the margin becomes small."""
    textbook = (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) * math.sqrt(0.04 / 1_000_000)
    assert power.detectable_margin(1_000_000, 0.04) == pytest.approx(textbook, rel=0.005)
    assert power.detectable_margin(1319, 0.04) > (stats.norm.ppf(0.95) + stats.norm.ppf(0.8)) * math.sqrt(0.04 / 1319)


@pytest.mark.parametrize("looks", [1, 4])
def test_items_needed_inverts_detectable_margin(looks: int) -> None:
    for items in (250, 1319, 14042):
        margin = power.detectable_margin(items, 0.04, looks=looks)
        assert power.items_needed(margin, 0.04, looks=looks) == pytest.approx(items, abs=1)
    assert power.items_needed(0.01, 0.04, difference=-0.005) > power.items_needed(0.01, 0.04)


def test_looks_cost_what_the_boundary_inflates() -> None:
    one, four = power.items_needed(0.01, 0.04), power.items_needed(0.01, 0.04, looks=4)
    assert four / one == pytest.approx(inflation(4, 0.95, 0.8), abs=0.003)
    # A task too small for looks of its own pays nothing for them.
    assert power.detectable_margin(60, 0.04, looks=4) == power.detectable_margin(60, 0.04)


def test_few_items_can_test_no_margin() -> None:
    assert power.detectable_margin(1, 0.9) == 1.0
    assert power.detectable_mean(1, 0.02) == math.inf


def test_means_of_documents() -> None:
    """Student's quantile for the bound and what unequal documents take of it, the normal's for the power."""
    expected = (stats.t.ppf(0.95, 61) + 6 / math.sqrt(62) + stats.norm.ppf(0.8)) * 0.02 / math.sqrt(62)
    assert power.detectable_mean(62, 0.02) == pytest.approx(expected)
    for deviation in (0.01, 0.02, 0.3):
        needed = power.mean_items_needed(0.02, deviation)
        assert power.detectable_mean(needed, deviation) <= 0.02 < power.detectable_mean(needed - 1, deviation)
    with pytest.raises(ValueError, match="above 0"):
        power.mean_items_needed(0.0, 0.02)


def test_more_items_are_those_of_a_larger_evaluation_less_these() -> None:
    shown = result(2000, 38, 22)
    more = power.more_items(shown, 0.01)
    assert more == power.items_needed(0.01, 0.03, difference=shown.difference) - 2000
    assert more > 10_000
    assert power.more_items(result(2000, 40, 20), 0.01) is None
    # Nothing flipped: the expected rate stands in.
    assert power.more_items(result(300, 0, 0), 0.01, expected_flip_rate=0.03) == power.items_needed(0.01, 0.03) - 300
    # Enough for the power that was asked for, and yet undecided: at least one.
    assert power.more_items(result(2000, 90, 0), 0.001) == 1


def test_more_items_of_shared_passages_are_more() -> None:
    clusters = tuple(str(n // 4) for n in range(2000))
    alone, shared = power.more_items(result(2000, 38, 22), 0.01), power.more_items(result(2000, 38, 22, clusters), 0.01)
    assert alone is not None
    assert shared is not None
    assert shared > 2 * alone


def test_one_look_asks_everything_and_four_save_on_both_sides_of_the_margin() -> None:
    assert power.outcome(2000, 1, 0.01, 0.03).items == 2000
    good = power.outcome(2000, 4, 0.02, 0.04)
    bad = power.outcome(2000, 4, 0.02, 0.04, difference=-0.04)
    assert max(good.items, bad.items) < power.outcome(2000, 4, 0.02, 0.04, difference=-0.02).items <= 2000
    assert good.passes + bad.fails > 1.9


def test_what_is_detectable_passes_as_often_as_promised() -> None:
    """Two ways to the same: the size's formula, and the looks' chances one after the other."""
    for items, looks in ((400, 1), (1319, 4), (14042, 4)):
        for promised in (0.8, 0.9):
            margin = power.detectable_margin(items, 0.04, power=promised, looks=looks)
            assert power.outcome(items, looks, margin, 0.04).passes == pytest.approx(promised, abs=0.01)
            reachable = power.detectable_mean(items, 0.02, power=promised)
            assert power.mean_passes(items, reachable, 0.02) == pytest.approx(promised)
    assert power.mean_passes(1, 0.5, 0.02) == 0


def test_fewer_flips_than_decide_are_reckoned_with_as_such() -> None:
    """One flip expected of 400 items: a margin for so few passes 73 % of lossless candidates, not 80 %."""
    few = power.detectable_margin(400, 0.0005)
    assert few == pytest.approx(power.detectable_margin(400, 1.2 / 400))
    assert few < power.detectable_margin(400, 0.004)
    assert power.items_needed(few, 0.0005) == pytest.approx(400, abs=1)


@pytest.mark.parametrize(("items", "flip_rate", "difference"), [(0, 0.1, 0.0), (10, 0.1, 0.2), (10, 1.2, 0.0)])
def test_impossible_settings_are_refused(items: int, flip_rate: float, difference: float) -> None:
    with pytest.raises(ValueError, match=r"items|flip rate"):
        power.paired_standard_error(items, flip_rate, difference)


def test_a_change_on_the_margin_is_never_decided() -> None:
    with pytest.raises(ValueError, match="no number of items"):
        power.items_needed(0.01, 0.04, difference=-0.01)
    with pytest.raises(ValueError, match="outside"):
        power.items_needed(0.01, 0.04, power=1.0)


@pytest.mark.parametrize("module", [power, paired, ranks, sequential])
def test_examples(module: ModuleType) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed
