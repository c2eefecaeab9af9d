"""The verdict on a task: at the first look that could tell, beside the baseline's own flips."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from quantmint.eval.gate import Finding, GateReport, Policy, judge
from quantmint.eval.gate.accuracy import control as measure
from quantmint.eval.measurements import Measurements
from quantmint.eval.samples import Sample, SampleSet
from quantmint.eval.statistics.sequential import plan_looks
from quantmint.eval.suites import Suite, SuiteTask
from quantmint.eval.verdict import Verdict
from tests.eval.measured import again, make_pair

PASS, FAIL, INCONCLUSIVE, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.INVALID
POLICY = Policy(margins={"t": 0.01})


def judged(measurements: Measurements, pair: tuple[SampleSet, SampleSet], policy: Policy = POLICY) -> GateReport:
    return judge(dataclasses.replace(measurements, samples={"t": pair}, control={}, launches=()), policy)


def finding(report: GateReport) -> Finding:
    (found,) = [f for f in report.findings if f.kind == "accuracy"]
    return found


def in_looks(samples: SampleSet, looks: int, asked: int, seed: int = 0) -> SampleSet:
    """The items in an order that the seed draws, in equal looks, of which so many were asked."""
    items = len(samples.samples)
    ends = plan_looks(items, looks)
    rank = np.random.RandomState(seed).permutation(items)
    dealt = [
        dataclasses.replace(s, look=int(np.searchsorted(ends, r, side="right")))
        for s, r in zip(samples.samples, rank, strict=True)
    ]
    return dataclasses.replace(samples, samples=tuple(s for s in dealt if s.look < asked), planned=items, looks=looks)


def sequential(right: int, losses: int, gains: int, asked: int) -> tuple[SampleSet, SampleSet]:
    before, after = make_pair("t", 8000, right=right, losses=losses, gains=gains)
    return in_looks(before, 4, 4), in_looks(after, 4, asked)


def test_a_clear_case_is_decided_early_and_says_what_that_saved(measurements: Measurements) -> None:
    # 3 % flips: at half of 8000 items the bounds are 0.4 points apart from the difference at the looks' 99.4 %.
    report = judged(measurements, sequential(6000, 120, 120, asked=2))
    found = finding(report)
    assert found.verdict is PASS
    assert "(4000 items)" in found.reason
    assert "Decided after 4,000 of 8,000 items, which saves 4,000." in found.reason
    assert [look.decision for look in report.looks["t"]] == ["GO ON", "PASS"]
    (result,) = report.accuracy
    assert (result.items, result.planned) == (4000, 8000)
    assert result.bound_confidence == report.looks["t"][-1].bound_confidence > 0.95
    assert (result.lower, result.upper) == (report.looks["t"][-1].lower, report.looks["t"][-1].upper)


def test_a_great_loss_fails_at_once(measurements: Measurements) -> None:
    found = finding(judged(measurements, sequential(6000, 700, 20, asked=1)))
    assert found.verdict is FAIL
    assert "outside the margin" in found.reason
    assert "Decided after 2,000 of 8,000 items" in found.reason


def test_an_evaluation_that_was_cut_is_undecided(measurements: Measurements) -> None:
    found = finding(judged(measurements, sequential(6000, 150, 100, asked=1)))
    assert found.verdict is INCONCLUSIVE
    assert "more items would decide" in found.reason
    assert found.reason.endswith("6,000 of the planned ones were not asked.")


def test_number_of_further_items_decides_when_they_come(measurements: Measurements) -> None:
    """The same shares of gains and losses on as many items as the gate asks for; one in five draws would need more."""
    found = finding(judged(measurements, make_pair("t", 2000, right=1700, losses=38, gains=22)))
    assert found.verdict is INCONCLUSIVE
    times = 1 + int(found.reason.split("About ")[1].split(" ")[0].replace(",", "")) / 2000
    counts = {name: round(times * count) for name, count in (("right", 1700), ("losses", 38), ("gains", 22))}
    assert finding(judged(measurements, make_pair("t", round(2000 * times), **counts))).verdict is PASS


def documents(loss: np.ndarray, words: np.ndarray) -> SampleSet:
    rows = zip(words, loss, strict=True)
    samples = tuple(Sample("t", i, "none", f"{i}", "", "", -float(w * x), float(w)) for i, (w, x) in enumerate(rows))
    return SampleSet("t", "word_perplexity", samples, "perplexity")


@pytest.mark.parametrize(
    ("factor", "expected", "words"),
    [
        (1.005, PASS, "+0.50% on t (perplexity"),
        (1.04, FAIL, "the true change is above +3."),
        (1.02, INCONCLUSIVE, "the true change may lie between +1.76% and +2.23%"),
        (0.96, INVALID, "the true change is below -3."),
    ],
)
def test_perplexity_has_a_relative_margin(
    measurements: Measurements, factor: float, expected: Verdict, words: str
) -> None:
    rng = np.random.RandomState(11)
    size, loss = rng.randint(100, 900, 62), 2 + 0.3 * rng.standard_normal(62)
    noise = 0.01 * rng.standard_normal(62)
    noise -= (noise * size).sum() / size.sum()
    pair = documents(loss, size), documents(loss + math.log(factor) + noise, size)
    found = finding(judged(measurements, pair, Policy(margins={"t": 0.02})))
    assert found.verdict is expected
    assert words in found.reason
    assert "62 documents" in found.reason
    assert "the margin of 2.00% at 95% confidence" in found.reason


def test_a_gain_within_the_baselines_own_flips_is_chance(measurements: Measurements) -> None:
    pair = make_pair("t", 2000, right=1700, losses=2, gains=80)
    assert finding(judged(measurements, pair)).label == "ANOMALOUS"
    for flips, label in ((4, "ANOMALOUS"), (60, None)):
        control = {"t": again(pair[0], items=1000, flips=flips)}
        with_control = dataclasses.replace(measurements, samples={"t": pair}, control=control, launches=())
        assert finding(judge(with_control, POLICY)).label == label


def test_a_gain_over_a_baseline_that_is_quantized_itself_passes(measurements: Measurements) -> None:
    pair = make_pair("t", 2000, right=1700, losses=2, gains=80)
    rounded = dataclasses.replace(measurements, baseline_rounding="quark, fp4")
    assert Measurements.read(rounded.to_json(), {}, {}).baseline_rounding == "quark, fp4"
    assert "baseline_rounding" not in measurements.to_json()
    passed = finding(judged(rounded, pair))
    assert (passed.verdict, passed.label) == (PASS, None)
    assert "the baseline itself is quantized and rounds its inputs (quark, fp4)" in passed.reason
    assert finding(judged(rounded, make_pair("t", 2000, right=1700, losses=80, gains=2))).verdict is FAIL
    ordinary = finding(judged(rounded, make_pair("t", 2000, right=1700, losses=2, gains=2)))
    assert (ordinary.verdict, "gain" in ordinary.reason) == (PASS, False)


def test_flips_are_shown_against_the_baselines_own(measurements: Measurements, policy: Policy) -> None:
    report = judge(measurements, policy)
    (found,) = [f for f in report.findings if f.subject == "tiny_facts"]
    # 40 of 2000 flipped; of 500 that were asked again, 2 did.
    exact = stats.binomtest(2, 500).proportion_ci(0.95, method="exact")
    assert "2.0% of the answers flipped; asked again, the baseline flips 0.4% of its own " in found.reason
    control = report.control["tiny_facts"]
    assert (control.items, control.flips, control.rate) == (500, 2, 0.004)
    assert (control.low, control.high) == pytest.approx((exact.low, exact.high))


@pytest.mark.parametrize("flips", [0, 40])
def test_a_control_is_never_sure(flips: int) -> None:
    before, _ = make_pair("t", 40, right=40, losses=0, gains=0)
    control = measure(before, again(before, items=40, flips=flips), 0.95)
    exact = stats.binomtest(flips, 40).proportion_ci(0.95, method="exact")
    assert (control.low, control.high) == pytest.approx((exact.low, exact.high))
    assert control.high - control.low > 0.05


def test_policy_takes_margins_of_tasks_before_the_recipes() -> None:
    suite = Suite(
        "s", "", (SuiteTask("a", "acc", 9, 0.03), SuiteTask("b", "acc", 9, 0.06, margin=0.04),
                  SuiteTask("c", "acc", 9, 0.2, gated=False)),
    )  # fmt: skip
    policy = Policy.for_suite(suite, margin=0.01, launches=5)
    assert policy.margins == {"a": 0.01, "b": 0.04}
    assert (policy.expected_flip_rate, policy.launches) == (0.06, 5)
    assert Policy.for_suite(suite, margin=0.01, expected_flip_rate=0.1).expected_flip_rate == 0.1
