"""Acceptance of speculative decoding: its figures, their coverage, the gate's promise, and what pages show of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from quantmint.eval import record
from quantmint.eval.acceptance import Acceptance, AcceptancePairs, AcceptancePolicy, PromptDrafts, compare, judge
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import Policy
from quantmint.eval.gate import judge as judge_all
from quantmint.eval.measurements import Measurements
from quantmint.eval.report import markdown, page
from quantmint.eval.verdict import Verdict
from tests.eval.report import made

PASS, FAIL, INCONCLUSIVE, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.INVALID
TOKENS, ANSWER = 3, 64


def drafts(rates: np.ndarray, seed: int) -> tuple[PromptDrafts, ...]:
    """Answers of `ANSWER` tokens whose proposed tokens are accepted at a rate of each prompt, up to the first miss."""
    hits = np.random.RandomState(seed).random_sample((len(rates), ANSWER, TOKENS)) < rates[:, None, None]
    taken = np.cumprod(hits, axis=2).sum(axis=2)  # by prompt and step
    steps = 1 + (np.cumsum(taken + 1, axis=1) < ANSWER).sum(axis=1)
    rows = [
        PromptDrafts(f"text-{number}", int(count), TOKENS * int(count), int(row[:count].sum()))
        for number, (count, row) in enumerate(zip(steps, taken, strict=True))
    ]
    return tuple(rows)


def pairs(prompts: int, loss: float = 0.0, seed: int = 0) -> AcceptancePairs:
    """Prompts of different difficulty; the candidate's tokens are accepted less often by ``loss``, relative."""
    rates = 0.4 + 0.4 * np.random.RandomState(seed).random_sample(prompts)
    return AcceptancePairs("mtp", TOKENS, drafts(rates, seed + 1), drafts(rates * (1 - loss), seed + 2))


def test_the_figures_are_sums_over_prompts() -> None:
    before = (PromptDrafts("a", 10, 30, 20), PromptDrafts("b", 30, 90, 20))
    after = (PromptDrafts("a", 10, 30, 15), PromptDrafts("b", 30, 90, 20))
    result = compare(AcceptancePairs("ngram", 3, before, after))
    assert (result.baseline, result.candidate) == (2.0, 1.875)
    assert (result.ratio, result.rates, result.drafts) == (0.9375, (40 / 120, 35 / 120), (40, 40))
    assert result.low < result.ratio < result.high
    assert result.worst == (("a", 2.5 / 3), ("b", 1.0))


def test_the_same_answers_on_both_sides_have_no_doubt() -> None:
    same = dataclasses.replace(pairs(20), candidate=pairs(20).baseline)
    result = compare(same)
    assert (result.ratio, result.low, result.high) == (1.0, 1.0, 1.0)


def test_pairing_by_prompt_narrows_the_bounds() -> None:
    """Prompts differ far more than the two sides do on one of them."""
    both = pairs(60)
    order = np.random.RandomState(5).permutation(60)
    renamed = [dataclasses.replace(both.candidate[old], prompt=f"text-{new}") for new, old in enumerate(order)]
    apart = dataclasses.replace(both, candidate=tuple(renamed))
    paired, unpaired = compare(both), compare(apart)
    assert paired.ratio == pytest.approx(unpaired.ratio)
    assert (paired.high - paired.low) < 0.8 * (unpaired.high - unpaired.low)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [24, 57])
def test_a_loss_at_the_margin_passes_or_fails_in_five_percent_of_cases(prompts: int) -> None:
    rates = 0.4 + 0.4 * np.random.RandomState(3).random_sample(prompts)
    truth = np.mean([compare(pairs_at(rates, 0.05, seed)).ratio for seed in range(400)])
    bounds = [compare(pairs_at(rates, 0.05, seed)) for seed in range(400, 1000)]
    wrongly_passed = np.mean([result.low >= truth for result in bounds])
    wrongly_failed = np.mean([result.high < truth for result in bounds])
    assert max(wrongly_passed, wrongly_failed) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 600)
    assert min(wrongly_passed, wrongly_failed) > 0.005


def pairs_at(rates: np.ndarray, loss: float, seed: int) -> AcceptancePairs:
    return AcceptancePairs("mtp", TOKENS, drafts(rates, 2 * seed), drafts(rates * (1 - loss), 2 * seed + 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: dataclasses.replace(p, candidate=p.candidate[1:]), "the two sides continued other prompts"),
        (lambda p: dataclasses.replace(p, baseline=p.baseline[:1], candidate=p.candidate[:1]), "found 1"),
        (lambda p: silent(p), "the candidate was served with mtp, and no token was ever proposed"),
        (lambda p: greedy(p), "accepted more tokens than were proposed for 'text-0'"),
    ],
)
def test_what_cannot_be_compared_is_said(change: object, said: str) -> None:
    with pytest.raises(MeasurementError, match=said):
        compare(change(pairs(10)))  # type: ignore[operator]


def silent(both: AcceptancePairs) -> AcceptancePairs:
    rows = tuple(PromptDrafts(row.prompt, 0, 0, 0) for row in both.candidate)
    return dataclasses.replace(both, candidate=rows)


def greedy(both: AcceptancePairs) -> AcceptancePairs:
    first = dataclasses.replace(both.candidate[0], accepted=both.candidate[0].proposed + 1)
    return dataclasses.replace(both, candidate=(first, *both.candidate[1:]))


def measured(low: float, ratio: float, high: float) -> Acceptance:
    return Acceptance("mtp", 1, 57, 0.95, 1.8, 1.8 * ratio, ratio, low, high, (0.8, 0.7), (900, 950), ())


@pytest.mark.parametrize(
    ("low", "ratio", "high", "verdict", "said"),
    [
        (0.985, 1.0, 1.015, PASS, "at least 0.98 was promised, and it is more"),
        (0.98, 1.0, 1.02, PASS, "1.000 times the baseline's 1.800 (0.980 to 1.020, 57 prompts)"),
        (0.975, 0.99, 1.005, INCONCLUSIVE, "whether it is at least the promised 0.98 is not shown"),
        (0.93, 0.95, 0.97, FAIL, "at least 0.98 was promised, and it is less"),
    ],
)
def test_the_interval_decides(low: float, ratio: float, high: float, verdict: Verdict, said: str) -> None:
    found, reason = judge(measured(low, ratio, high), AcceptancePolicy(0.02))
    assert found is verdict
    assert said in reason


@pytest.mark.parametrize(
    ("loss", "margin", "verdict"), [(0.0, 0.1, PASS), (0.4, 0.1, FAIL), (0.02, 0.005, INCONCLUSIVE), (0.4, None, PASS)]
)
def test_the_gate_decides_by_the_promise(
    measurements: Measurements, policy: Policy, tmp_path: Path, loss: float, margin: float | None, verdict: Verdict
) -> None:
    promise = None if margin is None else AcceptancePolicy(margin)
    known, limits = (
        dataclasses.replace(measurements, acceptance=pairs(57, loss)),
        dataclasses.replace(policy, acceptance=promise),
    )
    report = judge_all(known, limits)
    assert report.verdict is verdict, report.reasons
    assert report.verdict_of("acceptance") is (None if margin is None else verdict)
    assert report.acceptance is not None
    path = record.write(tmp_path, known, report)
    assert record.read(path) == (known, report)
    assert record.rejudge(path) == report


def test_a_promise_without_a_measurement_is_invalid_unless_the_canary_says_why(
    measurements: Measurements, policy: Policy
) -> None:
    promised = dataclasses.replace(policy, acceptance=AcceptancePolicy(0.02))
    report = judge_all(measurements, promised)
    assert report.verdict is INVALID
    assert report.reasons == ("The acceptance of proposed tokens decides, but was not measured.",)
    assert judge_all(dataclasses.replace(measurements, acceptance=silent(pairs(10))), promised).verdict is INVALID


def test_records_without_it_are_as_they_were(measurements: Measurements, policy: Policy) -> None:
    report = judge_all(measurements, policy)
    assert "acceptance" not in report.to_json()
    assert "acceptance" not in policy.to_json()
    assert "acceptance" not in measurements.to_json()


@pytest.mark.slow
def test_pages_show_it() -> None:
    known = dataclasses.replace(made.measurements(), acceptance=pairs(57))
    report = made.report(known, made.policy(acceptance=AcceptancePolicy(0.1)))
    text, html = markdown.render(report), page.render(report)
    assert "### Speculative decoding" in text
    assert "PASS at 0.9 or more" in text
    assert 'id="acceptance"' in html
    assert "at least 0.9" in html
    assert "Speculative decoding" not in markdown.render(made.good())
