"""What happens to a recipe while a fleet works, and how it left: for logs, webhooks and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from eval.report.numbers import duration

Kind = Literal["queued", "waiting", "started", "stage", "retrying", "finished", "held"]
"""queued: it is due and in the queue. waiting: another process has its lock. started: an attempt began. stage: that
attempt came to another stage. retrying: the attempt ended, and another one follows after ``wait_s``. finished: nothing
more is done for it now, ``state`` says why. held: as finished, because these very inputs were judged already."""

State = Literal["ran", "current", "unknown", "damaged", "held", "broken", "failed", "elsewhere", "left", "interrupted"]
"""How a recipe left a round; docs/keeping-fresh.md says what each means."""

SCHEMA: Final = 1
_WORST_FIRST: Final = (5, 2, 4, 1, 3, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to the recipe with the name ``recipe`` at ``at`` (ISO 8601, UTC).

    ``queued`` and ``running`` count recipes right after it. ``attempt`` counts from 1. ``stage`` is ``3/12 calibrate``.
    From ``state`` on everything belongs to ``finished`` and ``held`` (``exit_code``, ``reason`` and ``log`` to
    ``retrying`` too) and is `Ended`'s.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a recipe left a round.

    ``exit_code`` is what it counts with, ``attempts`` 0 for one that was not run, ``duration_s`` of all of them.
    ``tag`` is that of the release that was published to ``places``. ``causes`` are the kinds of change that made it
    due, ``changes`` phrases for people of them. ``log`` is the last attempt's.
    """

    recipe: str
    trigger: str
    state: State
    exit_code: int
    verdict: str | None = None
    attempts: int = 0
    duration_s: float = 0.0
    tag: str | None = None
    places: tuple[Mapping[str, object], ...] = ()
    causes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    reason: str = ""
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A round: when it began and ended (ISO 8601, UTC), and how each recipe left it, the first first.

    ``grown_bytes`` is None where nobody limited the disk; ``stopped_by`` the signal that ended the round.
    """

    started: str
    finished: str
    ended: tuple[Ended, ...]
    grown_bytes: int | None = None
    stopped_by: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The worst of the recipes' codes, and 128 + N where signal N ended the round."""
        return worst(ended.exit_code for ended in self.ended) if self.stopped_by is None else 128 + self.stopped_by

    def to_json(self) -> dict[str, object]:
        """Plain data for ``--json``."""
        return {"schema": SCHEMA, **asdict(self), "exit_code": self.exit_code}


def worst(codes: Iterable[int]) -> int:
    """The exit code of several: 5 before 2, 4, 1, 3 and 0; 0 for none, and what is none of these counts as 5."""
    ranks = [_WORST_FIRST.index(code) if code in _WORST_FIRST else 0 for code in codes]
    return _WORST_FIRST[min(ranks)] if ranks else 0


def line_of(event: Event) -> str:
    """An event as a line of a log."""
    name = event.recipe
    match event.kind:
        case "queued":
            return f"{name}: queued: {event.reason}"
        case "waiting":
            return f"{name}: waits: {event.reason}"
        case "started":
            return f"{name}: started" + (f", attempt {event.attempt}" if event.attempt > 1 else "")
        case "stage":
            return f"{name}: [{event.stage}]"
        case "retrying":
            return f"{name}: failed, tried again in {duration(event.wait_s or 0.0)}: {event.reason}"
    word = event.verdict if event.state == "ran" and event.verdict else event.state
    if event.state == "failed":
        word = f"failed with exit code {event.exit_code}"
    took = f" in {duration(event.duration_s)}" if event.attempt and event.duration_s is not None else ""
    release = f", released {event.tag}" if event.tag else ""
    reason = f": {event.reason}" if event.reason else ""
    log = f" (log: {event.log})" if event.state == "failed" and event.log else ""
    return f"{name}: {word}{took}{release}{reason}{log}"


def now_utc() -> str:
    """The present moment in ISO 8601, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
