"""What a gate can tell before anything is measured, against what it then tells."""

from __future__ import annotations

import doctest
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

import quantmint.eval.gate.reach as module
from quantmint.eval import suites
from quantmint.eval.gate import Policy
from quantmint.eval.gate.reach import detectable_shift, reach
from quantmint.eval.statistics.ranks import critical_pairs, rank_test


@pytest.mark.parametrize("launches", [3, 4, 8])
def test_the_shift_is_seen_as_often_as_promised(launches: int) -> None:
    shift = detectable_shift(launches, 0.95, 0.8)
    draws = np.random.RandomState(17)
    baseline = draws.standard_normal((3000, launches))
    candidate = draws.standard_normal((3000, launches)) + shift
    values = mannwhitneyu(candidate, baseline, alternative="greater", method="exact", axis=1).pvalue
    assert np.mean(values <= 0.05 + 1e-12) == pytest.approx(0.8, abs=0.025)  # three standard errors


@pytest.mark.parametrize("launches", [3, 4])
def test_critical_pairs_are_those_of_the_exact_test(launches: int) -> None:
    """Every way to deal the ranks out: significant exactly from the critical number of pairs on."""
    critical = critical_pairs(launches, launches, 0.05)
    assert critical is not None
    ranks = range(2 * launches)
    for higher in combinations(ranks, launches):
        lower = [rank for rank in ranks if rank not in higher]
        pairs = sum(a > b for a in higher for b in lower)
        assert (rank_test(list(higher), lower) <= 0.05 + 1e-12) is (pairs >= critical)


def test_more_launches_see_less() -> None:
    shifts = [detectable_shift(launches) for launches in (3, 4, 6, 10)]
    assert shifts == sorted(shifts, reverse=True)
    with pytest.raises(ValueError, match="2 launches a side show nothing at 95% confidence"):
        detectable_shift(2)
    assert doctest.testmod(module).failed == 0


def test_launches_that_a_ratio_takes_at_the_noise_seen() -> None:
    policy = Policy(margins={}, min_ratio=1.1, launches=4)
    speed = reach(suites.load("tiny"), policy, looks=1).speed
    assert speed is not None
    assert speed.least == pytest.approx(1.1 * 1.024, abs=1e-3)
    assert (speed.seen, speed.needed) == (None, None)
    # At twice the noise three launches take 1.158, four 1.153, eight 1.131; nothing shows what is just promised.
    for seen, needed in ((1.2, 3), (1.155, 4), (1.132, 8), (1.1, None)):
        told = reach(suites.load("tiny"), policy, looks=1, noise=0.02, seen=seen).speed
        assert told is not None
        assert (told.needed, told.seen) == (needed, seen)


def test_a_suite_with_a_policy() -> None:
    suite = suites.load("core")
    told = reach(suite, Policy.for_suite(suite, margin=0.01, min_ratio=1.1, launches=4), looks=4)
    mmlu = told.tasks["mmlu"]
    assert mmlu.margin == 0.01
    assert mmlu.looks[-1] == mmlu.items == 14042
    assert len(mmlu.looks) == 4
    assert mmlu.expected is not None
    assert mmlu.looks[0] <= mmlu.expected < mmlu.items
    ifeval = told.tasks["ifeval"]
    assert (ifeval.margin, ifeval.looks, ifeval.expected) == (None, (541,), None)
    assert told.speed is not None
    assert (told.speed.launches, told.speed.fewest) == (4, 3)
    assert reach(suite, Policy.for_suite(suite, margin=0.01), looks=1).speed is None
    few = reach(suite, Policy.for_suite(suite, margin=0.01, min_ratio=1.1, launches=2), looks=1).speed
    assert few is not None
    assert few.detectable_spreads is None


def test_several_tasks_must_all_pass_and_are_priced_so() -> None:
    """Five tasks, each at the least margin that it can test: 80 % each are 33 % together."""
    suite = suites.load("core")
    task = suite.tasks[1]
    tasks = tuple(replace(task, task=f"t{n}", margin=task.detectable(looks=4)) for n in range(5))
    told = reach(replace(suite, tasks=tasks), Policy.for_suite(replace(suite, tasks=tasks), margin=0.01), looks=4)
    assert told.passes == pytest.approx(0.8**5, abs=0.02)
    assert told.false_fails == pytest.approx(1 - 0.95**5)
    (sentence,) = suites.untestable(replace(suite, tasks=tasks), margin=0.01, looks=4)
    assert sentence.startswith("a lossless checkpoint passes all 5 tasks that decide with a chance of 3")
    # No margin of a single task is enough, and no recipe may promise as little.
    assert sentence.endswith("expected 80%: widen margins, or let a task be shown only (a margin of null)")
    wider = tuple(replace(task, margin=1.5 * task.margin) for task in tasks if task.margin is not None)
    assert suites.untestable(replace(suite, tasks=wider), margin=0.01, looks=4) == ()
    assert suites.untestable(replace(suite, tasks=tasks[:1]), margin=0.01, looks=4) == ()
