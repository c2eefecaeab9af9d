"""The layout that serves: do several accelerators give the answers that one gives of the same weights?

Of two figures the excess over a floor is judged. The floor is what the single accelerator differs from itself by when
other requests share its batches:

- **reading**: KL(layout || single) of the next token on held-out texts (`eval.kl`).
- **answers**: how much likelier the single accelerator finds its own best token than the one that the layout said, in
  nats, over the tokens of greedy answers. It is 0 where both say the same, and small where two tokens are as likely:
  unlike a count of equal answers it does not grow after the first of those.

The excess is at most a small promised amount, because sums of several accelerators are rounded in another order. It is
paired by text: of each text the mean of the layout less that of the floor, so that what a text's own difficulty adds to
both is in no bound, and neither verdict leans on a floor that chance made wide. Bounds are one-sided, those of a ratio
of sums over texts by Student's t with a correction for skewness (`eval.statistics.paired.ratio`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from quantmint.eval.errors import MeasurementError
from quantmint.eval.kl import Divergences, Kl, TextDivergence, measure
from quantmint.eval.records import Record
from quantmint.eval.verdict import Verdict


@dataclass(frozen=True, slots=True)
class LayoutMeasurement(Record):
    """The texts' totals of both figures, and of their floors; ``layout`` is the recipe's in vLLM's words."""

    layout: str
    reading: Divergences
    reading_floor: Divergences
    answers: Divergences
    answers_floor: Divergences


@dataclass(frozen=True, slots=True)
class LayoutPolicy(Record):
    """The promise: both figures are at most ``max`` nats above their floors, shown at ``confidence``."""

    max: Annotated[float, Field(gt=0)]
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.95


@dataclass(frozen=True, slots=True)
class LayoutComparison(Record):
    """Both figures, their floors and the excess over those, means in nats with bounds.

    ``layout`` is the recipe's in vLLM's words. An excess of less than nothing is 0.
    """

    layout: str
    reading: Kl
    reading_floor: Kl
    reading_excess: Kl
    answers: Kl
    answers_floor: Kl
    answers_excess: Kl


def compare(measurement: LayoutMeasurement, confidence: float = 0.95) -> LayoutComparison:
    """Return the figures with bounds at ``confidence``. Raises `MeasurementError` without texts."""
    return LayoutComparison(
        measurement.layout,
        measure(measurement.reading, confidence),
        measure(measurement.reading_floor, confidence),
        measure(excess(measurement.reading, measurement.reading_floor), confidence),
        measure(measurement.answers, confidence),
        measure(measurement.answers_floor, confidence),
        measure(excess(measurement.answers, measurement.answers_floor), confidence),
    )


def excess(figure: Divergences, floor: Divergences) -> Divergences:
    """Return what a figure exceeds its floor by, of each text that both have, at as many positions as the figure's.

    Its total is None where either has no finite one. Raises `MeasurementError` where they share no text.
    """
    floors = {text.text: text for text in floor.texts}
    pairs = [(text, floors[text.text]) for text in figure.texts if text.text in floors]
    if not pairs:
        raise MeasurementError("the layout and the single accelerator answered no text in common")
    return Divergences(figure.exact, tuple(TextDivergence(a.text, a.positions, _less(a, b)) for a, b in pairs))


def _less(text: TextDivergence, floor: TextDivergence) -> float | None:
    """Return a text's total less the floor's mean at as many positions; None where either is not finite."""
    if text.total is None or floor.total is None:
        return None
    return text.total - text.positions * floor.total / floor.positions


def judge(comparison: LayoutComparison, policy: LayoutPolicy) -> tuple[Verdict, str]:
    """Return the worse verdict of the two figures, with a reason that names both.

    PASS where the upper bound of the excess is at most ``max``, FAIL where its lower bound is beyond that or the layout
    gave no finite answer, INCONCLUSIVE between.
    """
    verdicts, words = [], []
    for name, figure, floor, beyond in (
        ("reading", comparison.reading, comparison.reading_floor, comparison.reading_excess),
        ("greedy answers", comparison.answers, comparison.answers_floor, comparison.answers_excess),
    ):
        if figure.unanswered or beyond.unanswered or beyond.lower is None or beyond.upper is None:
            verdicts.append(Verdict.FAIL if figure.unanswered else Verdict.INCONCLUSIVE)
            silent = figure.unanswered or beyond.unanswered
            words.append(f"{name}: no finite answer to {len(silent)} of the texts" if silent else f"{name}: one text")
            continue
        otherwise = Verdict.PASS if beyond.upper <= policy.max else Verdict.INCONCLUSIVE
        verdicts.append(Verdict.FAIL if beyond.lower > policy.max else otherwise)
        words.append(
            f"{name} {figure.value:.3g} nats apart, {beyond.value:.3g} ({beyond.lower:.3g} to {beyond.upper:.3g}) "
            f"beyond the floor of {floor.value:.3g}, at most {policy.max:.3g}"
        )
    return Verdict.combine(verdicts), f"{comparison.layout} beside TP 1 of the same weights: {'; '.join(words)}"
