"""Which checkpoints nothing beats.

>>> here = ("mi300x", "AMD Instinct MI300X", "vllm")
>>> small, fast, slow = Score(0.97, 0.3, 1.2, here), Score(0.99, 0.5, 1.4, here), Score(0.96, 0.5, 1.4, here)
>>> front([small, fast, slow])
(True, True, False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.comparison.contender import Place


@dataclass(frozen=True, slots=True)
class Score:
    """What is weighed: `recovery` of the worst task (more is better), `size` over the baseline's (less is better),
    `speed` over the baseline's in the worst cell (more is better; None: not measured), and where it was measured.
    """  # fmt: skip

    recovery: float
    size: float
    speed: float | None
    place: Place


def dominates(one: Score, other: Score) -> bool:
    """Whether `one` is nowhere worse than `other` and somewhere better, in figures that can be compared.

    A speed that only one of them has, or that comes from another place, can be neither better nor worse: then nothing
    is dominated.
    """
    ours = [one.recovery, -one.size]
    theirs = [other.recovery, -other.size]
    if one.speed is not None and other.speed is not None and one.place == other.place:
        ours.append(one.speed)
        theirs.append(other.speed)
    elif one.speed is not None or other.speed is not None:
        return False
    return all(a >= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def front(scores: Sequence[Score | None]) -> tuple[bool, ...]:
    """For each score whether no other dominates it; None, which is no measurement, is never on the front."""
    known = [score for score in scores if score is not None]
    return tuple(score is not None and not any(dominates(other, score) for other in known) for score in scores)
