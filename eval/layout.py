"""The layout that serves: do several accelerators give the answers that one gives of the same weights?

Two figures are compared with a floor, which is what the single accelerator differs from itself by when other requests
share its batches:

- **reading**: KL(layout || single) of the next token on held-out texts (`eval.kl`).
- **answers**: how much likelier the single accelerator finds its own best token than the one that the layout said, in
  nats, over the tokens of greedy answers. It is 0 where both say the same, and small where two tokens are as likely:
  unlike a count of equal answers it does not grow after the first of those.

Each is at most the floor and a small promised amount, because sums of several accelerators are rounded in another
order. All bounds are one-sided and clustered by text. The floor is an estimate too: a figure passes within its lower
bound and the amount, and fails beyond its upper bound and the amount. Neither verdict then leans on a floor that chance
made wide (`make gate-simulations`: against the upper bound alone, up to 38 % of the layouts at the limit passed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from quantmint.eval.kl import Divergences, Kl, measure
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
    """Both figures with their floors, means in nats with bounds; ``layout`` is the recipe's in vLLM's words."""

    layout: str
    reading: Kl
    reading_floor: Kl
    answers: Kl
    answers_floor: Kl


def compare(measurement: LayoutMeasurement, confidence: float = 0.95) -> LayoutComparison:
    """Return the figures with bounds at ``confidence``. Raises `MeasurementError` without texts."""
    return LayoutComparison(
        measurement.layout,
        measure(measurement.reading, confidence),
        measure(measurement.reading_floor, confidence),
        measure(measurement.answers, confidence),
        measure(measurement.answers_floor, confidence),
    )


def judge(comparison: LayoutComparison, policy: LayoutPolicy) -> tuple[Verdict, str]:
    """Return the worse verdict of the two figures, with a reason that names both.

    PASS where the upper bound is within ``max`` and the floor's lower bound, FAIL where the lower bound is beyond
    ``max`` and the floor's upper bound or an answer is not finite, INCONCLUSIVE between.
    """
    verdicts, words = [], []
    for name, figure, floor in (
        ("reading", comparison.reading, comparison.reading_floor),
        ("greedy answers", comparison.answers, comparison.answers_floor),
    ):
        if figure.unanswered or figure.lower is None or figure.upper is None:
            verdicts.append(Verdict.FAIL if figure.unanswered else Verdict.INCONCLUSIVE)
            words.append(f"{name}: no finite answer to {len(figure.unanswered)} of the texts")
            continue
        least, most = policy.max + (floor.lower or 0.0), policy.max + (floor.upper or 0.0)
        otherwise = Verdict.PASS if figure.upper <= least else Verdict.INCONCLUSIVE
        verdicts.append(Verdict.FAIL if figure.lower > most else otherwise)
        words.append(
            f"{name} {figure.value:.3g} nats apart ({figure.lower:.3g} to {figure.upper:.3g}), at most {least:.3g} "
            f"with the floor of {floor.value:.3g}" + (f", and more than {most:.3g} breaks it" if most > least else "")
        )
    return Verdict.combine(verdicts), f"{comparison.layout} beside TP 1 of the same weights: {'; '.join(words)}"
