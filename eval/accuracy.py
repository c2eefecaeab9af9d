"""The change in accuracy between two models on the same items, with its uncertainty.

The gate reads `lower` and `upper`; what they are is told by `method` (`eval.statistics.paired` says why). Beside them
stand, for whoever reads the report: McNemar's exact test, the flips, and the share of the baseline's score that is
left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import quantmint.eval.statistics.paired as paired
from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Part, Record
from quantmint.eval.samples import Pairs, SampleSet, pair
from quantmint.eval.statistics.paired import mcnemar

Kind = paired.Kind


@dataclass(frozen=True, slots=True)
class Accuracy(Part):  # earlier records have a bootstrap's interval too
    """One task's accuracy on both sides.

    `baseline` and `candidate` are mean scores as fractions, and `difference` is candidate - baseline; of a perplexity
    task they are perplexities per word, and `difference` is ln(baseline) - ln(candidate), in nats per word: below 0 is
    always worse. `lower` and `upper` are one-sided bounds of the difference, each at `bound_confidence`: the gate reads
    them. It is `confidence` for a fixed test, higher at an early look. `interval_low` and `interval_high` bound a
    two-sided interval at `confidence`. `gains` counts items that only the candidate got right (graded, perplexity: that
    rose), `losses` the opposite. `mcnemar_p` is the exact two-sided p-value of McNemar's test, None unless scores are 0
    or 1. `recovery` is the share of the baseline's score that is left (perplexity: baseline / candidate), None where it
    cannot be said, as are its bounds. `clusters` counts the passages that items share, None where every item stands
    alone. `planned` items were to be asked in all.
    """

    task: str
    metric: str
    kind: Kind
    items: int
    planned: int
    clusters: int | None
    baseline: float
    candidate: float
    difference: float
    standard_error: float
    confidence: float
    bound_confidence: float
    lower: float
    upper: float
    interval_low: float
    interval_high: float
    gains: int
    losses: int
    mcnemar_p: float | None
    recovery: float | None
    recovery_low: float | None
    recovery_high: float | None
    method: str

    @property
    def flip_rate(self) -> float:
        """Return the share of items, 0 to 1, whose score changed in either direction."""
        return (self.gains + self.losses) / self.items


def compare(pairs: Pairs, confidence: float = 0.95, *, bound_confidence: float | None = None) -> Accuracy:
    """Compare two models by their scores on the same items.

    `confidence` is that of the two-sided interval. `bound_confidence` is that of the one-sided bounds, at an early look
    higher than in one fixed test (None: `confidence`). Raises `MeasurementError` below two items or two passages, where
    no variance exists.
    """
    bound_confidence = confidence if bound_confidence is None else bound_confidence
    change = paired.change(pairs)
    lower, upper = change.bounds(bound_confidence)
    interval_low, interval_high = change.bounds((1 + confidence) / 2)
    baseline, candidate = change.levels
    recovery, recovery_low, recovery_high = paired.recovery(change, confidence)
    return Accuracy(
        task=pairs.task,
        metric=pairs.metric,
        kind=change.kind,
        items=change.items,
        planned=pairs.planned,
        clusters=len(change.units.weights) if change.clustered else None,
        baseline=baseline,
        candidate=candidate,
        difference=change.difference,
        standard_error=change.standard_error,
        confidence=confidence,
        bound_confidence=bound_confidence,
        lower=lower,
        upper=upper,
        interval_low=interval_low,
        interval_high=interval_high,
        gains=change.gains,
        losses=change.losses,
        mcnemar_p=mcnemar(change.gains, change.losses) if change.kind == "binary" else None,
        recovery=recovery,
        recovery_low=recovery_low,
        recovery_high=recovery_high,
        method=change.method,
    )


@dataclass(frozen=True, slots=True)
class Direct(Record):
    """The comparison of two candidates on the items that both answered, each named by its 0-based index.

    The difference to the shared baseline cannot tell which is better: two candidates that each lose half a point may
    lose it on the same items or on different ones.

    In `results` the side called baseline is candidate `first`, the one called candidate is candidate `second`.
    `unknown` has a sentence for each task that could not be paired, or says that the two have no task in common.
    """

    first: int
    second: int
    results: tuple[Accuracy, ...]
    unknown: tuple[str, ...]


def compare_all(answers: Mapping[int, Mapping[str, SampleSet]], confidence: float = 0.95) -> tuple[Direct, ...]:
    """Compare every two candidates on every task that both were asked.

    `answers` maps a candidate's index to its samples by task. There is one `Direct` for each pair, in the order of
    their indices; a pair without a common task says so in `Direct.unknown`. The two-sided intervals hold together at
    `confidence`: each is at 1 - (1 - confidence) / intervals (Bonferroni), since with many pairs one would err by
    chance. A task that cannot be paired raises nothing: its reason goes into `Direct.unknown`.
    """
    combined = list(itertools.combinations(sorted(answers), 2))
    count = sum(len(answers[first].keys() & answers[second].keys()) for first, second in combined)
    per_interval = 1 - (1 - confidence) / max(1, count)
    directs = []
    for first, second in combined:
        results, unknown = [], []
        for task, first_samples in answers[first].items():
            if (two := answers[second].get(task)) is None:
                continue
            try:
                results.append(compare(pair(first_samples.on(two), two.on(first_samples)), per_interval))
            except MeasurementError as error:
                unknown.append(str(error))
        if not results and not unknown:
            unknown.append("no shared task")
        directs.append(Direct(first, second, tuple(results), tuple(unknown)))
    return tuple(directs)


def better(result: Accuracy) -> str:
    """Return "better", "worse" or "no difference shown" for the second of two candidates, by the two-sided interval."""
    if result.interval_low > 0:
        return "better"
    return "worse" if result.interval_high < 0 else "no difference shown"


def change(kind: Kind | str, difference: float) -> float:
    """Convert a difference (`Accuracy.difference`) to the unit that people read.

    A score's change is in points, where less is worse. A perplexity's change is its rise in per cent, where more is
    worse: -0.02 nats a word are 2.02 % more.
    """
    return 100 * (math.expm1(-difference) if kind == "perplexity" else difference)


def margin_in_units(kind: Kind | str, margin: float) -> float:
    """Convert a margin to the units of `Accuracy.difference`.

    A score's margin is a fraction already, 0.01 for one point. A perplexity's is relative, 0.02 for two per cent more,
    which is ln(1 + margin) nats per word.
    """
    return math.log1p(margin) if kind == "perplexity" else margin
