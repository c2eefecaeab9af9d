"""A promise of speed: kept, broken, open, or made for another machine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import pytest

from quantmint.eval.gate import Policy, judge
from quantmint.eval.measurements import Launch, MachineState, Measurements, order
from quantmint.eval.verdict import Verdict
from tests.eval.measured import make_cell

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
STEADY = (1000.0, 1004.0, 998.0, 1002.0)


def launches(baseline: Sequence[float], candidate: Sequence[float], rate: float | None = None) -> tuple[Launch, ...]:
    """One cell, with so many output tokens/s in each launch of a side."""
    values = {"baseline": iter(baseline), "candidate": iter(candidate)}
    return tuple(
        Launch(
            side,
            n,
            {"c": dataclasses.replace(make_cell("c", next(values[side])), request_rate=rate)},
            None,
            None,
            1.0,
            None,
            MachineState(),
        )
        for n, side in enumerate(order(len(baseline)))
    )


def verdict(measurements: Measurements, policy: Policy, *sides: Sequence[float]) -> tuple[Verdict, str]:
    report = judge(dataclasses.replace(measurements, launches=launches(*sides)), policy)
    (finding,) = [f for f in report.findings if f.kind == "throughput"]
    return finding.verdict, finding.reason


@pytest.mark.parametrize(
    ("promise", "factor", "expected", "word"),
    [
        (1.2, 1.25, PASS, "1.2 was promised, and it is more (p = 0.014)"),
        (1.2, 1.15, FAIL, "1.2 was promised, and it is less (p = 0.014)"),
        (1.2, 1.201, INCONCLUSIVE, "whether it is more than the promised 1.2 is not shown"),
        (1.0, 1.25, PASS, "1 was promised, and it is more (p = 0.014)"),
        (1.0, 1.0, INCONCLUSIVE, "more launches, or a promise a little lower, would tell"),
        (0.98, 1.0, PASS, "0.98 was promised, and it is more (p = 0.014)"),
        (0.98, 0.9, FAIL, "0.98 was promised, and it is less (p = 0.014)"),
    ],
)
def test_rule(
    measurements: Measurements, policy: Policy, promise: float, factor: float, expected: Verdict, word: str
) -> None:
    promised = dataclasses.replace(policy, min_ratio=promise)
    found, reason = verdict(measurements, promised, STEADY, [factor * value for value in STEADY])
    assert found is expected
    assert word in reason


@pytest.mark.parametrize(
    ("made", "launches_asked", "confidence", "word"),
    [
        (2, 1, 0.95, "3 launches a side are needed to decide at 95% confidence"),
        (3, 1, 0.99, "5 launches a side are needed to decide at 99% confidence"),
        (3, 4, 0.95, "4 launches a side are needed to decide as the recipe asks"),
    ],
)
def test_too_few_launches_say_how_many_are_needed(
    measurements: Measurements, policy: Policy, made: int, launches_asked: int, confidence: float, word: str
) -> None:
    few = dataclasses.replace(policy, min_ratio=1.2, launches=launches_asked, throughput_confidence=confidence)
    found, reason = verdict(measurements, few, STEADY[:made], [2 * value for value in STEADY[:made]])
    assert found is INCONCLUSIVE
    assert word in reason


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_another_machine_neither_keeps_nor_breaks_a_promise(
    measurements: Measurements, policy: Policy, factor: float
) -> None:
    h100 = {"hardware": "h100", "device": "NVIDIA H100 80GB HBM3"}
    there = dataclasses.replace(
        measurements,
        baseline=dataclasses.replace(measurements.baseline, **h100),
        candidate=dataclasses.replace(measurements.candidate, **h100),
    )
    found, reason = verdict(there, policy, STEADY, [factor * value for value in STEADY])
    assert found is INCONCLUSIVE
    assert f"{factor:.3f} times" in reason  # it is shown all the same
    assert reason.endswith("measured on NVIDIA H100 80GB HBM3, promised for mi300x.")
    anywhere = dataclasses.replace(policy, hardware=None)
    assert verdict(there, anywhere, STEADY, [2 * value for value in STEADY])[0] is PASS


def test_a_load_that_arrives_at_its_own_rate_tells_no_speed(measurements: Measurements, policy: Policy) -> None:
    both = launches(STEADY, STEADY, rate=4.0)
    report = judge(dataclasses.replace(measurements, launches=both), policy)
    (finding,) = [f for f in report.findings if f.kind == "throughput"]
    assert finding.verdict is INCONCLUSIVE
    assert "fixed rate of requests" in finding.reason
    assert [cell.promise for cell in report.throughput] == [None]


def test_without_a_promise_it_is_shown_only(measurements: Measurements, policy: Policy) -> None:
    slow = dataclasses.replace(measurements, launches=launches(STEADY, [0.3 * value for value in STEADY]))
    report = judge(slow, dataclasses.replace(policy, min_ratio=None))
    assert report.verdict is PASS
    assert [cell.ratio for cell in report.throughput] == pytest.approx([0.3])


def test_what_stands_in_for_vllm_measures_no_speed(measurements: Measurements, policy: Policy) -> None:
    words = "transformers 5.17.0, dequantized weights"
    there = dataclasses.replace(
        measurements,
        baseline=dataclasses.replace(measurements.baseline, runtime=words),
        candidate=dataclasses.replace(measurements.candidate, runtime=words),
        launches=(),
    )
    report = judge(there, policy)
    assert report.verdict is INCONCLUSIVE
    assert report.reasons == (f"The promise of 1 times is open: {words} measures no throughput.",)
    assert judge(there, dataclasses.replace(policy, min_ratio=None)).verdict is PASS


def test_an_interval_is_shown_where_a_side_was_launched_more_than_once(
    measurements: Measurements, policy: Policy
) -> None:
    promised = dataclasses.replace(policy, min_ratio=1.0)
    interval = re.compile(r"in c \(\d\.\d{3} to \d\.\d{3}, ")
    assert interval.search(verdict(measurements, promised, STEADY, STEADY)[1])
    assert not interval.search(verdict(measurements, promised, STEADY[:1], STEADY[:1])[1])


def test_launches_that_may_end_early_are_judged_by_the_first_look_that_decides(
    measurements: Measurements, policy: Policy
) -> None:
    """Four of at most six decide where every launch is faster; one that is slower keeps it open until more are made."""
    early = dataclasses.replace(policy, min_ratio=1.2, launches=6, stop_early=True)
    fast = [1.25 * value for value in STEADY]
    found, reason = verdict(measurements, early, STEADY, fast)
    assert (found, "it is more, as 4 launches a side show" in reason) == (PASS, True), reason
    found, reason = verdict(measurements, early, STEADY, [1.15 * value for value in STEADY])
    assert (found, "it is less, as 4 launches a side show" in reason) == (FAIL, True), reason
    mixed = [*fast[:2], *(1.15 * value for value in STEADY[2:])]
    found, reason = verdict(measurements, early, STEADY, mixed)
    assert (found, "6 launches a side are needed" in reason) == (INCONCLUSIVE, True), reason
    # A look that decided stays the decision, whatever was measured after it.
    later = (*STEADY, 1000.0, 1000.0), (*fast, 900.0, 900.0)
    assert verdict(measurements, early, *later)[0] is PASS
    assert verdict(measurements, dataclasses.replace(early, stop_early=False), *later)[0] is INCONCLUSIVE
    foreign = dataclasses.replace(early, launches=8)
    assert verdict(measurements, foreign, STEADY, fast)[0] is INCONCLUSIVE, "more than are counted out: no error"
    six = (*STEADY, 1000.0, 1000.0), (*mixed, 1200.0, 1200.0)
    found, reason = verdict(measurements, early, *six)
    assert (found, "6 launches a side show neither" in reason) == (INCONCLUSIVE, True), reason


def test_figures_of_launches_that_end_early_are_those_of_their_looks(
    measurements: Measurements, policy: Policy
) -> None:
    """Where four of at most seven decide, the bounds and p-values are the looks', and so is the judgement's version."""
    early = dataclasses.replace(policy, min_ratio=1.2, launches=7, stop_early=True)
    fast = [1.25 * value for value in STEADY]
    report = judge(dataclasses.replace(measurements, launches=launches(STEADY, fast)), early)
    fixed = judge(dataclasses.replace(measurements, launches=launches(STEADY, fast)), policy)
    (cell,), (other,) = report.throughput, fixed.throughput
    # 15 of 16 pairs decide at that look, as in the fixed test of four: what else it spends is spent at later looks.
    assert (cell.ratio_low, cell.ratio_high) == (other.ratio_low, other.ratio_high)
    assert cell.p_promise == pytest.approx(1 / 70, rel=1e-5)
    assert (report.judgement, fixed.judgement) == (3, 2)
    mixed = [*fast[:3], 1.15 * STEADY[3], *(1.25 * value for value in STEADY[:2])]
    six = launches((*STEADY, *STEADY[:2]), mixed)
    (cell,), (other,) = (
        judge(dataclasses.replace(measurements, launches=six), rule).throughput for rule in (early, policy)
    )
    assert cell.ratio_low < other.ratio_low
    assert cell.ratio_high >= other.ratio_high
    assert cell.p_faster > other.p_faster


def test_a_policy_that_does_not_end_early_is_what_it_was_before() -> None:
    policy = Policy(margins={"t": 0.01})
    assert "stop_early" not in policy.to_json()
    early = dataclasses.replace(policy, stop_early=True)
    assert Policy.from_json(early.to_json()) == early
