"""One candidate against another, on the items that both answered: whether the second is really better.

The difference to the shared baseline cannot tell: two candidates that each lose half a point may lose it on the same
items or on different ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval import accuracy
from eval.accuracy import Accuracy
from eval.errors import MeasurementError
from eval.records import Record
from eval.samples import Pairs, SampleSet, pair


@dataclass(frozen=True, slots=True)
class Direct(Record):
    """`second` minus `first`, task by task, by their places in the comparison.

    In `results` the side called baseline is `first`, the one called candidate `second`. `unknown` are sentences about
    tasks that could not be paired.
    """

    first: int
    second: int
    results: tuple[Accuracy, ...]
    unknown: tuple[str, ...]


def compare_all(answers: Mapping[int, Mapping[str, SampleSet]], confidence: float = 0.95) -> tuple[Direct, ...]:
    """Compare every two candidates on every task that both were asked.

    `answers` maps a place to a candidate's samples by task. The two-sided intervals hold together at `confidence`:
    each is at 1 - (1 - confidence) / intervals (Bonferroni), since with many pairs one would err by chance.
    """
    joined: list[tuple[int, int, list[Pairs], list[str]]] = []
    for first, second in itertools.combinations(sorted(answers), 2):
        pairs: list[Pairs] = []
        unknown: list[str] = []
        for task in answers[first]:
            if task not in answers[second]:
                continue
            one, two = answers[first][task], answers[second][task]
            try:
                pairs.append(pair(one.on(two), two.on(one)))
            except MeasurementError as error:
                unknown.append(str(error))
        joined.append((first, second, pairs, unknown))
    count = sum(len(pairs) for _, _, pairs, _ in joined)
    each = 1 - (1 - confidence) / max(1, count)
    return tuple(_judged(first, second, pairs, unknown, each) for first, second, pairs, unknown in joined)


def _judged(first: int, second: int, pairs: Sequence[Pairs], unknown: Sequence[str], confidence: float) -> Direct:
    results, faults = [], list(unknown)
    for joined in pairs:
        try:
            results.append(accuracy.compare(joined, confidence))
        except MeasurementError as error:
            faults.append(str(error))
    return Direct(first, second, tuple(results), tuple(faults))


def word(result: Accuracy) -> str:
    """What the interval says of the second candidate."""
    if result.interval_low > 0:
        return "better"
    return "worse" if result.interval_high < 0 else "no difference shown"
