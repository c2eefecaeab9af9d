"""One candidate against another: on the same items, whatever each lost against the baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval.accuracy import compare
from eval.comparison.direct import compare_all, word
from eval.samples import SampleSet, pair
from tests.checkpoints import answers


def losing(first: int, count: int, items: int = 1000) -> SampleSet:
    return answers("facts", [float(not first <= number < first + count) for number in range(items)])


def test_equal_scores_on_other_items_are_no_difference_but_many_flips() -> None:
    (direct,) = compare_all({0: {"facts": losing(0, 50)}, 1: {"facts": losing(500, 50)}})
    (result,) = direct.results
    assert (result.difference, result.gains, result.losses) == (0.0, 50, 50)
    assert word(result) == "no difference shown"


def test_nested_losses_are_told_apart_where_the_baseline_cannot() -> None:
    base = losing(0, 0)
    less, more = losing(0, 40), losing(0, 52)
    apart = [compare(pair(base, side)) for side in (less, more)]
    assert apart[0].interval_low < apart[1].interval_high  # the two differences to the baseline overlap
    (direct,) = compare_all({0: {"facts": less}, 1: {"facts": more}})
    assert word(direct.results[0]) == "worse"
    assert direct.results[0] == compare(pair(less, more))


def test_intervals_hold_together() -> None:
    sides = {number: {"facts": losing(0, 10 * number), "sums": answers("sums", [1, 0] * 50)} for number in range(3)}
    found = [result for direct in compare_all(sides, 0.95) for result in direct.results]
    assert len(found) == 6
    assert [result.confidence for result in found] == [pytest.approx(1 - 0.05 / 6)] * 6


def test_a_candidate_that_stopped_early_is_compared_on_what_both_were_asked() -> None:
    early = losing(0, 20)
    rows = tuple(replace(sample, look=sample.doc_id // 250) for sample in early.samples)
    whole = replace(early, samples=rows, planned=1000, looks=4)
    half = replace(whole, samples=rows[:500])
    (direct,) = compare_all({0: {"facts": whole}, 1: {"facts": half}})
    assert (direct.results[0].items, direct.unknown) == (500, ())


def test_other_questions_are_not_compared() -> None:
    other = losing(0, 5)
    other = replace(other, samples=tuple(replace(s, prompt_hash="x") for s in other.samples))
    (direct,) = compare_all({0: {"facts": losing(0, 5)}, 1: {"facts": other}})
    assert direct.results == ()
    assert "the prompt differs in 1000 of 1000 items" in direct.unknown[0]


def test_tasks_of_one_side_only_are_left_out() -> None:
    (direct,) = compare_all({0: {"facts": losing(0, 5)}, 2: {"sums": answers("sums", [1, 0])}})
    assert (direct.first, direct.second, direct.results, direct.unknown) == (0, 2, (), ())
