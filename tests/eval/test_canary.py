"""Answers of two sides compared: agreement, a lower bound of the KL, intervals, the judgement."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.eval.canary import (
    Answer,
    Canary,
    CanaryAnswers,
    CanaryPolicy,
    compare,
    divergence,
    is_clear,
    judge,
    look_ends,
)
from quantmint.eval.errors import MeasurementError
from quantmint.eval.verdict import Verdict

POLICY = CanaryPolicy(min_agreement=0.7, max_kl=0.5)


def listed(probabilities: list[float], likeliest: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The likeliest tokens of a distribution, and their logarithms, as a server lists them."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:likeliest]
    return tuple(order), tuple(math.log(probabilities[token]) for token in order)


def answer(name: str, rows: list[list[float]], ids: tuple[int, ...] = (), likeliest: int = 2) -> Answer:
    """A side's answer, a distribution of the next token at each position."""
    ids = ids or (0,) * (len(rows) + 1)
    actual = tuple(math.log(row[token]) for row, token in zip(rows, ids[1:], strict=True))
    tops = [listed(row, likeliest) for row in rows]
    return Answer(name, ids, actual, tuple(top[0] for top in tops), tuple(top[1] for top in tops))


def silent(whole: Answer) -> Answer:
    return replace(whole, actual=(), tokens=(), logprobs=())


def test_a_divergence_by_hand() -> None:
    # The baseline lists tokens 0 and 1, the candidate 0 and 2: its token 1 has 0.2 at most, all others 1 - 0.5.
    found = divergence((0, 1), (math.log(0.6), math.log(0.3)), (0, 2), (math.log(0.5), math.log(0.2)))
    expected = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.5)
    assert found == pytest.approx(expected, abs=1e-12)


def test_whole_distributions_have_their_whole_divergence() -> None:
    one, other = [0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert divergence(*listed(one, 4), *listed(other, 4)) == pytest.approx(expected, abs=1e-12)


def distributions(size: int) -> st.SearchStrategy[list[float]]:
    weights = st.lists(st.floats(1e-4, 1.0), min_size=size, max_size=size)
    return weights.map(lambda values: [value**3 / sum(v**3 for v in values) for value in values])


@given(st.integers(2, 12).flatmap(lambda n: st.tuples(distributions(n), distributions(n), st.integers(1, n))))
def test_what_is_given_is_never_more_than_the_true_divergence(case: tuple[list[float], list[float], int]) -> None:
    one, other, likeliest = case
    true = sum(p * math.log(p / q) for p, q in zip(one, other, strict=True))
    found = divergence(*listed(one, likeliest), *listed(other, likeliest))
    assert 0.0 <= found <= true + 1e-5


@given(distributions(8), st.integers(1, 8))
def test_a_model_does_not_diverge_from_itself(one: list[float], likeliest: int) -> None:
    assert divergence(*listed(one, likeliest), *listed(one, likeliest)) == pytest.approx(0.0, abs=1e-9)


def test_a_disjoint_candidate_diverges_though_no_token_is_listed_by_both() -> None:
    far = divergence((0, 1), (math.log(0.9), math.log(0.05)), (2, 3), (math.log(0.9), math.log(0.01)))
    assert far > 0.9 * math.log(0.9 / 0.01) - 0.1


def test_figures_by_hand() -> None:
    sure, unsure, other = [0.75, 0.25], [0.5, 0.5], [0.25, 0.75]
    baseline = CanaryAnswers((answer("a", [sure, sure, sure]), answer("b", [sure, unsure])))
    candidate = CanaryAnswers((answer("a", [sure, sure, other]), answer("b", [sure, sure])))
    canary = compare(baseline, candidate)
    assert (canary.prompts, canary.positions) == (2, 5)
    assert canary.agreement == 0.8, "a tie agrees with either"
    kl = 0.5 * math.log(3)  # 0.75 log 3 - 0.25 log 3
    tie = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert canary.kl == pytest.approx((kl + tie) / 5)
    assert canary.worst == (("a", pytest.approx(kl / 3)), ("b", pytest.approx(tie / 2)))
    assert canary.baseline_perplexity == pytest.approx((0.75**4 * 0.5) ** (-1 / 5))
    # Residuals of the sums 2 and 2 from 0.8 x 3 and 0.8 x 2 are -0.4 and 0.4; t(0.975; 1 degree) is 12.706.
    assert canary.agreement_low == max(0.0, 0.8 - 12.7062047 * math.sqrt(2 * 0.32) / 5)
    assert canary.agreement_high == 1.0
    assert canary.kl_low <= canary.kl <= canary.kl_high


def many(shift: float, prompts: int = 24, positions: int = 30) -> CanaryAnswers:
    """A side whose logits are noise, the same for all sides, and ``shift`` times other noise."""
    generator, noise = np.random.RandomState(1), np.random.RandomState(2)
    found = []
    for number in range(prompts):
        logits = 3 * generator.standard_normal((positions, 50)) + shift * noise.standard_normal((positions, 50))
        rows = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        found.append(answer(f"p{number}", rows.tolist(), likeliest=20))
    return CanaryAnswers(tuple(found))


def test_more_noise_agrees_less_and_diverges_more() -> None:
    canaries = [compare(many(0.0), many(shift)) for shift in (0.0, 0.1, 0.5, 2.0, 8.0)]
    agreements = [canary.agreement for canary in canaries]
    divergences = [canary.kl for canary in canaries]
    assert agreements == sorted(agreements, reverse=True)
    assert divergences == sorted(divergences)
    assert (agreements[0], divergences[0]) == (1.0, pytest.approx(0.0, abs=1e-9))
    for canary in canaries:
        assert 0 <= canary.agreement_low <= canary.agreement <= canary.agreement_high <= 1
    verdicts = [judge(canary, POLICY)[0] for canary in canaries]
    assert verdicts == [Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.FAIL, Verdict.FAIL]


def test_an_interval_covers_the_mean_of_all_prompts() -> None:
    whole = compare(many(0.5, prompts=200), many(0.0, prompts=200))
    baseline, candidate = many(0.5, prompts=200), many(0.0, prompts=200)
    covered = 0
    for start in range(0, 200, 10):
        parts = (CanaryAnswers(side.answers[start : start + 10]) for side in (baseline, candidate))
        part = compare(*parts)
        covered += part.agreement_low <= whole.agreement <= part.agreement_high
    assert covered >= 17, "of twenty intervals at 95 %"


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, Verdict.PASS, "asked for: at least 70.0%, at most 0.5"),
        ({"agreement_high": 0.69}, Verdict.FAIL, "agreement below 70.0% by its whole interval: "),
        ({"kl_low": 0.51}, Verdict.FAIL, "KL above 0.5 nats by its whole interval: "),
        ({"agreement_low": 0.2, "kl_high": 3.0}, Verdict.PASS, "may still be good"),
        ({"agreement": 0.69, "agreement_low": 0.6}, Verdict.INCONCLUSIVE, "agreement 69.0% is below 70.0%: "),
        ({"kl": 0.51, "kl_high": 0.6}, Verdict.INCONCLUSIVE, "KL 0.51 nats is above 0.5: "),
        ({"unanswered": ("a", "b")}, Verdict.FAIL, "no finite log probability for 2 of 48 prompts: "),
        (
            {"agreement_high": 0.1, "kl_low": 2.0},
            Verdict.FAIL,
            "agreement below 70.0% by its whole interval, KL above 0.5 nats by its whole interval: ",
        ),
    ],
)
def test_the_judgement(changes: dict[str, object], verdict: Verdict, words: str) -> None:
    good = Canary(48, 4000, 0.95, 0.9, 0.88, 0.92, 0.1, 0.05, 0.15, 6.0, 6.1, (("poem", 0.3),))
    found, reason = judge(replace(good, **changes), POLICY)  # type: ignore[arg-type]
    assert found is verdict
    if verdict is not Verdict.PASS:
        assert reason.startswith(words)
    if verdict is Verdict.FAIL:
        assert reason.endswith("worst: poem")
    share = changes.get("agreement", 0.9)
    assert f"the likeliest token is the baseline's at {share:.1%} of 4,000 positions" in reason


# What was measured of sound four-bit checkpoints of a model of 135M parameters, and of a rotation that harms.
@pytest.mark.parametrize(
    ("agreement", "kl", "verdict", "words"),
    [
        (0.60, 0.64, Verdict.PASS, "asked for: at least 45.0%, at most 1.2"),
        (0.592, 0.77, Verdict.PASS, "asked for"),
        (0.468, 1.138, Verdict.PASS, "asked for"),
        (0.385, 1.698, Verdict.INCONCLUSIVE, "agreement 38.5% is below 45.0%, KL 1.7 nats is above 1.2: the likeliest"),
        (0.50, 1.3, Verdict.INCONCLUSIVE, "to ask them all the same, `gate: {canary: null}`"),
        (
            0.30,
            1.9,
            Verdict.FAIL,
            "agreement below 35.0% by its whole interval, which no sound quantization shows: the likeliest",
        ),
        (
            0.40,
            2.1,
            Verdict.FAIL,
            "KL above 2 nats by its whole interval, which no sound quantization shows: the likeliest",
        ),
    ],
)
def test_what_may_be_sound_is_never_called_broken(agreement: float, kl: float, verdict: Verdict, words: str) -> None:
    near = Canary(48, 4000, 0.95, agreement, agreement, agreement, kl, kl, kl, 6.0, 6.1, (("poem", 0.3),))
    found, reason = judge(near, CanaryPolicy(0.45, 1.2, 0.35, 2.0))
    assert found is verdict
    assert words in reason
    assert judge(replace(near, unanswered=("a",)), CanaryPolicy(0.45, 1.2, 0.35, 2.0))[0] is Verdict.FAIL


def test_a_figure_near_its_limit_is_judged_by_itself_and_the_reason_says_so() -> None:
    """41.4 % against a limit of 45 %: the upper bound of the interval, 45.09 %, is not what a reader is told."""
    near = Canary(57, 9000, 0.95, 0.414, 0.377, 0.4509, 1.1, 0.9, 1.3, 6.0, 6.1, (("poem", 0.3),))
    verdict, reason = judge(near, CanaryPolicy(0.45, 1.2, 0.35, 2.0))
    assert verdict is Verdict.INCONCLUSIVE
    assert reason.startswith("agreement 41.4% is below 45.0%: ")


@pytest.mark.parametrize(
    ("prompts", "ends"), [(57, (14, 28, 57)), (48, (12, 24, 48)), (20, (12, 20)), (5, (5,)), (2, (2,))]
)
def test_looks_at_prompts(prompts: int, ends: tuple[int, ...]) -> None:
    assert look_ends(prompts) == ends


def test_a_comparison_ends_early_only_where_more_prompts_would_change_nothing() -> None:
    good = Canary(14, 900, 0.99, 0.9, 0.85, 0.95, 0.1, 0.0, 0.2, 6.0, 6.1, ())
    limits = CanaryPolicy(0.7, 0.5, 0.5, 1.0)
    assert is_clear(good, limits)
    assert is_clear(replace(good, unanswered=("a",)), limits)
    assert is_clear(replace(good, agreement=0.3, agreement_low=0.2, agreement_high=0.4), limits)
    assert is_clear(replace(good, agreement=0.6, agreement_low=0.55, agreement_high=0.65), limits)
    for near in ({"agreement_low": 0.69}, {"kl_high": 0.51},
                 {"agreement": 0.4, "agreement_low": 0.3, "agreement_high": 0.51}):  # fmt: skip
        assert not is_clear(replace(good, **near), limits), near  # type: ignore[arg-type]


def test_a_prompt_without_numbers_agrees_nowhere_and_fails() -> None:
    baseline = many(0.0, prompts=4)
    broken = CanaryAnswers((*baseline.answers[:3], silent(baseline.answers[3])))
    canary = compare(baseline, broken)
    assert canary.unanswered == ("p3",)
    assert canary.agreement == 0.75
    assert canary.kl == pytest.approx(0.0, abs=1e-9)
    assert judge(canary, POLICY)[0] is Verdict.FAIL
    nothing = compare(baseline, CanaryAnswers(tuple(map(silent, baseline.answers))))
    assert (nothing.agreement, nothing.kl, nothing.candidate_perplexity, nothing.worst) == (0.0, 0.0, 0.0, ())
    json.dumps(nothing.to_json(), allow_nan=False)
    one = compare(baseline, CanaryAnswers((baseline.answers[0], *map(silent, baseline.answers[1:]))))
    assert (one.kl_low, one.kl_high) == (one.kl, one.kl)
    assert "of 4 prompts" in judge(nothing, POLICY)[1]


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (lambda whole: whole.answers[:3], "different prompts"),
        (lambda whole: (replace(whole.answers[0], prompt="x"), *whole.answers[1:]), "different prompts"),
        (lambda whole: (replace(whole.answers[0], ids=(1,) * 31), *whole.answers[1:]), "'p0' has other tokens"),
    ],
)
def test_what_cannot_be_compared(candidate: object, message: str) -> None:
    whole = many(0.0, prompts=4)
    with pytest.raises(MeasurementError, match=message):
        compare(whole, CanaryAnswers(candidate(whole)))  # type: ignore[operator]


def test_a_baseline_must_have_answered_and_one_prompt_is_no_sample() -> None:
    whole = many(0.0, prompts=4)
    with pytest.raises(MeasurementError, match="the baseline has no finite log probabilities for prompt 'p0'"):
        compare(CanaryAnswers((silent(whole.answers[0]), *whole.answers[1:])), whole)
    single = CanaryAnswers(whole.answers[:1])
    with pytest.raises(MeasurementError, match="two prompts at least, found 1"):
        compare(single, single)


def test_answers_come_back_from_json() -> None:
    answers = many(0.5, prompts=3)
    assert CanaryAnswers.from_json(json.loads(json.dumps(answers.to_json()))) == answers
    with pytest.raises(MeasurementError, match="not a mapping of columns"):
        CanaryAnswers.from_json({"answers": 1})
