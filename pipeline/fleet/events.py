"""What happens to a recipe while a fleet works: for displays, webhooks and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Kind = Literal["queued", "waiting", "started", "stage", "retrying", "finished", "held"]
"""queued: it is due and in the queue. waiting: another process has its lock. started: an attempt began. stage: that
attempt came to another stage. retrying: the attempt ended, and another one follows after ``wait_s``. finished: nothing
more is done for it now, ``state`` says why. held: as finished, because these very inputs were judged already."""

State = Literal[
    "ran", "current", "unknown", "damaged", "held", "broken", "failed", "resting", "elsewhere", "left", "interrupted"
]
"""How a recipe left a round. ran: to a verdict, or to its end without one. current: nothing was due. unknown: a place
that did not answer decides whether it was. damaged: a place answers, and its release cannot be read. held: these inputs
were judged before. broken: the recipe cannot be loaded or planned. failed: its last attempt broke, hung or was killed.
resting: it failed before, and the time of its next attempt has not come. elsewhere: another fleet has it. left: the
time or the disk of the round was used up. interrupted: the fleet was told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the recipe with the name ``recipe`` at ``at`` (ISO 8601, UTC).

    ``queued`` and ``running`` count recipes right after it. ``attempt`` counts from 1. ``stage`` is ``3/12 calibrate``.
    From ``state`` on everything belongs to ``finished`` and ``held`` (``exit_code``, ``reason`` and ``log`` to
    ``retrying`` too): the verdict, the exit code that the recipe counts with, seconds of all attempts, the tag of the
    release that was published and the places that it is in, the causes of its being due, why it ended as it did, and
    the log of the last attempt.
    """

    kind: Kind
    recipe: str
    at: str
    trigger: str
    queued: int
    running: int
    attempt: int = 0
    stage: str | None = None
    wait_s: float | None = None
    state: State | None = None
    verdict: str | None = None
    exit_code: int | None = None
    duration_s: float | None = None
    tag: str | None = None
    places: tuple[Mapping[str, object], ...] = ()
    causes: tuple[str, ...] = ()
    reason: str = ""
    log: str | None = None


def now_utc() -> str:
    """The present moment in ISO 8601, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
