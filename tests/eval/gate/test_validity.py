"""What makes two sides comparable: how they were served, how they were asked, what the baseline is known to reach."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quantmint.eval.gate import Finding, Policy, judge
from quantmint.eval.gate.validity import kv_cache_fault, standard_error
from quantmint.eval.measurements import Measurements, Server, differences
from quantmint.eval.samples import Sample, SampleSet
from quantmint.eval.verdict import Verdict
from tests.eval.measured import make_pair, make_samples


def faults(measurements: Measurements, policy: Policy) -> list[Finding]:
    return [finding for finding in judge(measurements, policy).findings if finding.verdict is Verdict.INVALID]


def with_settings(measurements: Measurements, baseline: object, candidate: object) -> Measurements:
    before, after = measurements.samples["tiny_facts"]
    pair = (
        dataclasses.replace(before, settings={"temperature": baseline}),
        dataclasses.replace(after, settings={"temperature": candidate}),
    )
    return dataclasses.replace(measurements, samples={**measurements.samples, "tiny_facts": pair}, control={})


def test_answers_that_were_sampled_are_void_even_where_both_were(measurements: Measurements, policy: Policy) -> None:
    assert faults(with_settings(measurements, 0, 0), policy) == []
    assert faults(with_settings(measurements, None, None), policy) == []  # a task without generation
    found = faults(with_settings(measurements, 0.7, 0.7), policy)
    assert [f.reason for f in found] == [
        "The baseline answered tiny_facts at temperature 0.7, expected 0.",
        "The candidate answered tiny_facts at temperature 0.7, expected 0.",
    ]
    found = faults(with_settings(measurements, 0, 0.7), policy)
    assert len(found) == 2  # and the sides were asked in different ways, which pairing says


def test_a_baseline_that_was_not_asked_everything_is_void(measurements: Measurements, policy: Policy) -> None:
    before, after = measurements.samples["tiny_facts"]
    pair = (
        dataclasses.replace(before, samples=before.samples[:1500], planned=2000, looks=2),
        dataclasses.replace(after, samples=after.samples[:1500], planned=2000, looks=2),
    )
    short = dataclasses.replace(measurements, samples={**measurements.samples, "tiny_facts": pair}, control={})
    (found,) = faults(short, policy)
    assert found.reason == "The baseline has 1500 of the 2000 items of tiny_facts that were planned."


def test_a_shown_task_has_nothing_to_stop_early_for(measurements: Measurements, policy: Policy) -> None:
    before, after = measurements.samples["tiny_grammar"]
    looks = [dataclasses.replace(s, look=int(i >= 125)) for i, s in enumerate(before.samples)]
    before = dataclasses.replace(before, samples=tuple(looks), looks=2)
    after = dataclasses.replace(after, samples=after.samples[:125], planned=250, looks=2)
    short = dataclasses.replace(measurements, samples={**measurements.samples, "tiny_grammar": (before, after)})
    (found,) = faults(short, policy)
    assert "tiny_grammar: 125 of 250 items were asked" in found.reason


@pytest.mark.parametrize(
    ("known", "tolerance", "plausible"),
    # The baseline has 1741 of 2000, 87.05 %, with a standard error of 0.75 points: 1.47 at 95 %, on both sides.
    [(0.8705, 0.001, True), (0.90, 0.03, True), (0.914, 0.03, True), (0.916, 0.03, False), (0.82, 0.03, False)],
)
def test_a_baseline_is_held_to_what_it_is_known_to_reach(
    measurements: Measurements, policy: Policy, known: float, tolerance: float, plausible: bool
) -> None:
    strict = dataclasses.replace(policy, baseline_score={"tiny_facts": known}, baseline_tolerance=tolerance)
    found = faults(measurements, strict)
    assert [f.subject for f in found] == ([] if plausible else ["tiny_facts"])
    assert all("something other than quantization is wrong" in f.reason for f in found)


def perplexity(words: np.ndarray, loss: np.ndarray) -> SampleSet:
    """Documents of so many words with a loss per word, in nats."""
    rows = zip(words, loss, strict=True)
    samples = tuple(
        Sample("wikitext", i, "none", f"{i}", "", "", -float(w * x), float(w)) for i, (w, x) in enumerate(rows)
    )
    return SampleSet("wikitext", "word_perplexity", samples, "perplexity")


def test_a_perplexity_is_known_relatively(measurements: Measurements) -> None:
    rng = np.random.RandomState(3)
    docs = perplexity(rng.randint(200, 900, 60), 2.0 + 0.1 * rng.standard_normal(60))
    both = dataclasses.replace(measurements, samples={"wikitext": (docs, docs)}, control={}, launches=())
    policy = Policy(margins={"wikitext": 0.02}, baseline_tolerance=0.03)
    for known, plausible in (
        (docs.mean, True),
        (1.03 * docs.mean, True),
        (1.2 * docs.mean, False),
        (0.9 * docs.mean, False),
    ):
        found = faults(both, dataclasses.replace(policy, baseline_score={"wikitext": known}))
        assert (found == []) is plausible


def test_standard_error_is_that_of_repeated_draws() -> None:
    """Of a mean the textbook's, of passages that of their means, of a perplexity what resampling documents gives."""
    scores = np.random.RandomState(1).binomial(1, 0.7, 800).astype(float)
    assert standard_error(make_samples("t", scores)) == pytest.approx(scores.std(ddof=1) / math.sqrt(800))

    passages = make_samples("t", np.repeat(scores[:100], 8))
    shared = dataclasses.replace(
        passages, samples=tuple(dataclasses.replace(s, cluster=f"p{i // 8}") for i, s in enumerate(passages.samples))
    )
    assert standard_error(shared) == pytest.approx(scores[:100].std(ddof=1) / math.sqrt(100))

    rng = np.random.RandomState(2)
    words, loss = rng.randint(50, 900, 200), 2 + 0.3 * rng.standard_normal(200)
    draws = rng.randint(0, 200, (4000, 200))
    means = (words * loss)[draws].sum(axis=1) / words[draws].sum(axis=1)
    assert standard_error(perplexity(words, loss)) == pytest.approx(means.std(), rel=0.05)
    assert standard_error(make_samples("t", np.ones(1))) == 0.0


@pytest.mark.parametrize(
    ("promised", "effective", "fault"),
    [
        ("auto", "auto", False),
        ("auto", "bfloat16", False),
        ("auto", None, False),
        ("fp8", None, False),
        ("fp8", "fp8_e4m3", False),
        ("fp8_e4m3", "torch.float8_e4m3fnuz", False),
        ("fp8", "auto", True),
        ("fp8", "fp8_e5m2", True),
        ("auto", "fp8", True),
    ],
)
def test_names_of_the_same_cache_are_the_same(promised: str, effective: str | None, fault: bool) -> None:
    assert (kv_cache_fault(promised, effective) is not None) is fault


@pytest.mark.parametrize(
    ("argv", "same"),
    [
        (("--max-num-seqs", "32", "--kv-cache-dtype", "fp8"), True),
        (("--max-num-seqs", "32", "--quantization=quark"), True),
        (("--port=9000", "--served-model-name", "x", "--max-num-seqs", "32"), True),
        (("--max_num_seqs=32",), True),
        (("--max-num-seqs", "64"), False),
        (("--max-num-seqs", "32", "--enforce-eager"), False),
        ((), False),
    ],
)
def test_only_flags_that_belong_to_the_artefact_may_differ(argv: tuple[str, ...], same: bool) -> None:
    base = Server("0.32.0", "CPU", ("vllm", "serve", "a", "--max-num-seqs", "32"), {})
    other = dataclasses.replace(base, argv=("vllm", "serve", "b", *argv))
    assert (differences(base, other) == ()) is same


def test_what_a_runtime_does_to_a_checkpoint_may_differ_between_the_sides() -> None:
    base = Server("transformers 5.17.0", "CPU", (), {}, runtime="transformers 5.17.0, 16-bit weights")
    made = dataclasses.replace(base, runtime="transformers 5.17.0, dequantized weights, simulated FP8 activations")
    assert differences(base, made) == ()
    assert not made.measures_speed
    newer = dataclasses.replace(made, runtime="transformers 5.18.0, dequantized weights", version="transformers 5.18.0")
    assert [line.split(":")[0] for line in differences(base, newer)] == ["Runtime differs", "Version differs"]


@pytest.mark.parametrize(
    ("right", "items", "chance", "words"),
    [
        (0, 400, 0.0, "The baseline has 0.00% on tiny_facts (above 0.00%), where knowing nothing reaches 0"),
        (4, 400, 0.0, "so little shows no loss of 1.00%, whatever the candidate scores"),
        (9, 400, 0.0, None),
        (104, 400, 0.25, "The baseline has 26.00% on tiny_facts (above 22.39%), where guessing reaches 25.00%"),
        (140, 400, 0.25, None),
        (140, 400, 0.3333, "where guessing reaches 33.33%"),
        (2590, 10_000, 0.25, "(above 25.18%), where guessing reaches 25.00%: so little shows no loss of 1.00%"),
    ],
)
def test_a_task_that_shows_nothing_is_void(
    measurements: Measurements, policy: Policy, right: int, items: int, chance: float, words: str | None
) -> None:
    """Both sides alike, and yet nothing is known of the loss: there is nothing to lose."""
    pair = make_pair("tiny_facts", items, right=right, losses=0, gains=0)
    found = dataclasses.replace(measurements, samples={"tiny_facts": pair}, control={}, chance={"tiny_facts": chance})
    judged = dataclasses.replace(policy, margins={"tiny_facts": 0.01}, baseline_score={})
    reasons = [finding.reason for finding in faults(found, judged) if finding.subject == "tiny_facts"]
    assert len(reasons) == (words is not None)
    assert words is None or words in reasons[0]
    assert not [f for f in faults(found, dataclasses.replace(judged, margins={})) if f.subject == "tiny_facts"]


@pytest.mark.parametrize(
    ("rounded", "target", "is_void"),
    [("even", "up", True), ("up", "even", True), ("up", "up", False), (None, "up", False), ("even", None, False)],
)
def test_a_proof_by_another_rounding_than_the_target_s_is_void(
    measurements: Measurements, policy: Policy, rounded: str | None, target: str | None, is_void: bool
) -> None:
    """None of the candidate is the metal itself, None of the target a recipe that names no rounding."""
    candidate = dataclasses.replace(measurements.candidate, mx_scales=rounded)
    report = judge(
        dataclasses.replace(measurements, candidate=candidate), dataclasses.replace(policy, mx_scales=target)
    )
    void = [finding.reason for finding in report.findings if finding.subject == "rounding"]
    assert bool(void) == is_void
    assert (report.verdict is Verdict.INVALID) == is_void
    assert ("mx_scales" in report.policy.to_json()) == (target is not None)
    assert ("mx_scales" in candidate.to_json()) == (rounded is not None)
