"""Long texts: does a checkpoint read, and find, what stands far back in a long prompt as its baseline does?

Both sides read the same texts, as long as the server allows, and tell the log probability of each token and those of
the likeliest few (vLLM's ``prompt_logprobs``), in one request a text. Needles stand in a text at several depths:
sentences with a number that nothing else tells. Behind the text come a question and the answer for each.

**Likelihood by position**, in buckets: the log likelihood of a text's own tokens, needles and questions left out. The
change is paired by text and judged as a perplexity is, in each bucket by itself: a loss from some position on is one
that the mean of a text hides.

**KL by position**, in the same buckets, of evenly spaced positions. It is the canary's lower bound (`eval.canary`): too
large a bound is proof of too large a divergence, a small one is no proof of a small one.

**Retrieval**: a needle is found where each token of its answer is the likeliest, which is what greedy decoding would
say. Each answer is read with the right answers before it.

Texts are the clusters of all three: tokens of a text are not independent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quantmint.eval.canary import Answer, divergence
from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import digest
from quantmint.eval.records import Record, checked, to_columns, to_rows
from quantmint.eval.samples import Sample, SampleSet
from quantmint.eval.statistics.paired import ratio
from quantmint.eval.verdict import Verdict

LIKELIHOOD, RETRIEVAL = "long_likelihood", "long_retrieval"
"""The tasks of this endpoint; of a bucket's likelihood the position where it ends follows (`likelihood_task`)."""
METRIC = "token_perplexity"
_SHORTEST, _BUCKETS = 1024, 6
SAMPLED: Final = 256
"""Positions of a bucket of each text whose KL is taken; what differs lies between texts."""
MOST_LOGPROBS: Final = 1 << 20
"""Most log probabilities of an answer: longer texts are asked for fewer of the likeliest tokens."""
_UNREAD: Final = -30.0
"""Log probability, in nats, of each token of a text that a candidate gave no finite numbers for."""
_PLACES: Final = (
    "blue lantern", "north gate", "old mill", "third cellar", "glass harbour", "red ladder", "quiet engine",
    "long bridge", "stone garden", "paper crown", "second tower", "green ferry", "iron kettle", "winter room",
    "low field", "white barrel",
)  # fmt: skip


def bucket_ends(length: int) -> tuple[int, ...]:
    """Return the positions where buckets end, for texts of so many tokens: at most six, each twice the one before.

    The last is the length; the first is 1,024 or more where at least three buckets remain.

    >>> bucket_ends(8192)
    (1024, 2048, 4096, 8192)
    >>> bucket_ends(131072)[:2]
    (4096, 8192)
    """
    count = min(_BUCKETS, max(3, 1 + int(math.log2(max(1, length / _SHORTEST)))))
    return tuple(math.ceil(length / 2**power) for power in reversed(range(count)))


def needle_count(length: int) -> int:
    """Return the number of needles in a text: one for each 256 tokens, at least two and at most eight."""
    return min(8, max(2, length // 256))


def likelihood_task(end: int) -> str:
    """Return the name of the task of the bucket that ends at a position."""
    return f"{LIKELIHOOD}_to_{end}"


@dataclass(frozen=True, slots=True)
class LongText(Record):
    """One prompt: token ids, of which the first ``body`` are the text with its needles, and the rest questions.

    ``needles`` are the spans [start, end) of the needles in the text, ``answers`` those of the answers to their
    questions, both in the order of depth.
    """

    name: str
    ids: tuple[int, ...]
    body: int
    needles: tuple[tuple[int, int], ...]
    answers: tuple[tuple[int, int], ...]

    @property
    def digest(self) -> str:
        """Return a hash of the token ids."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]

    def text_positions(self, start: int, end: int) -> list[int]:
        """Return the positions in [start, end) of the text's own tokens, without the first of all and the needles."""
        inside = {position for first, last in self.needles for position in range(first, last)}
        return [position for position in range(max(start, 1), min(end, self.body)) if position not in inside]

    def sampled(self, start: int, end: int) -> list[int]:
        """Return at most `SAMPLED` evenly spaced positions of `text_positions`."""
        positions = self.text_positions(start, end)
        step = max(1.0, len(positions) / SAMPLED)
        return [positions[int(number * step)] for number in range(min(SAMPLED, len(positions)))]


def build(
    stream: Iterable[int], encode: Callable[[str], Sequence[int]], *, texts: int, length: int, needles: int, seed: int
) -> tuple[LongText, ...]:
    """Return ``texts`` prompts of ``length`` tokens from a stream of token ids; ``encode`` tokenizes a sentence.

    The sentences of needles stand at the middles of equal parts of a text. Raises `MeasurementError` where the stream
    is too short, or the sentences leave less than half of the length to the text.
    """
    tokens = iter(stream)
    built = []
    for number in range(texts):
        sentences = [_sentences(seed, number, needle) for needle in range(needles)]
        hidden = [list(encode(statement)) for statement, _, _ in sentences]
        questions = [(list(encode(question)), list(encode(answer))) for _, question, answer in sentences]
        room = length - sum(map(len, hidden)) - sum(len(question) + len(answer) for question, answer in questions)
        if room < length // 2:
            raise MeasurementError(
                f"{needles} needles with their questions take {length - room} of the {length} tokens of a text: "
                "ask for fewer, or for longer texts"
            )
        body_tokens = [token for _, token in zip(range(room), tokens, strict=False)]
        if len(body_tokens) < room:
            missing = f"the texts make {number} of {texts} prompts of {length:,} tokens"
            raise MeasurementError(f"{missing}: more text is needed, or ask for at most {number}")
        built.append(_joined(f"text {number + 1}", body_tokens, hidden, questions))
    return tuple(built)


def _joined(
    name: str,
    body_tokens: Sequence[int],
    hidden: Sequence[Sequence[int]],
    questions: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> LongText:
    ids: list[int] = []
    needles, answers = [], []
    before = 0
    for number, sentence in enumerate(hidden):
        until = len(body_tokens) * (2 * number + 1) // (2 * len(hidden))
        ids += body_tokens[before:until]
        needles.append((len(ids), len(ids) + len(sentence)))
        ids += sentence
        before = until
    ids += body_tokens[before:]
    body = len(ids)
    for question, answer in questions:
        ids += question
        answers.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return LongText(name, tuple(ids), body, tuple(needles), tuple(answers))


def _sentences(seed: int, text: int, needle: int) -> tuple[str, str, str]:
    """Return a needle's sentence, the question about it, and its answer."""
    number = int.from_bytes(hashlib.sha256(f"{seed}: needle {needle} of text {text}".encode()).digest()[:8])
    place, code = _PLACES[(number + needle) % len(_PLACES)], f"{10_000 + number // len(_PLACES) % 90_000}"
    place = f"{place} {needle + 1}"
    return f" The code of the {place} is {code}.", f"\n\nWhat is the code of the {place}? It is", f" {code}"


@dataclass(frozen=True, slots=True)
class LongAnswer(Record):
    """One side's reading of a text, in nats.

    ``actual`` [n - 1] are the log probabilities of the tokens from the second on, empty where the server gave a number
    that is not finite. ``retrieved`` says of each needle whether its answer is the likeliest. ``tokens`` and
    ``logprobs`` [positions][k] are the likeliest tokens at the sampled positions of all buckets, in ascending order.
    """

    text: str
    actual: tuple[float, ...]
    retrieved: tuple[bool, ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


def reading(text: LongText, ends: Sequence[int], answer: Answer) -> LongAnswer:
    """Return what is kept of a server's answer about all positions of a text."""
    if not answer.actual:
        return LongAnswer(text.name, (), (False,) * len(text.answers), (), ())

    def is_likeliest(position: int) -> bool:
        return answer.actual[position - 1] >= answer.logprobs[position - 1][0]

    positions = [position - 1 for start, end in _buckets(ends) for position in text.sampled(start, end)]
    return LongAnswer(
        text.name,
        answer.actual,
        tuple(all(map(is_likeliest, range(start, end))) for start, end in text.answers),
        tuple(answer.tokens[position] for position in positions),
        tuple(answer.logprobs[position] for position in positions),
    )


@dataclass(frozen=True, slots=True)
class LongReadings(Record):
    """All readings of one side, in the order of the texts."""

    readings: tuple[LongAnswer, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping with one plain list per field of `LongAnswer`, each with one value per text."""
        return to_columns(LongAnswer, self.readings)

    @classmethod
    def from_json(cls, data: Any) -> LongReadings:
        """Read back a mapping that `to_json` returned. Raises `MeasurementError` for other data."""
        return checked(cls, {"readings": to_rows(data)})


def _buckets(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip((0, *ends), ends, strict=False)


def sample_sets(
    texts: Sequence[LongText], ends: Sequence[int], readings: LongReadings, settings: dict[str, Any]
) -> dict[str, SampleSet]:
    """Return the samples of one side by task: the likelihood in each bucket, and retrieval.

    A bucket with no token of a text has no sample of it.
    """
    pairs = list(zip(texts, readings.readings, strict=True))
    sets = {}
    for start, end in _buckets(ends):
        rows = []
        for number, (text, answer) in enumerate(pairs):
            positions = text.text_positions(start, end)
            values = (
                [answer.actual[position - 1] for position in positions] if answer.actual else [_UNREAD] * len(positions)
            )
            if positions:
                name = likelihood_task(end)
                rows.append(_sample(name, number, text, math.fsum(values), float(len(positions)), target=name))
        sets[likelihood_task(end)] = SampleSet(
            likelihood_task(end), METRIC, tuple(rows), "perplexity", settings=settings
        )
    needle_rows = []
    for number, (text, answer) in enumerate(pairs):
        count = len(text.answers)
        for needle, is_retrieved in enumerate(answer.retrieved):
            target = str(text.ids[slice(*text.answers[needle])])
            needle_rows.append(
                _sample(RETRIEVAL, number * count + needle, text, float(is_retrieved), 1.0, target=target)
            )
    sets[RETRIEVAL] = SampleSet(RETRIEVAL, "exact_match", tuple(needle_rows), settings=settings)
    return sets


def _sample(task: str, number: int, text: LongText, score: float, weight: float, *, target: str) -> Sample:
    return Sample(
        task, number, "none", digest([text.digest, number]), text.digest, digest(target), score, weight, text.digest
    )


@dataclass(frozen=True, slots=True)
class BucketDivergence(Record):
    """KL between the sides in one bucket of positions: sums in nats, and numbers of positions, by text."""

    start: int
    end: int
    sums: tuple[float, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LongDivergence(Record):
    """KL by position, as it was measured: a lower bound from the ``likeliest`` tokens. ``unread`` are texts without."""

    likeliest: int
    buckets: tuple[BucketDivergence, ...]
    needles: int
    unread: tuple[str, ...] = ()


def divergences(
    texts: Sequence[LongText], ends: Sequence[int], baseline: LongReadings, candidate: LongReadings, likeliest: int
) -> LongDivergence:
    """Return the KL between two sides' readings of the same texts.

    Raises `MeasurementError` where a side read other texts, and where the baseline gave no finite numbers.
    """
    names = [text.name for text in texts]
    for side, readings in (("baseline", baseline), ("candidate", candidate)):
        if [answer.text for answer in readings.readings] != names:
            raise MeasurementError(f"the {side} read other texts, or in another order")
    silent = [answer.text for answer in baseline.readings if not answer.actual]
    if silent:
        raise MeasurementError(f"the baseline has no finite log probabilities for {', '.join(silent)}")
    pairs = list(zip(texts, baseline.readings, candidate.readings, strict=True))
    read = [pair for pair in pairs if pair[2].actual]
    offsets = [0] * len(read)
    buckets = []
    for start, end in _buckets(ends):
        sums, counts = [], []
        for number, (text, first, second) in enumerate(read):
            count = len(text.sampled(start, end))
            rows = range(offsets[number], offsets[number] + count)
            offsets[number] += count
            values = [
                divergence(first.tokens[row], first.logprobs[row], second.tokens[row], second.logprobs[row])
                for row in rows
            ]
            if count:
                sums.append(round(math.fsum(values), 9))
                counts.append(count)
        buckets.append(BucketDivergence(start, end, tuple(sums), tuple(counts)))
    return LongDivergence(
        likeliest,
        tuple(buckets),
        len(texts[0].answers),
        tuple(second.text for _, _, second in pairs if not second.actual),
    )


@dataclass(frozen=True, slots=True)
class LongBucket(Record):
    """KL in one bucket of positions, nats: its mean over positions, and one-sided bounds by text at ``confidence``."""

    start: int
    end: int
    texts: int
    confidence: float
    kl: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class LongDepth(Record):
    """Needles at one depth of their texts (a share, 0 to 1): how many there are, and how many each side found."""

    depth: float
    items: int
    baseline: int
    candidate: int


@dataclass(frozen=True, slots=True)
class LongReport(Record):
    """Figures by position for a reader: KL by bucket, retrieval by depth."""

    likeliest: int
    buckets: tuple[LongBucket, ...]
    depths: tuple[LongDepth, ...]


def report(measured: LongDivergence, retrieval: tuple[SampleSet, SampleSet] | None, confidence: float) -> LongReport:
    """Return the figures of a measurement; buckets that fewer than two texts have are left out."""
    import numpy as np

    buckets = []
    for bucket in measured.buckets:
        if len(bucket.sums) < 2:
            continue
        mean = ratio(np.array(bucket.sums), np.array(bucket.positions, dtype=np.float64))
        below, above = mean.quantiles(confidence)
        low, high = max(0.0, mean.value - below * mean.standard_error), mean.value + above * mean.standard_error
        buckets.append(LongBucket(bucket.start, bucket.end, mean.units, confidence, mean.value, low, high))
    return LongReport(measured.likeliest, tuple(buckets), tuple(_depths(measured.needles, retrieval)))


def _depths(needles: int, retrieval: tuple[SampleSet, SampleSet] | None) -> Iterator[LongDepth]:
    if retrieval is None:
        return
    for number in range(needles):
        scores = [
            {sample.doc_id: sample.score for sample in side.samples if sample.doc_id % needles == number}
            for side in retrieval
        ]
        counts = [round(sum(side.values())) for side in scores]
        yield LongDepth((2 * number + 1) / (2 * needles), len(scores[0]), counts[0], counts[1])


def judge(bucket: LongBucket, max_kl: float) -> tuple[Verdict, str]:
    """Return the verdict on the KL of a bucket, and the reason.

    FAIL where the lower bound is above the limit, INCONCLUSIVE where the limit lies within the bounds. PASS says that
    no more was shown: the figure is a lower bound of the true KL.
    """
    place = f"from position {bucket.start:,} to {bucket.end:,}"
    bounds = (
        f"KL is at least {bucket.kl:.3g} nats {place} ({bucket.lower:.3g} to {bucket.upper:.3g}, {bucket.texts} texts)"
    )
    if bucket.lower > max_kl:
        return Verdict.FAIL, f"{bounds}, expected at most {max_kl:g}"
    if bucket.upper > max_kl:
        return Verdict.INCONCLUSIVE, f"{bounds}, on both sides of the limit of {max_kl:g}"
    return Verdict.PASS, f"{bounds}, below the limit of {max_kl:g}"
