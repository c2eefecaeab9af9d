"""Long texts: how they are built, what a loss from some position on shows, and the gate's verdicts on both."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from quantmint.eval import long_context
from quantmint.eval.canary import Answer
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import Policy, judge
from quantmint.eval.long_context import LongReadings, LongText, bucket_ends, build, likelihood_task
from quantmint.eval.measurements import Measurements
from quantmint.eval.report import long as section
from quantmint.eval.verdict import Verdict
from tests.eval.report import made

LENGTH, TEXTS, NEEDLES = 2048, 12, 4
ENDS = bucket_ends(LENGTH)
VOCABULARY = 50


def encode(sentence: str) -> list[int]:
    """A token a word, none of which the texts have."""
    return [1_000_000 + zlib.crc32(word.strip(".?").encode()) for word in sentence.split()]


def texts(number: int = TEXTS) -> tuple[LongText, ...]:
    return build(count(1), encode, texts=number, length=LENGTH, needles=NEEDLES, seed=1)


def side(rng: np.random.Generator, text: LongText, noise: Callable[[int], float], lost: frozenset[int]) -> Answer:
    """What a side says of a text: five likeliest tokens, of which the right one is second, but first in an answer."""
    shared = np.random.default_rng(sum(text.ids[:50]))
    actual, tokens, logprobs = [], [], []
    found = {position for n, span in enumerate(text.answers) if n not in lost for position in range(*span)}
    for position in range(1, len(text.ids)):
        logits = shared.normal(0, 1.5, VOCABULARY) + rng.normal(0, 1, VOCABULARY) * noise(position)
        values = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-values)[:5]
        right = int(order[0]) if position in found else int(shared.integers(VOCABULARY))
        actual.append(float(values[right]))
        tokens.append(tuple(map(int, order)))
        logprobs.append(tuple(float(values[n]) for n in order))
    return Answer(text.name, text.ids, tuple(actual), tuple(tokens), tuple(logprobs))


def measured(noise: Callable[[int], float], lost: frozenset[int] = frozenset()) -> Measurements:
    """A baseline, and a candidate whose logits have this noise at each position and that loses these needles."""
    asked = texts()
    rng = np.random.default_rng(5)
    readings = [
        LongReadings(tuple(long_context.reading(text, ENDS, side(rng, text, own, gone)) for text in asked))
        for own, gone in ((lambda _: 0.0, frozenset[int]()), (noise, lost))
    ]
    sets = [long_context.sample_sets(asked, ENDS, each, {"temperature": 0}) for each in readings]
    return made.measurements(
        samples={**made.measurements().samples, **{task: (sets[0][task], sets[1][task]) for task in sets[0]}},
        long=long_context.divergences(asked, ENDS, *readings, likeliest=5),
    )


def limits(**changes: object) -> Policy:
    margins = {likelihood_task(end): 0.02 for end in ENDS} | {long_context.RETRIEVAL: 0.35}
    return made.policy(margins={**made.policy().margins, **margins}, long_kl=0.05, **changes)


def test_buckets_double_up_to_the_length() -> None:
    assert bucket_ends(8192) == (1024, 2048, 4096, 8192)
    assert bucket_ends(131_072) == (4096, 8192, 16_384, 32_768, 65_536, 131_072)
    assert bucket_ends(511) == (128, 256, 511)


def test_texts_have_their_length_and_their_needles_at_their_depths() -> None:
    asked = texts()
    own = [token for text in asked for token in text.ids if token < 1_000_000]
    assert own[:3] == [1, 2, 3]
    for number, text in enumerate(asked):
        assert len(text.ids) == LENGTH
        for needle, (start, end) in enumerate(text.needles):
            hidden = text.ids[start:end]
            assert start / text.body == pytest.approx((2 * needle + 1) / (2 * NEEDLES), abs=0.02)
            first, last = text.answers[needle]
            assert last - first == 1
            assert hidden[-1] == text.ids[first]
            assert text.ids[last - 1] not in text.ids[text.body : first]
        positions = text.text_positions(0, LENGTH)
        assert len(positions) + 1 + sum(end - start for start, end in text.needles) == text.body
        assert len(text.sampled(1024, LENGTH)) == long_context.SAMPLED
        assert number == 0 or asked[0].ids[:50] != text.ids[:50]


def test_texts_that_are_too_few_or_too_short_are_refused() -> None:
    with pytest.raises(MeasurementError, match=r"the texts make 1 of 12 prompts of 2,048 tokens: .* at most 1"):
        build(range(3000), encode, texts=TEXTS, length=LENGTH, needles=NEEDLES, seed=1)
    with pytest.raises(MeasurementError, match=r"4 needles with their questions take \d+ of the 96 tokens"):
        build(count(), encode, texts=TEXTS, length=96, needles=NEEDLES, seed=1)


def test_a_copy_passes_every_bucket() -> None:
    report = judge(measured(lambda _: 0.0), limits())
    assert [report.verdict_of("accuracy", likelihood_task(end)) for end in ENDS] == [Verdict.PASS] * len(ENDS)
    assert report.verdict_of("accuracy", long_context.RETRIEVAL) is Verdict.PASS
    assert report.verdict_of("long") is Verdict.PASS
    assert report.long is not None
    assert all(bucket.kl == 0 for bucket in report.long.buckets)


def test_a_rot_from_a_position_on_fails_there_and_nowhere_before() -> None:
    report = judge(measured(lambda position: 1.2 if position >= ENDS[-2] else 0.02), limits())
    verdicts = [report.verdict_of("accuracy", likelihood_task(end)) for end in ENDS]
    assert verdicts == [*[Verdict.PASS] * (len(ENDS) - 1), Verdict.FAIL]
    kl = [report.verdict_of("long", f"positions to {end}") for end in ENDS]
    assert kl == verdicts
    assert report.verdict is Verdict.FAIL


def test_lost_needles_fail_by_their_depth() -> None:
    report = judge(measured(lambda _: 0.0, lost=frozenset({1, 2})), limits())
    assert report.verdict_of("accuracy", long_context.RETRIEVAL) is Verdict.FAIL
    assert report.long is not None
    assert [(depth.baseline, depth.candidate) for depth in report.long.depths] == [(12, 12), (12, 0), (12, 0), (12, 12)]


def test_a_text_without_finite_numbers_fails_and_a_silent_baseline_is_an_error() -> None:
    asked = texts(3)
    rng = np.random.default_rng(1)
    good = [long_context.reading(text, ENDS, side(rng, text, lambda _: 0.0, frozenset())) for text in asked]
    silent = long_context.reading(asked[0], ENDS, Answer("x", asked[0].ids, (), (), ()))
    baseline, candidate = LongReadings(tuple(good)), LongReadings((silent, *good[1:]))
    found = long_context.divergences(asked, ENDS, baseline, candidate, likeliest=5)
    assert found.unread == ("text 1",)
    report = judge(made.measurements(long=found), made.policy())
    assert "The candidate gave no finite log probabilities for text 1." in report.reasons
    with pytest.raises(MeasurementError, match="the baseline has no finite log probabilities for text 1"):
        long_context.divergences(asked, ENDS, candidate, baseline, likeliest=5)


@pytest.mark.slow
def test_the_record_is_read_back_and_the_page_draws_it() -> None:
    known = measured(lambda position: position / 8000)
    again = Measurements.read(known.to_json(), known.samples, known.control)
    assert again.long == known.long
    gate = judge(again, limits())
    assert type(gate).from_json(gate.to_json()) == gate
    view = section.view(gate)
    assert view is not None
    assert "KL" in str(view["figure"])
    assert len(view["rows"]) == len(ENDS)
