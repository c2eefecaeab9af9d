"""KL as a promise: how far next-token distributions lie from the baseline's, by an interval's upper end.

The figure is KL(baseline || candidate) of the next token in nats, averaged over positions of held-out texts, evenly
spaced in each (`places`).

**Over the full vocabulary** (`exact`) it is computed as it is defined, P(i) ln(P(i) / Q(i)) summed over all tokens i.

**From the likeliest tokens** alone, which is what vLLM gives, no number bounds it from above: Q may be as near to 0 as
it likes on a token that neither side lists, and the divergence as large. So the baseline draws a token at each
position, which tells of the rest. Let S be the tokens that both sides list, p and q what the two give to all others
together. By the chain rule (Cover and Thomas, Elements of Information Theory, 2nd ed., theorem 2.5.3)

    KL(P || Q) = sum over S of P ln(P / Q)  +  p ln(p / q)  +  p KL(P' || Q')

with P' and Q' the distributions of the others. The first two terms are known; the last is at least 0, which makes the
first two a lower bound (the data processing inequality). A token x that is drawn from P is outside of S with
probability p, so the last term is the mean of ln(P'(x) / Q'(x)) where x is not in S, and of 0 where it is: a known
amount as well (importance sampling). `sampled_divergence` is what is known plus that amount: its mean is the divergence
itself, whatever the tails are, and the upper end of its interval bounds it at the interval's confidence.

**The interval** treats a text as a cluster: neighbouring positions err together. It is that of a ratio of sums over
texts with Student's t and a correction for skewness (`eval.statistics.paired.ratio`), so its upper end covers the
texts' differences, and the chance of the sampled tokens as well. What no interval finds is a loss at tokens that are
never drawn: of n positions, a set of tokens with probability 1/n is drawn with a chance of 63 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record
from quantmint.eval.statistics.paired import ratio
from quantmint.eval.verdict import Verdict

_LEAST = 1e-6
"""Probability of the unlisted tokens below which it is rounding: log probabilities have six decimals."""
_WORST = 5


@dataclass(frozen=True, slots=True)
class TextDivergence(Record):
    """One text: the number of ``positions`` that were compared, and the ``total`` of their divergences in nats.

    ``total`` is None where the candidate gave a log probability that is not finite. From likeliest tokens it may be
    below 0.
    """

    text: str
    positions: Annotated[int, Field(ge=1)]
    total: float | None


@dataclass(frozen=True, slots=True)
class Divergences(Record):
    """All texts of a comparison; ``exact`` says that every token of the vocabulary was compared."""

    exact: bool
    texts: tuple[TextDivergence, ...]


@dataclass(frozen=True, slots=True)
class KlPolicy(Record):
    """The promise: a mean divergence of at most ``max`` nats, shown at ``confidence`` (one-sided)."""

    max: Annotated[float, Field(gt=0)]
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95


@dataclass(frozen=True, slots=True)
class Kl(Record):
    """The mean divergence in nats over ``positions`` of ``texts``, with bounds that are one-sided at ``confidence``.

    ``unanswered`` are texts without a finite answer, which are in no figure. ``worst`` are the texts of the largest
    mean, worst first. The bounds are None where fewer than two texts were answered.
    """

    exact: bool
    texts: int
    positions: int
    confidence: float
    value: float
    lower: float | None
    upper: float | None
    worst: tuple[tuple[str, float], ...]
    unanswered: tuple[str, ...] = ()


def measure(divergences: Divergences, confidence: float = 0.95) -> Kl:
    """Return the mean divergence with its bounds. Raises `MeasurementError` without texts."""
    import numpy as np

    if not divergences.texts:
        raise MeasurementError("no text was compared, so there is no divergence")
    answered = [(text.text, text.positions, text.total) for text in divergences.texts if text.total is not None]
    sums = np.array([total for *_, total in answered])
    positions = np.array([count for _, count, _ in answered], dtype=np.float64)
    value, lower, upper = (float(sums.sum() / positions.sum()) if answered else 0.0), None, None
    if len(answered) > 1:
        mean = ratio(sums, positions)
        below, above = mean.quantiles(confidence)
        lower, upper = (
            max(0.0, mean.value - below * mean.standard_error),
            max(0.0, mean.value + above * mean.standard_error),
        )
    means = sorted(((text, total / count) for text, count, total in answered), key=lambda mean: -mean[1])
    return Kl(
        exact=divergences.exact,
        texts=len(answered),
        positions=int(positions.sum()),
        confidence=confidence,
        value=max(0.0, value),
        lower=lower,
        upper=upper,
        worst=tuple(means[:_WORST]),
        unanswered=tuple(text.text for text in divergences.texts if text.total is None),
    )


def judge(kl: Kl, policy: KlPolicy) -> tuple[Verdict, str]:
    """Return the verdict on a promise, and the reason with its figures.

    PASS where the upper bound is at most the promised maximum, FAIL where the lower bound is above it or a text has no
    finite answer, INCONCLUSIVE between.
    """
    way = "over the full vocabulary" if kl.exact else "from the likeliest tokens and the sampled one"
    where = f"over {kl.positions:,} positions of {kl.texts} texts, {way}"
    if kl.unanswered:
        count = f"{len(kl.unanswered)} of {kl.texts + len(kl.unanswered)}"
        return Verdict.FAIL, f"no finite log probability for {count} texts, such as {kl.unanswered[0]!r}"
    promised = f"the promised {policy.max:.3g} nats at {policy.confidence:.0%} confidence"
    figure = f"KL {kl.value:.3g} nats {where}"
    if kl.lower is None or kl.upper is None:
        return Verdict.INCONCLUSIVE, f"{figure}: one text has no interval, so {promised} is neither kept nor broken"
    if kl.upper <= policy.max:
        return Verdict.PASS, f"{figure}; the true one is below {kl.upper:.3g}, within {promised}"
    worst = f"; worst: {kl.worst[0][0]}"
    if kl.lower > policy.max:
        return Verdict.FAIL, f"{figure}; the true one is above {kl.lower:.3g}, beyond {promised}{worst}"
    between = f"the true one may lie between {kl.lower:.3g} and {kl.upper:.3g}"
    return Verdict.INCONCLUSIVE, f"{figure}; {between}, on both sides of {promised}{worst}"


def places(tokens: int, most: int = 64) -> tuple[int, ...]:
    """Return the compared positions of a text: at most ``most`` of its ``tokens`` - 1, evenly spaced and ascending.

    Position n is that of the distribution of token n + 1.
    """
    positions = max(0, tokens - 1)
    count = min(positions, most)
    return tuple((2 * number + 1) * positions // (2 * count) for number in range(count))


def sampled_divergence(
    listed: tuple[Sequence[int], Sequence[float]],
    other_listed: tuple[Sequence[int], Sequence[float]],
    sampled: tuple[int, float, float],
) -> float:
    """Return an amount whose mean over the sampled token is KL(first || other) in nats, at one position.

    ``listed`` and ``other_listed`` are the two sides' likeliest tokens with their log probabilities in nats.
    ``sampled`` is the token that was drawn from the first side, with its log probability on either side.
    """
    first, second = (dict(zip(*side, strict=True)) for side in (listed, other_listed))
    shared = first.keys() & second.keys()
    total = math.fsum(math.exp(first[token]) * (first[token] - second[token]) for token in shared)
    unlisted, other_unlisted = (
        max(1.0 - math.fsum(math.exp(side[token]) for token in shared), _LEAST) for side in (first, second)
    )
    # Any factor here leaves the mean as it is, as long as it does not depend on the sampled token.
    apart = math.log(unlisted / other_unlisted)
    token, logprob, other_logprob = sampled
    return total + unlisted * apart + (0.0 if token in shared else logprob - other_logprob - apart)
