"""Which checkpoints nothing beats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eval.comparison.front import Score, dominates, front

HERE, THERE = ("mi300x", "AMD Instinct MI300X", "vllm"), ("h100", "NVIDIA H100 80GB HBM3", "vllm")
shares = st.sampled_from([0.9, 0.95, 1.0])
scores = st.builds(Score, shares, shares, st.one_of(st.none(), shares), st.sampled_from([HERE, THERE]))


def test_worse_everywhere_is_beaten_and_a_trade_is_not() -> None:
    small, fast, bad = Score(0.97, 0.3, 1.2, HERE), Score(0.99, 0.5, 1.4, HERE), Score(0.96, 0.5, 1.4, HERE)
    assert front([small, fast, bad]) == (True, True, False)


def test_equal_scores_beat_nobody() -> None:
    assert front([Score(0.97, 0.3, 1.2, HERE)] * 2) == (True, True)


def test_speeds_of_two_places_are_never_weighed() -> None:
    good, bad = Score(0.99, 0.3, 2.0, HERE), Score(0.9, 0.9, 0.5, THERE)
    assert front([good, bad]) == (True, True)


def test_a_speed_that_is_unknown_may_be_the_better_one() -> None:
    assert front([Score(0.99, 0.3, 2.0, HERE), Score(0.9, 0.9, None, HERE)]) == (True, True)
    assert front([Score(0.99, 0.3, None, HERE), Score(0.9, 0.9, None, THERE)]) == (True, False)


def test_what_was_not_measured_is_not_on_the_front() -> None:
    assert front([None, Score(0.9, 0.9, None, HERE)]) == (False, True)
    assert front([]) == ()


@given(st.lists(scores, min_size=1, max_size=8))
def test_the_front_is_what_no_other_dominates(found: list[Score]) -> None:
    marked = front(found)
    for score, kept in zip(found, marked, strict=True):
        assert kept == (not any(dominates(other, score) for other in found))
        assert not dominates(score, score)
    # Within one place domination is a strict order, so something is always left.
    assert any(marked) or len({score.place for score in found}) > 1
