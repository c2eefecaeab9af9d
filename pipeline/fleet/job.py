"""A recipe in a round: what is known of it, and what becomes of it when an attempt has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from pipeline.fleet.attempt import Attempted
from pipeline.fleet.devices import Devices
from pipeline.fleet.events import State, now_utc
from pipeline.fleet.order import Waiting
from pipeline.fleet.requests import Request
from pipeline.fleet.retries import resting_until, rests_until
from pipeline.fleet.summary import Ended
from pipeline.locks import Lock
from pipeline.publish.wholeness import DamagedError
from pipeline.refresh.state import RecipeState

if TYPE_CHECKING:
    from pipeline.refresh.due import Due


@dataclass
class Job:
    """A due recipe. ``since`` and ``ready`` are seconds of the fleet's monotonic clock.

    ``made`` are keys of stages that were made in this round. ``failed`` and ``killed`` count attempts that ended by a
    fault that passes and by a foreign signal. ``lock`` is the recipe's while it is ours, ``held`` those of its
    ``devices`` while it runs. ``thread`` has its child, and ``stop`` ends that, for the reason ``why``.
    """

    request: Request
    due: Due
    state: RecipeState
    since: float
    ready: float
    elsewhere: bool = False
    attempts: int = 0
    failed: int = 0
    killed: int = 0
    seconds: float = 0.0
    last: Attempted | None = None
    made: frozenset[str] = frozenset()
    lock: Lock | None = None
    devices: tuple[int, ...] = ()
    held: tuple[Lock, ...] = ()
    thread: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    why: Literal["time", "signal"] | None = None

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.due.name

    @property
    def limit_s(self) -> float | None:
        """Seconds that an attempt may take."""
        hours = None if self.due.loaded is None else self.due.loaded.recipe.refresh.max_hours
        return None if hours is None else hours * 3600

    def left_of(self, redo: Iterable[str]) -> list[str]:
        """The stages, of those that are to be made again, that no attempt of this round has made: ``evaluate`` stands
        for ``evaluate-baseline`` and ``evaluate-candidate``.
        """
        left: list[str] = []
        for name in dict.fromkeys(redo):
            keys = [key for key, _ in self.due.stages if key == name or key.startswith(f"{name}-")] or [name]
            left += [name] if self.made.isdisjoint(keys) else [key for key in keys if key not in self.made]
        return left

    def waiting(self, *, any_devices: bool) -> Waiting:
        """The job as the queue's arithmetic sees it; without any devices on this machine none are asked for."""
        return Waiting(
            self.name,
            priority=0 if self.due.loaded is None else self.due.loaded.recipe.refresh.priority,
            devices=devices_needed(self.due) if any_devices else 0,
            since=self.since,
            ready=self.ready,
            elsewhere=self.elsewhere,
            expected_s=self.state.last_duration_s or 0.0,
        )


def devices_needed(due: Due) -> int:
    """How many accelerators a recipe's target has; 0 for a CPU."""
    from pipeline.serving.hardware import hardware

    if due.loaded is None:
        return 0
    target = due.loaded.recipe.target
    return 0 if hardware(target.hardware).kind == "cpu" else target.gpus


def not_run(request: Request, due: Due, state: RecipeState, *, everything: bool) -> Ended | None:
    """How a recipe leaves the round without an attempt; None where one is to be made."""
    if due.state == "broken":
        return _left(request, due, "broken", 2, due.reason)
    if everything:
        return None
    if due.state == "damaged":
        return _left(request, due, "damaged", DamagedError.exit_code, due.reason)
    if due.state == "held":
        code = 0 if due.verdict is None else due.verdict.exit_code
        verdict = None if due.verdict is None else due.verdict.value
        return replace(_left(request, due, "held", code, due.reason), verdict=verdict)
    if due.state != "due":
        return _left(request, due, due.state, 0, due.reason)
    until = resting_until(state, due.inputs, datetime.now(UTC))
    if until is not None:
        when = f"{until:%Y-%m-%d %H:%M} UTC"
        rests = f"it rests until {when}, unless --all: it failed in {state.attempts_failed} round(s): {state.reason}"
        return _left(request, due, "resting", state.last_exit or 5, rests)
    return None


def impossible(request: Request, due: Due, devices: Devices) -> Ended | None:
    """How a recipe leaves the round that needs more devices than there are; None where there are enough.

    A machine without any is no such case: what a run needs there, and lacks, it says itself.
    """
    needed, there = devices_needed(due), len(devices.numbers)
    if devices.variable is None or needed <= there:
        return None
    return _left(request, due, "failed", 2, f"its target has {needed} devices, and this fleet has {there}")


def unrun(job: Job, state: State, code: int, reason: str) -> Ended:
    """How a job leaves the round that was queued; what an attempt of it said stays."""
    ended = _left(job.request, job.due, state, code, reason)
    log = None if job.last is None else str(job.last.log)
    return replace(ended, attempts=job.attempts, duration_s=round(job.seconds, 1), log=log)


def ran(job: Job, attempted: Attempted, stopped_by: int | None) -> Ended:
    """How a job leaves the round whose last attempt has ended."""
    if attempted.cut_short and job.why == "signal":
        return unrun(
            job, "interrupted", 128 + (stopped_by or 0), "it was told to stop; it goes on from there next time"
        )
    if attempted.cut_short and job.why == "time":
        return unrun(job, "left", 0, "the round's time was used up; it goes on from there next time")
    if not attempted.judged:
        return unrun(job, "failed", attempted.failure, attempted.error)
    ended = unrun(job, "ran", attempted.exit_code, _said(attempted))
    tags = [str(place["tag"]) for place in attempted.places if "tag" in place]
    return replace(ended, verdict=attempted.verdict, tag=tags[0] if tags else None, places=attempted.places)


def state_after(job: Job, ended: Ended) -> RecipeState:
    """What is kept of a recipe after its last attempt of a round."""
    now, before = now_utc(), job.state
    file = before.file if job.due.loaded is None else str(job.due.loaded.path.absolute())
    common = replace(before, last_attempt=now, reason=ended.reason, file=file)
    if ended.state in {"left", "interrupted"}:
        return common  # with the inputs that it failed with, if it rests: these here have not failed
    inputs = job.due.inputs or None
    common = replace(common, last_exit=ended.exit_code, last_verdict=ended.verdict, inputs=inputs)
    if ended.state == "failed":
        rounds = before.attempts_failed + 1
        # Code 2: nothing was started, so that trying again costs nothing. What a network did has to pass first.
        tried_soon = ended.exit_code == 2 and not (job.last is not None and job.last.transient)
        return replace(common, attempts_failed=rounds, not_before=None if tried_soon else rests_until(rounds))
    took = job.last.seconds if job.last is not None else 0.0
    common = replace(common, last_duration_s=round(took, 1), attempts_failed=0, not_before=None)
    if ended.verdict == "PASS":
        common = replace(common, last_success=now)
    if ended.tag is not None and ended.tag != before.tag:
        common = replace(common, tag=ended.tag, released=now)
    return common


def causes_of(due: Due) -> tuple[str, ...]:
    """The kinds of change that a recipe is due for, each once."""
    return tuple(dict.fromkeys(change.cause for change in due.changes))


def _left(request: Request, due: Due, state: State, code: int, reason: str) -> Ended:
    from pipeline.refresh.causes import what_changed

    never = (due.reason,) if due.state == "due" else ()
    return Ended(
        recipe=due.name,
        trigger=request.trigger,
        state=state,
        exit_code=code,
        causes=causes_of(due),
        changes=never if due.release is None else what_changed(due.changes),
        reason=reason,
    )


def _said(attempted: Attempted) -> str:
    reasons = attempted.answer.get("reasons")
    lines: Sequence[object] = reasons if isinstance(reasons, list) else ()
    return "; ".join(map(str, lines)) if attempted.verdict not in (None, "PASS") else ""
