"""The options of a fleet, its queue, and how a recipe leaves a round.

The queue is by priority, then by name. A recipe that needs more devices than are free keeps those that are: smaller
ones after it would otherwise take them again and again. One that needs no device passes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quantmint.eval.report.numbers import duration
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.store.files import DamagedError
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store
from quantmint.pipeline.upkeep.fleet.attempt import Attempted, RecipeProcess
from quantmint.pipeline.upkeep.fleet.devices import NONE, Devices, devices_of
from quantmint.pipeline.upkeep.fleet.records import Ended, RecipeState, State, now_utc, read_state

if TYPE_CHECKING:
    from quantmint.pipeline.upkeep.due.due import Due

Look = Callable[[Sequence[str]], "tuple[Due, ...]"]
"""Which of these recipes are due: `pipeline.upkeep.due.due.look` with everything but the recipes given."""
RETRIES: Final = 3
"""Attempts at a recipe in a round after one that a network or a server stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a fleet, mostly those of `quantmint requantize`.

    ``max_disk`` is in bytes. ``everything`` also runs recipes that are not due or are held. ``on`` is the value of
    `quantmint submit --ray` (None: run on this machine). ``program`` is the start of a child's command line.
    ``grace_s`` is the time from SIGTERM to SIGKILL, ``first_wait_s`` the wait before a second attempt, then doubled.
    """

    store: Path
    jobs: int | None = None
    max_hours: float | None = None
    max_disk: int | None = None
    everything: bool = False
    on: str | None = None
    wait: bool = True
    vllm: str | None = None
    remote: str | None = None
    device: str = "auto"
    program: tuple[str, ...] = (sys.executable, "-P", "-m", "quantmint")
    grace_s: float = 30.0
    first_wait_s: float = 60.0

    def slots(self, devices: int) -> int:
        """Return how many recipes run at the same time at most, on a machine with so many ``devices``."""
        return self.jobs or (sys.maxsize if self.on is not None else devices or 1)

    def command_line(self, recipe: str) -> list[str]:
        """Return the command line of a child that runs a recipe, or with ``on`` submits it."""
        vllm = [] if self.vllm is None else ["--vllm", self.vllm]
        remote = [] if self.remote is None else ["--remote-store", self.remote]
        store, what = ["--json", "--store", str(self.store)], ["--device", self.device, *vllm, *remote]
        if self.on is None:
            return [*self.program, "run", recipe, *store, *what]
        return [*self.program, "submit", recipe, "--ray", self.on, "--attached", *store, "--", *what]

    def look(self) -> Look:
        """Return `pipeline.upkeep.due.due.look` with these options' store, vLLM and device filled in."""
        from quantmint.pipeline.upkeep.due.due import look

        return partial(look, store=Store(self.store), vllm=self.vllm, device=self.device)


@dataclass
class FleetJob:
    """A due recipe in the queue or at work. ``ready`` is when it may begin, in seconds of `time.monotonic`.

    ``needs`` is the number of devices it takes: 0 on a machine without any, where the run itself reports that.
    ``lock`` is the recipe's lock while this fleet holds it; closing ``devices`` gives its devices back. ``elsewhere``:
    another process had its lock. ``timed_out``: the round's time ended it. ``last`` is the end of its last attempt.
    """

    due: Due
    state: RecipeState
    needs: int = 0
    ready: float = 0.0
    attempts: int = 0
    failed: int = 0
    seconds: float = 0.0
    elsewhere: bool = False
    timed_out: bool = False
    lock: Lock | None = None
    devices: ExitStack = field(default_factory=ExitStack)
    attempt: RecipeProcess | None = None
    last: Attempted | None = None

    @property
    def name(self) -> str:
        """Return the recipe's name."""
        return self.due.name

    @property
    def priority(self) -> int:
        """Return the recipe's ``refresh.priority``; higher ones begin first."""
        return 0 if self.due.loaded is None else self.due.loaded.recipe.refresh.priority

    @property
    def limit_s(self) -> float | None:
        """Return the time limit of one attempt in seconds; None without one."""
        hours = None if self.due.loaded is None else self.due.loaded.recipe.refresh.max_hours
        return None if hours is None else hours * 3600


def devices_needed(due: Due) -> int:
    """Return the number of accelerators of a recipe's target; 0 for a CPU, and for a recipe that cannot be loaded."""
    target = None if due.loaded is None else due.loaded.recipe.target
    return 0 if target is None or hardware(target.hardware).kind == "cpu" else target.gpus


@dataclass(frozen=True, slots=True)
class Room:
    """The room for further recipes: how many may begin (``slots``), and the numbers of ``free`` devices.

    ``left_s`` and ``left_bytes`` are what remains of the round's time and disk (None: no limit). ``now`` is in seconds
    of `time.monotonic`.
    """

    now: float
    slots: int
    free: tuple[int, ...] = ()
    left_s: float | None = None
    left_bytes: int | None = None


def ordered(waiting: Iterable[FleetJob]) -> list[FleetJob]:
    """Return the queue sorted by priority, the highest first, then by name."""
    return sorted(waiting, key=lambda job: (-job.priority, job.name))


def next_begin(waiting: Iterable[FleetJob], room: Room) -> tuple[FleetJob, tuple[int, ...]] | None:
    """Return the job that begins now, and the numbers of its devices; None if none may begin.

    A ready job that needs more devices than are free keeps them from later jobs; jobs without devices still pass it.
    """
    free = sorted(room.free)
    for job in ordered(waiting) if room.slots > 0 else ():
        if job.ready > room.now or unaffordable(job, room) is not None:
            continue
        if job.needs <= len(free):
            return job, tuple(free[: job.needs])
        free = []
    return None


def unaffordable(job: FleetJob, room: Room) -> str | None:
    """Return why a job must not begin any more in this round; None if it may begin now or later."""
    if room.left_bytes is not None and room.left_bytes <= 0:
        return "the round's disk is used up"
    if room.left_s is None:
        return None
    left_s, last = room.left_s - max(0.0, job.ready - room.now), job.state.last_duration_s or 0.0
    if left_s <= 0:
        return "the round's time is used up"
    return f"it took {duration(last)} the last time, and {duration(left_s)} are left" if last > left_s else None


def pause_s(job: FleetJob, attempted: Attempted, first: float) -> float | None:
    """Return the seconds until a job's next attempt; None if there is none.

    A fault of a network or a server is tried again `RETRIES` times, after ``first`` seconds, doubled each time.
    """
    return first * 2.0 ** (job.failed - 1) if attempted.transient and job.failed <= RETRIES else None


def queued(due: Due, options: Options, devices: Devices, warn: Callable[[str], None]) -> FleetJob | Ended:
    """Return a job for the queue, or how the recipe leaves the round without an attempt."""
    if due.state == "broken":
        return unattempted(due, "broken", 2, due.reason)
    if not options.everything and due.state != "due":
        verdict = due.verdict if due.state == "held" else None
        code = DamagedError.exit_code if due.state == "damaged" else 0 if verdict is None else verdict.exit_code
        return replace(
            unattempted(due, due.state, code, due.reason), verdict=None if verdict is None else verdict.value
        )
    needs = 0 if devices.variable is None else devices_needed(due)
    if needs > len(devices.values):
        reason = f"its target has {needs} devices, and this fleet has {len(devices.values)}"
        return unattempted(due, "failed", 2, reason)
    return FleetJob(due, read_state(options.store, due.name, warn=warn), needs)


def unattempted(due: Due, state: State, code: int, reason: str) -> Ended:
    """Return how a recipe leaves the round without an attempt."""
    from quantmint.pipeline.upkeep.due.causes import what_changed

    never = (due.reason,) if due.state == "due" else ()
    changes = never if due.release is None else what_changed(due.changes)
    return Ended(recipe=due.name, state=state, exit_code=code, causes=due.causes, changes=changes, reason=reason)


def unrun(job: FleetJob, state: State, code: int, reason: str) -> Ended:
    """Return how a queued job leaves the round without a result; the log and time of earlier attempts are kept."""
    log = None if job.last is None else str(job.last.log)
    ended = unattempted(job.due, state, code, reason)
    return replace(ended, attempts=job.attempts, duration_s=round(job.seconds, 1), log=log)


def ran(job: FleetJob, attempted: Attempted, stopped_by: int) -> Ended:
    """Return how a job leaves the round after its last attempt; ``stopped_by`` is the signal that ended it, or 0."""
    if attempted.cut_short and stopped_by:
        return unrun(job, "interrupted", 128 + stopped_by, "told to stop; it goes on from there next time")
    if attempted.cut_short and job.timed_out:
        return unrun(job, "left", 0, "the round's time was used up; it goes on from there next time")
    if not attempted.judged:
        return unrun(job, "failed", attempted.failure, attempted.error)
    verdict = attempted.answer["verdict"]
    reasons = () if verdict in (None, "PASS") else attempted.answer.get("reasons") or ()
    places = tuple(attempted.answer.get("published") or ())
    tag = next((str(place["tag"]) for place in places if "tag" in place), None)
    ended = unrun(job, "ran", attempted.exit_code, "; ".join(map(str, reasons)))
    return replace(ended, verdict=verdict, tag=tag, places=places)


def state_after(job: FleetJob, ended: Ended) -> RecipeState:
    """Return the recipe's record after its last attempt in a round."""
    now, before = now_utc(), job.state
    state = replace(before, last_attempt=now, reason=ended.reason)
    if ended.state in {"left", "interrupted"}:
        return state
    state = replace(state, last_exit=ended.exit_code, last_verdict=ended.verdict)
    if ended.state == "failed":
        return replace(state, attempts_failed=before.attempts_failed + 1)
    state = replace(state, last_duration_s=round(job.last.seconds if job.last else 0.0, 1), attempts_failed=0)
    if ended.verdict == "PASS":
        state = replace(state, last_success=now)
    if ended.tag is not None and ended.tag != before.tag:
        state = replace(state, tag=ended.tag, released=now)
    return state


def foresee(
    recipes: Sequence[str], options: Options, warn: Callable[[str], None]
) -> tuple[tuple[FleetJob, ...], tuple[Ended, ...]]:
    """Return the jobs that a round would run, in their order, and the ends of the other recipes."""
    devices = NONE if options.on is not None else devices_of(Host())
    hours = options.max_hours
    room = Room(0.0, 1, left_s=None if hours is None else hours * 3600, left_bytes=options.max_disk)
    ends: list[Ended] = []
    jobs: dict[str, FleetJob] = {}
    for due in options.look()(recipes):
        job = queued(due, options, devices, warn)
        if isinstance(job, FleetJob) and (reason := unaffordable(job, room)) is not None:
            job = unrun(job, "left", 0, reason)
        if isinstance(job, FleetJob):
            jobs.setdefault(job.name, job)
        else:
            ends.append(job)
    return tuple(ordered(jobs.values())), tuple(ends)
