"""The rule that stops an evaluation and judges it: one and the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quantmint.eval import accuracy
from quantmint.eval.errors import MeasurementError
from quantmint.eval.samples import Pairs
from quantmint.eval.statistics.sequential import LEAST_ITEMS, boundary, decide, plan_looks, until
from tests.eval.statistics.designs import asked


def scores(items: int, *, losses: int, gains: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(seed).permutation(items)
    baseline = (np.arange(items) < items // 2).astype(float)
    candidate = baseline.copy()
    candidate[:losses] = 0
    candidate[items - gains :] = 1
    return baseline[order], candidate[order]


def test_looks_are_equal_steps_and_none_is_tiny() -> None:
    assert plan_looks(14042, 4) == (3511, 7021, 10532, 14042)
    assert plan_looks(62, 4) == (62,)
    assert plan_looks(1, 1) == (1,)
    for items in (99, 100, 198, 201, 1319):
        for looks in (1, 2, 4, 20):
            seen = plan_looks(items, looks)
            assert seen[-1] == items
            assert len(seen) <= looks
            assert len(seen) == 1 or min(np.diff((0, *seen))) >= LEAST_ITEMS - 1
    with pytest.raises(ValueError, match="cannot be planned"):
        plan_looks(0, 4)


def test_a_single_look_is_the_fixed_test() -> None:
    pairs = asked(*scores(800, losses=20, gains=14))
    (look,) = decide(pairs, 0.02, 0.95)
    fixed = accuracy.compare(pairs, 0.95)
    assert (look.lower, look.upper, look.bound_confidence) == (fixed.lower, fixed.upper, 0.95)
    assert (look.items, look.information) == (800, 1.0)


def test_clear_cases_stop_early_and_what_follows_is_not_looked_at() -> None:
    pairs = asked(*scores(4000, losses=700, gains=10), looks=4)
    looks = decide(pairs, 0.02, 0.95)
    assert [look.decision for look in looks] == ["FAIL"]
    assert looks[0].items == 1000
    # The candidate turns out well in all that was asked later: it changes nothing.
    better = [b if look else c for b, c, look in zip(pairs.baseline, pairs.candidate, pairs.looks, strict=True)]
    assert decide(dataclasses.replace(pairs, candidate=tuple(better)), 0.02, 0.95) == looks
    assert decide(until(pairs, 0), 0.02, 0.95) == looks


def test_each_look_has_the_bounds_of_its_items_at_its_level() -> None:
    pairs = asked(*scores(2000, losses=45, gains=27), looks=4)
    looks = decide(pairs, 0.0145, 0.95)
    assert [look.items for look in looks] == list(plan_looks(2000, 4))[: len(looks)]
    assert len(looks) > 1
    levels = boundary([0.25, 0.5, 0.75, 1.0], 0.95)
    for number, (look, level) in enumerate(zip(looks, levels, strict=False)):
        result = accuracy.compare(until(pairs, number), 0.95, bound_confidence=look.bound_confidence)
        assert look.bound_confidence == pytest.approx(level)
        assert (look.lower, look.upper) == (result.lower, result.upper)
        assert result.planned == 2000
    assert [look.decision for look in looks[:-1]] == ["GO ON"] * (len(looks) - 1)


def test_an_evaluation_that_was_stopped_is_not_decided() -> None:
    pairs = until(asked(*scores(2000, losses=45, gains=27), looks=4), 1)
    looks = decide(pairs, 0.0145, 0.95)
    assert [look.decision for look in looks] == ["GO ON", "GO ON"]
    assert looks[-1].information == 0.5


def test_unequal_batches_spend_by_their_items() -> None:
    pairs = asked(*scores(1000, losses=20, gains=20))
    pairs = dataclasses.replace(pairs, looks=tuple(0 if n < 300 else 1 if n < 420 else 2 for n in range(1000)))
    looks = decide(pairs, 0.001, 0.95)
    assert [look.information for look in looks] == [0.3, 0.42, 1.0]
    assert [look.bound_confidence for look in looks] == list(boundary([0.3, 0.42, 1.0], 0.95))


def test_more_items_than_planned_spend_what_is_left() -> None:
    pairs = dataclasses.replace(asked(*scores(1000, losses=20, gains=20), looks=2), planned=900)
    looks = decide(pairs, 0.001, 0.95)
    assert looks[-1].information == pytest.approx(1000 / 900)
    too_late = dataclasses.replace(pairs, planned=400)
    with pytest.raises(MeasurementError, match="reach 1 at the last look only"):
        decide(too_late, 0.001, 0.95)


def test_a_look_without_items_is_refused() -> None:
    pairs = dataclasses.replace(asked(*scores(100, losses=2, gains=2)), looks=(0,) * 50 + (2,) * 50)
    with pytest.raises(MeasurementError, match="brought no items"):
        decide(pairs, 0.1, 0.95)


def test_a_perplexity_is_decided_by_its_margin_in_nats() -> None:
    words = np.full(200, 500.0)
    baseline = -2.0 * words + np.random.default_rng(1).normal(0, 30, 200)
    pairs = asked(baseline, baseline - 0.03 * words, looks=4, weights=words, kind="perplexity")
    assert decide(pairs, accuracy.margin_in_units("perplexity", 0.02), 0.95)[0].decision == "FAIL"
    assert decide(pairs, accuracy.margin_in_units("perplexity", 0.04), 0.95)[0].decision == "PASS"


def test_pairs_that_are_empty_are_refused() -> None:
    with pytest.raises(MeasurementError):
        decide(Pairs("t", "m", (), ()), 0.01, 0.95)
