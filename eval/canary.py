"""The canary: does a checkpoint still say what its baseline says, token by token, on texts that neither was made with?

Both sides read the same prompts and tell, at every position, the log probability of the token that follows and those
of the likeliest few (vLLM's ``prompt_logprobs``). That takes seconds, and a checkpoint with broken scales shows there
as plainly as after an hour of tasks. It is a screen: it stops what is broken and decides nothing about what is not.

**Agreement** is the share of positions at which both sides have the same likeliest token. Logits of bfloat16 tie; the
sides agree where one token is among the likeliest of both.

**KL** is KL(baseline || candidate) in nats, averaged over positions. Only the likeliest tokens are known, so the
distributions are coarsened: each of the baseline's likeliest tokens, and all others together. By the data processing
inequality (Cover and Thomas, Elements of Information Theory, 2nd ed., section 2.8, and the log sum inequality, theorem
2.7.1) a coarser view never has the larger divergence. A token of the baseline's that the candidate does not list has
at most the probability of the last one that it lists; with each unknown probability at its largest the sum only gets
smaller. So what is given is a lower bound of the true KL: where it is too large, so is the true one.

**Intervals** treat a prompt as a cluster: neighbouring positions err together. Both figures are ratios of sums over
prompts (`eval.statistics.paired.ratio`), with Student's t.

**Looks.** A quarter of the prompts decides most comparisons: `is_clear` ends one whose intervals at `EARLY_CONFIDENCE`
lie wholly on one side. What is near a limit is asked all prompts, and judged by the figure itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record, checked, to_columns, to_rows
from quantmint.eval.statistics.paired import ratio
from quantmint.eval.verdict import Verdict

DIGITS = 6
"""Decimals of a log probability that are kept; float32 knows no more of it."""

_LEAST = 1e-6  # a probability that is found by subtraction is known to this, by the digits kept
_WORST = 5


@dataclass(frozen=True, slots=True)
class Answer(Record):
    """One side's answer to a prompt of n tokens, with log probabilities in nats.

    ``ids`` [n] are the prompt's token ids. ``actual`` [n - 1] are the log probabilities of the tokens that follow, from
    the second on; ``tokens`` and ``logprobs`` [n - 1][k] are the likeliest k tokens at each position with their log
    probabilities, likeliest first. All three are empty if the server returned a number that is not finite.
    """

    prompt: str
    ids: tuple[int, ...]
    actual: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    @property
    def positions(self) -> int:
        """Return the number of positions with a next token: n - 1 for a prompt of n tokens, answered or not."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class CanaryAnswers(Record):
    """All answers of one side, in the order of the prompts."""

    answers: tuple[Answer, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping with one plain list per field of `Answer`, each with one value per prompt."""
        return to_columns(Answer, self.answers)

    @classmethod
    def from_json(cls, data: Any) -> CanaryAnswers:
        """Read back a mapping that `to_json` returned. Raises `MeasurementError` for other data."""
        return checked(cls, {"answers": to_rows(data)})


@dataclass(frozen=True, slots=True)
class Canary(Record):
    """A candidate's answers against its baseline's.

    ``agreement`` is a share of ``positions``, where a prompt without an answer agrees nowhere. ``kl`` is a mean in
    nats over the positions that were answered, a lower bound of the true one. The intervals are two-sided at
    ``confidence``. The perplexities are of the prompts themselves, over answered positions. ``worst`` are the prompts
    of the largest mean KL, worst first; ``unanswered`` those for which the candidate gave no finite number. Where fewer
    than two were answered, the KL has no interval.
    """

    prompts: int
    positions: int
    confidence: float
    agreement: float
    agreement_low: float
    agreement_high: float
    kl: float
    kl_low: float
    kl_high: float
    baseline_perplexity: float
    candidate_perplexity: float
    worst: tuple[tuple[str, float], ...]
    unanswered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CanaryPolicy(Record):
    """Limits that stop a checkpoint: an agreement below ``min_agreement`` (a share), a mean KL above ``max_kl`` (nats).

    A stopped checkpoint is broken (FAIL) if a figure's whole interval lies beyond ``broken_agreement`` or ``broken_kl``
    (None: beyond the limits above). Otherwise it is only unlikely to pass (INCONCLUSIVE).
    """

    min_agreement: Annotated[float, Field(ge=0, le=1)]
    max_kl: Annotated[float, Field(gt=0)]
    broken_agreement: Annotated[float, Field(ge=0, le=1)] | None = None
    broken_kl: Annotated[float, Field(gt=0)] | None = None


def compare(baseline: CanaryAnswers, candidate: CanaryAnswers, confidence: float = 0.95) -> Canary:
    """Compare two sides' answers to the same prompts, at least two; the intervals are two-sided at ``confidence``.

    Raises `MeasurementError` for fewer prompts, for other prompts or tokens on the two sides, and for a prompt that the
    baseline left unanswered.
    """
    _require_comparable(baseline, candidate)
    agreeing: list[float] = []
    divergences: list[float] = []
    answer_pairs = list(zip(baseline.answers, candidate.answers, strict=True))
    for reference, answer in answer_pairs:
        rows = list(
            zip(reference.tokens, reference.logprobs, answer.tokens, answer.logprobs, strict=bool(answer.tokens))
        )
        agreeing.append(float(sum(_agree(*row) for row in rows)))
        divergences.append(sum(divergence(*row) for row in rows))
    answered = [number for number, (_, answer) in enumerate(answer_pairs) if answer.actual]
    sizes = [reference.positions for reference, _ in answer_pairs]
    agreement, agreement_error = _ratio(agreeing, sizes, confidence)
    kl, kl_error = _ratio([divergences[n] for n in answered], [sizes[n] for n in answered], confidence)
    means = [(answer_pairs[n][0].prompt, divergences[n] / sizes[n]) for n in answered]
    return Canary(
        prompts=len(answer_pairs),
        positions=sum(sizes),
        confidence=confidence,
        agreement=agreement,
        agreement_low=max(0.0, agreement - agreement_error),
        agreement_high=min(1.0, agreement + agreement_error),
        kl=kl,
        kl_low=max(0.0, kl - kl_error),
        kl_high=kl + kl_error,
        baseline_perplexity=_perplexity([answer_pairs[n][0] for n in answered]),
        candidate_perplexity=_perplexity([answer_pairs[n][1] for n in answered]),
        worst=tuple(sorted(means, key=lambda mean: -mean[1])[:_WORST]),
        unanswered=tuple(answer.prompt for _, answer in answer_pairs if not answer.actual),
    )


def judge(canary: Canary, policy: CanaryPolicy) -> tuple[Verdict, str]:
    """Return the verdict on a canary, and the reason with its figures in one text.

    FAIL if a prompt has no answer, or if the whole interval of a figure lies beyond the limit of a broken checkpoint;
    INCONCLUSIVE if a figure itself lies beyond the limit for passing; else PASS.
    """
    figures = (
        f"the likeliest token is the baseline's at {canary.agreement:.1%} of {canary.positions:,} positions "
        f"({canary.agreement_low:.1%} to {canary.agreement_high:.1%}), "
        f"KL {canary.kl:.3g} nats ({canary.kl_low:.3g} to {canary.kl_high:.3g})"
    )
    worst = f"; worst: {canary.worst[0][0]}" if canary.worst else ""
    broken: list[str] = []
    doubtful: list[str] = []
    if canary.unanswered:
        broken.append(f"no finite log probability for {len(canary.unanswered)} of {canary.prompts} prompts")
    limit, sound = _broken(policy.broken_agreement, policy.min_agreement)
    if canary.agreement_high < limit:
        broken.append(f"agreement below {limit:.1%} by its whole interval{sound}")
    elif canary.agreement < policy.min_agreement:
        doubtful.append(f"agreement {canary.agreement:.1%} is below {policy.min_agreement:.1%}")
    limit, sound = _broken(policy.broken_kl, policy.max_kl)
    if canary.kl_low > limit:
        broken.append(f"KL above {limit:.3g} nats by its whole interval{sound}")
    elif canary.kl > policy.max_kl:
        doubtful.append(f"KL {canary.kl:.3g} nats is above {policy.max_kl:.3g}")
    if broken:
        return Verdict.FAIL, f"{', '.join(broken)}: {figures}{worst}"
    if doubtful:
        advice = "stopped early, since hardly a task is passed so: to ask them all the same, `gate: {canary: null}`"
        return Verdict.INCONCLUSIVE, f"{', '.join(doubtful)}: {figures}{worst}; {advice}"
    return Verdict.PASS, f"{figures}; asked for: at least {policy.min_agreement:.1%}, at most {policy.max_kl:.3g}"


def _broken(broken: float | None, least: float) -> tuple[float, str]:
    """Return the limit that a whole interval must lie beyond to FAIL, and a clause for the reason.

    Without ``broken`` the limit is ``least`` and the clause is empty.
    """
    return (least, "") if broken is None else (broken, ", which no sound quantization shows")


EARLY_CONFIDENCE: Final = 0.99
"""Of the intervals by which a comparison is over before all prompts are asked."""
_FEWEST_PROMPTS: Final = 12


def look_ends(prompts: int) -> tuple[int, ...]:
    """Return the ascending numbers of prompts after which a comparison is looked at: a quarter, half and all of them.

    Each is at least 12, or all prompts if there are fewer.
    """
    ends = (prompts // 4, prompts // 2, prompts)
    return tuple(sorted({max(end, min(_FEWEST_PROMPTS, prompts)) for end in ends}))


def is_clear(canary: Canary, policy: CanaryPolicy) -> bool:
    """Return whether more prompts would hardly change the verdict: it is FAIL, or no limit lies within an interval."""
    if judge(canary, policy)[0] is Verdict.FAIL:
        return True
    agreement = [policy.min_agreement, policy.broken_agreement]
    kl = [policy.max_kl, policy.broken_kl]
    return not any(
        limit is not None and low < limit < high
        for low, high, limits in (
            (canary.agreement_low, canary.agreement_high, agreement),
            (canary.kl_low, canary.kl_high, kl),
        )
        for limit in limits
    )


def divergence(
    tokens: Sequence[int], logprobs: Sequence[float], other_tokens: Sequence[int], other_logprobs: Sequence[float]
) -> float:
    """Return a lower bound of KL(first || other) in nats, at least 0, at one position.

    ``tokens`` and ``logprobs`` are the first side's likeliest tokens with their log probabilities in nats, likeliest
    first; ``other_tokens`` and ``other_logprobs`` are the other side's.
    """
    listed = dict(zip(other_tokens, other_logprobs, strict=True))
    total, unlisted, other_unlisted = 0.0, 1.0, 1.0
    for token, logprob in zip(tokens, logprobs, strict=True):
        probability = math.exp(logprob)
        unlisted -= probability
        if token in listed:
            other_unlisted -= math.exp(listed[token])
        total += probability * (logprob - listed.get(token, other_logprobs[-1]))
    if unlisted > _LEAST:
        total += unlisted * math.log(unlisted / max(other_unlisted, _LEAST))
    return max(0.0, total)  # where the unknown were put too high, zero is the better bound


def _agree(
    tokens: Sequence[int], logprobs: Sequence[float], other_tokens: Sequence[int], other_logprobs: Sequence[float]
) -> bool:
    likeliest = {token for token, value in zip(tokens, logprobs, strict=True) if value == logprobs[0]}
    other_likeliest = {
        token for token, value in zip(other_tokens, other_logprobs, strict=True) if value == other_logprobs[0]
    }
    return bool(likeliest & other_likeliest)


def _ratio(sums: Sequence[float], sizes: Sequence[int], confidence: float) -> tuple[float, float]:
    """Return the mean over all positions, sum(sums) / sum(sizes), and half the width of its two-sided interval.

    ``sums`` and ``sizes`` have one value per prompt. Below two prompts the half width is 0; without prompts the mean is
    0.
    """
    import numpy as np
    from scipy import stats

    if len(sizes) < 2:
        return (sums[0] / sizes[0] if sizes else 0.0), 0.0
    mean = ratio(np.array(sums), np.array(sizes, dtype=np.float64))
    return mean.value, float(stats.t.ppf((1 + confidence) / 2, mean.units - 1)) * mean.standard_error


def _perplexity(answers: Sequence[Answer]) -> float:
    values = [value for answer in answers for value in answer.actual]
    return math.exp(min(-sum(values) / len(values), 700.0)) if values else 0.0


def _require_comparable(baseline: CanaryAnswers, candidate: CanaryAnswers) -> None:
    names, candidate_names = ([answer.prompt for answer in side.answers] for side in (baseline, candidate))
    if names != candidate_names:
        raise MeasurementError("the canaries were asked different prompts, or in another order")
    if len(names) < 2:
        raise MeasurementError(f"a canary needs two prompts at least, found {len(names)}")
    for reference, other in zip(baseline.answers, candidate.answers, strict=True):
        if reference.ids != other.ids:
            raise MeasurementError(
                f"prompt {reference.prompt!r} has other tokens on the two sides, so nothing is compared"
            )
        if not reference.actual:
            raise MeasurementError(f"the baseline has no finite log probabilities for prompt {reference.prompt!r}")
