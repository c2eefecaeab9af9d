"""Earlier verdicts on a model, kept beside the newest one.

Whoever widens a limit until a checkpoint passes has tried as often as a search has, without paying for the tries: a
reader has to know. A verdict counts as an earlier one where it is about the same weights, or about another checkpoint
of the same source with a scheme in common. The gate records those that are known when it judges. They change no
verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from quantmint.eval.records import Record
from quantmint.eval.verdict import Verdict

MOST: Final = 50
"""Earlier verdicts that a record keeps: the newest."""


@dataclass(frozen=True, slots=True)
class JudgedTask(Record):
    """A gated task in an earlier verdict: its margin, and the measured change as in `Accuracy.difference`.

    `kind` is that of the task's samples; `change` is None if the task was not asked.
    """

    kind: str
    margin: float
    change: float | None = None


@dataclass(frozen=True, slots=True)
class EarlierVerdict(Record):
    """A verdict of the gate, with its time (ISO 8601, UTC), the digest of the weights, and its limits.

    `schemes` are those of the checkpoint, sorted. `confidence` is that of the bounds of accuracy, `min_ratio` the
    promised throughput (None: none was promised). `release` is the tag under which the checkpoint was published.
    """

    judged: str
    verdict: Verdict
    artefact: str
    schemes: tuple[str, ...]
    confidence: float
    min_ratio: float | None
    tasks: Mapping[str, JudgedTask]
    release: str | None = None


def newest(verdicts: Iterable[EarlierVerdict]) -> tuple[EarlierVerdict, ...]:
    """Return the newest `MOST` verdicts, the oldest first, without repetitions.

    Two verdicts with the same time and artefact are one; the record with a release's tag is kept.
    """
    by_identity: dict[tuple[str, str], EarlierVerdict] = {}
    for earlier in verdicts:
        identity = (earlier.judged, earlier.artefact)
        if identity not in by_identity or earlier.release is not None:
            by_identity[identity] = earlier
    return tuple(by_identity[identity] for identity in sorted(by_identity)[-MOST:])
