"""KL as a promise: what the likeliest tokens and a sampled one say, beside the divergence of whole vocabularies."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quantmint.eval import canary, kl
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import Policy, judge
from quantmint.eval.kl import Divergences, KlPolicy, TextDivergence
from quantmint.eval.measurements import Measurements
from quantmint.eval.verdict import Verdict

VOCABULARY, LIKELIEST = 400, 20
Listed = tuple[tuple[int, ...], tuple[float, ...]]


def distributions(seed: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities of two sides, [V]: the second's logits are the first's with noise, in the tail too."""
    random = np.random.RandomState(seed)
    logits = random.uniform(1.0, 4.0) * random.standard_normal(VOCABULARY)
    other = logits + noise * random.standard_normal(VOCABULARY) * random.uniform(0.2, 3.0, VOCABULARY)
    return tuple(values - np.logaddexp.reduce(values) for values in (logits, other))  # type: ignore[return-value]


def listed(logprobs: np.ndarray) -> Listed:
    order = np.argsort(-logprobs)[:LIKELIEST]
    return tuple(order.tolist()), tuple(logprobs[order].tolist())


def exact(first: np.ndarray, other: np.ndarray) -> float:
    return float((np.exp(first) * (first - other)).sum())


def sampled(first: np.ndarray, other: np.ndarray, token: int) -> float:
    return kl.sampled_divergence(listed(first), listed(other), (token, float(first[token]), float(other[token])))


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_mean_over_the_sampled_token_is_the_divergence(seed: int, noise: float) -> None:
    """Summed over every token that could have been drawn, with its probability: no simulation is needed."""
    first, other = distributions(seed, noise)
    mean = sum(math.exp(first[token]) * sampled(first, other, token) for token in range(VOCABULARY))
    assert mean == pytest.approx(exact(first, other), abs=1e-9)
    assert canary.divergence(*listed(first), *listed(other)) <= exact(first, other) + 1e-6


def test_no_number_of_likeliest_tokens_bounds_it_from_above() -> None:
    """Two candidates that list the very same lie as far apart as one likes: a bound needs what was sampled."""
    first, other = distributions(0, 0.1)
    unlisted = np.setdiff1d(np.arange(VOCABULARY), listed(other)[0])
    mass, divergences = np.exp(other[unlisted]).sum(), []
    for least in (1e-3, 1e-30, 1e-300):
        far = other.copy()
        far[unlisted] = math.log(least * mass)
        far[unlisted[-1]] = math.log(mass * (1 - least * (len(unlisted) - 1)))
        assert np.exp(far).sum() == pytest.approx(1.0)
        kept = [token for token in range(VOCABULARY) if token not in unlisted]
        assert (far[kept] == other[kept]).all()
        divergences.append(exact(first, far))
    assert divergences[2] > 10 * divergences[0]
    assert divergences[2] > 20 * exact(first, other)


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "limit"), [("upper", 0.075), ("lower", 0.075)])
def test_either_bound_errs_as_seldom_as_it_says(bound: str, limit: float) -> None:
    """400 measurements of 40 texts with a known mean; of an error rate of 5 %, 7.5 are more than two deviations up."""
    random, errors, texts = np.random.RandomState(3), 0, 40
    pairs = [distributions(seed, noise) for seed, noise in enumerate(random.gamma(2.0, 0.2, 200))]
    values = np.array([[sampled(*pair, token) for token in range(VOCABULARY)] for pair in pairs])
    shares = np.array([np.exp(first) / np.exp(first).sum() for first, _ in pairs])
    truth = float((values * shares).sum() / len(pairs))
    for _ in range(400):
        rows = []
        for text in range(texts):  # the positions of a text are of one kind
            kind, count = random.randint(len(pairs)), random.randint(10, 40)
            drawn = random.choice(VOCABULARY, count, p=shares[kind])
            rows.append(TextDivergence(str(text), count, float(values[kind][drawn].sum())))
        figure = kl.measure(Divergences(False, tuple(rows)))
        assert figure.lower is not None
        assert figure.upper is not None
        errors += figure.upper < truth if bound == "upper" else figure.lower > truth
    assert errors / 400 <= limit


def even(count: int, mean: float, spread: float) -> Divergences:
    totals = [100 * (mean + spread * (-1) ** number) for number in range(count)]
    return Divergences(True, tuple(TextDivergence(f"text {n}", 100, total) for n, total in enumerate(totals)))


@pytest.mark.parametrize(
    ("divergences", "verdict", "reason"),
    [
        (even(30, 0.03, 0.01), Verdict.PASS, "within the promised 0.05 nats at 95% confidence"),
        (even(30, 0.048, 0.04), Verdict.INCONCLUSIVE, "on both sides of the promised 0.05 nats"),
        (even(30, 0.2, 0.01), Verdict.FAIL, "beyond the promised 0.05 nats"),
        (even(1, 0.01, 0.0), Verdict.INCONCLUSIVE, "One text has no interval"),
        (Divergences(True, (TextDivergence("NaN", 9, None), *even(9, 0.01, 0.0).texts)), Verdict.FAIL, "1 of 10 texts"),
        (None, Verdict.INVALID, "The KL divergence decides, but was not measured."),
        (Divergences(True, ()), Verdict.INVALID, "no text was compared"),
    ],
    ids=["kept", "between", "broken", "one text", "no number", "unmeasured", "empty"],
)
def test_the_gate_has_three_answers(
    measurements: Measurements, policy: Policy, divergences: Divergences | None, verdict: Verdict, reason: str
) -> None:
    promised = dataclasses.replace(policy, kl=KlPolicy(0.05))
    report = judge(dataclasses.replace(measurements, kl=divergences), promised)
    assert report.verdict is verdict
    assert reason.lower() in " ".join(finding.reason for finding in report.findings).lower()


def test_a_run_that_the_canary_ended_has_no_second_fault(measurements: Measurements, policy: Policy) -> None:
    stopped = dataclasses.replace(measurements, samples={}, control={}, launches=(), stopped="canary")
    report = judge(stopped, dataclasses.replace(policy, kl=KlPolicy(0.05)))
    assert report.verdict_of("kl") is None
    assert report.verdict is Verdict.INCONCLUSIVE


def test_records_without_a_promise_are_as_they_were(measurements: Measurements, policy: Policy) -> None:
    report = judge(measurements, policy)
    assert "kl" not in measurements.to_json()
    assert not {"kl"} & (report.to_json().keys() | report.to_json()["policy"].keys())
    with pytest.raises(MeasurementError, match="no text"):
        kl.measure(Divergences(False, ()))
