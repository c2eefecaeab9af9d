"""Speculative decoding on both sides: how many tokens a step yields, and whether the candidate keeps the baseline's.

The same prompts are continued by both sides, one at a time, with the same method of proposing tokens. In each step the
served model checks the proposed tokens (a draft) and adds one of its own: the acceptance length is the mean number of
tokens of such a step, 1 + accepted tokens / drafts, from 1 (nothing accepted) to 1 + the tokens of a draft.

    >>> result = compare(AcceptancePairs("ngram", 3, baseline, candidate), confidence=0.95)
    >>> result.ratio, result.low, result.high
    (0.998, 0.981, 1.014)

The tokens of one prompt depend on each other, so the prompts are the sample: the bounds of the ratio come from a
standard error that is clustered by prompt, on the logarithm, for the two sides' sums of the same prompts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record
from quantmint.eval.statistics.paired import ratio
from quantmint.eval.verdict import Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Count = Annotated[int, Field(ge=0)]
_WORST = 5
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class PromptDrafts(Record):
    """The drafts of one prompt: their number, the tokens that were proposed in them, and those that were accepted."""

    prompt: str
    drafts: Count
    proposed: Count
    accepted: Count


@dataclass(frozen=True, slots=True)
class AcceptancePairs(Record):
    """The drafts of both sides by prompt, in one order; ``method`` proposes up to ``tokens`` tokens in a draft."""

    method: str
    tokens: Annotated[int, Field(ge=1)]
    baseline: tuple[PromptDrafts, ...]
    candidate: tuple[PromptDrafts, ...]


@dataclass(frozen=True, slots=True)
class Acceptance(Record):
    """The comparison of two sides' acceptance lengths.

    ``baseline`` and ``candidate`` are the lengths, ``ratio`` is candidate / baseline with bounds ``low`` and ``high``,
    each one-sided at ``confidence``. ``rates`` are the accepted shares of the proposed tokens, ``drafts`` the numbers
    of drafts (baseline, candidate). ``worst`` are prompts with the ratio of their lengths, the least first.
    """

    method: str
    tokens: int
    prompts: int
    confidence: float
    baseline: float
    candidate: float
    ratio: float
    low: float
    high: float
    rates: tuple[float, float]
    drafts: tuple[int, int]
    worst: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class AcceptancePolicy(Record):
    """The promise on the acceptance length: a loss of at most ``margin``, relative, shown at ``confidence``."""

    margin: Annotated[float, Field(gt=0, lt=1)]
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = CONFIDENCE


def compare(pairs: AcceptancePairs, confidence: float = CONFIDENCE) -> Acceptance:
    """Compare the two sides' drafts of the same prompts, at least two.

    Raises `MeasurementError` for fewer prompts, for other prompts on the two sides, for more accepted than proposed
    tokens, and for a side without a draft.
    """
    import numpy as np

    _require_comparable(pairs)
    lengths: list[float] = []
    influences: list[NDArray[np.float64]] = []
    for side in (pairs.baseline, pairs.candidate):
        drafts = np.array([row.drafts for row in side], dtype=np.float64)
        tokens = drafts + np.array([row.accepted for row in side], dtype=np.float64)
        length = float(tokens.sum() / drafts.sum())
        lengths.append(length)
        influences.append((tokens - length * drafts) / (drafts.mean() * length))
    # The change of the logarithm of the ratio with each prompt: both sides' sums in one number, as prompts are paired.
    spread = ratio(influences[1] - influences[0], np.ones(len(pairs.baseline)))
    value = lengths[1] / lengths[0]
    below, above = spread.quantiles(confidence) if spread.standard_error else (0.0, 0.0)
    return Acceptance(
        method=pairs.method,
        tokens=pairs.tokens,
        prompts=len(pairs.baseline),
        confidence=confidence,
        baseline=lengths[0],
        candidate=lengths[1],
        ratio=value,
        low=value * float(np.exp(-below * spread.standard_error)),
        high=value * float(np.exp(above * spread.standard_error)),
        rates=(_rate(pairs.baseline), _rate(pairs.candidate)),
        drafts=(sum(row.drafts for row in pairs.baseline), sum(row.drafts for row in pairs.candidate)),
        worst=_worst(pairs),
    )


def judge(acceptance: Acceptance, policy: AcceptancePolicy) -> tuple[Verdict, str]:
    """Return the verdict on a comparison at the policy's confidence, and the reason with its figures in one text.

    PASS if the lower bound of the ratio is at least 1 - margin, FAIL if the upper bound is below it, INCONCLUSIVE where
    the margin lies between the bounds.
    """
    least = 1 - policy.margin
    figures = (
        f"a step of speculative decoding ({acceptance.method}, {acceptance.tokens} tokens) yields "
        f"{acceptance.candidate:.3f} tokens, {acceptance.ratio:.3f} times the baseline's {acceptance.baseline:.3f} "
        f"({acceptance.low:.3f} to {acceptance.high:.3f}, {acceptance.prompts} prompts)"
    )
    if acceptance.low >= least:
        return Verdict.PASS, f"{figures}; at least {least:.3g} was promised, and it is more"
    if acceptance.high < least:
        return Verdict.FAIL, f"{figures}; at least {least:.3g} was promised, and it is less"
    open_margin = f"whether it is at least the promised {least:.3g} is not shown"
    return Verdict.INCONCLUSIVE, f"{figures}; {open_margin}: more prompts, or a wider margin, would tell"


def pairs_of(
    method: str, tokens: int, baseline: Sequence[Mapping[str, Any]], candidate: Sequence[Mapping[str, Any]]
) -> AcceptancePairs:
    """Return the pairs of two sides' recorded drafts. Raises `MeasurementError` for data that is none."""
    return AcceptancePairs.from_json(
        {"method": method, "tokens": tokens, "baseline": list(baseline), "candidate": list(candidate)}
    )


def _require_comparable(pairs: AcceptancePairs) -> None:
    names, candidate_names = ([row.prompt for row in side] for side in (pairs.baseline, pairs.candidate))
    if names != candidate_names:
        raise MeasurementError("the two sides continued other prompts with speculative decoding")
    if len(names) < 2:
        raise MeasurementError(f"an acceptance length has an interval from two prompts on, found {len(names)}")
    for side, rows in (("baseline", pairs.baseline), ("candidate", pairs.candidate)):
        strange = [row.prompt for row in rows if row.accepted > row.proposed or (row.proposed and not row.drafts)]
        if strange:
            raise MeasurementError(f"the {side} accepted more tokens than were proposed for {strange[0]!r}")
        if not any(row.drafts for row in rows):
            raise MeasurementError(
                f"the {side} was served with {pairs.method}, and no token was ever proposed to it: its server does not "
                "speculate"
            )


def _rate(rows: Sequence[PromptDrafts]) -> float:
    return sum(row.accepted for row in rows) / max(sum(row.proposed for row in rows), 1)


def _worst(pairs: AcceptancePairs) -> tuple[tuple[str, float], ...]:
    lengths = [
        (before.prompt, (1 + after.accepted / after.drafts) / (1 + before.accepted / before.drafts))
        for before, after in zip(pairs.baseline, pairs.candidate, strict=True)
        if before.drafts and after.drafts
    ]
    return tuple(sorted(lengths, key=lambda row: (row[1], row[0]))[:_WORST])
