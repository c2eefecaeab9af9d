"""What a fleet is asked for, which recipe goes next, and what becomes of it when an attempt has ended.

The queue is by priority, then by name. One that needs more devices than are free keeps what is free for itself: smaller
ones that come after it would otherwise take them again and again. What needs no device passes it.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.store.files import DamagedError
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store
from quantmint.pipeline.upkeep.fleet.attempt import Attempted
from quantmint.pipeline.upkeep.fleet.devices import NONE, Devices, devices_of
from quantmint.pipeline.upkeep.fleet.events import Ended, RecipeState, State, now_utc, read_state

if TYPE_CHECKING:
    from quantmint.pipeline.upkeep.due.due import Due

Look = Callable[[Sequence[str]], "tuple[Due, ...]"]
"""Which of these recipes are due: `pipeline.upkeep.due.due.look` with everything but the recipes given."""

_LONGEST_WAIT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request to look at a recipe, given by name or file."""

    recipe: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a fleet, mostly those of `quantmint requantize`.

    ``max_disk`` is in bytes. ``everything`` also runs recipes that are not due or are held. ``on`` is the value of
    `quantmint submit --ray` (None: run on this machine). ``command`` is the start of a child's command line,
    ``submit_command`` its start with ``on``. ``grace_s`` is the time between SIGTERM and SIGKILL, ``first_wait_s`` the
    wait before the first repetition, which doubles from then on.
    """

    store: Path
    jobs: int | None = None
    retries: int = 3
    max_hours: float | None = None
    max_disk: int | None = None
    everything: bool = False
    on: str | None = None
    wait: bool = True
    vllm: str | None = None
    remote: str | None = None
    device: str = "auto"
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "quantmint", "run")
    submit_command: tuple[str, ...] = (sys.executable, "-P", "-m", "quantmint", "submit")
    grace_s: float = 30.0
    first_wait_s: float = 60.0

    @property
    def max_s(self) -> float | None:
        """Return the time limit of the whole round in seconds; None without one."""
        return None if self.max_hours is None else self.max_hours * 3600

    def slots(self, devices: int) -> int:
        """Return how many recipes run at the same time at most, on a machine with so many ``devices``."""
        return self.jobs or (sys.maxsize if self.on is not None else devices or 1)

    def command_line(self, recipe: str) -> list[str]:
        """Return the command line of a child that runs a recipe, or with ``on`` submits it."""
        vllm = [] if self.vllm is None else ["--vllm", self.vllm]
        remote = [] if self.remote is None else ["--remote-store", self.remote]
        told = ["--json", "--store", str(self.store)]
        what = ["--device", self.device, *vllm, *remote]
        if self.on is None:
            return [*self.command, recipe, *told, *what]
        return [*self.submit_command, recipe, "--ray", self.on, "--attached", *told, "--", *what]

    def look(self) -> Look:
        """Return `pipeline.upkeep.due.due.look` with these options' store, vLLM and device filled in."""
        from quantmint.pipeline.upkeep.due.due import look

        return partial(look, store=Store(self.store), vllm=self.vllm, device=self.device)


@dataclass
class FleetJob:
    """A due recipe in the queue or at work. ``ready`` is when it may begin, in seconds of `time.monotonic`.

    ``needs`` is the number of devices it takes: 0 on a machine without any, where the run itself reports that.
    ``failed`` counts attempts that ended by a transient fault. ``lock`` is the recipe's lock while this fleet holds it;
    closing ``held`` gives its ``devices`` back. ``thread`` waits for the child, and setting ``stop`` ends the child,
    for the reason ``why``.
    """

    request: Request
    due: Due
    state: RecipeState
    ready: float = 0.0
    needs: int = 0
    elsewhere: bool = False
    attempts: int = 0
    failed: int = 0
    seconds: float = 0.0
    last: Attempted | None = None
    lock: Lock | None = None
    devices: tuple[int, ...] = ()
    held: ExitStack = field(default_factory=ExitStack)
    thread: threading.Thread | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    why: Literal["time", "signal"] | None = None

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

    @property
    def expected_s(self) -> float:
        """Return the seconds of the last complete attempt; 0 if none is known."""
        return self.state.last_duration_s or 0.0


def devices_needed(due: Due) -> int:
    """Return the number of accelerators of a recipe's target; 0 for a CPU, and for a recipe that cannot be loaded."""
    if due.loaded is None:
        return 0
    target = due.loaded.recipe.target
    return 0 if hardware(target.hardware).kind == "cpu" else target.gpus


# Which recipe goes next: pure functions of what waits, what is free and what is left.


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
    return sorted(waiting, key=lambda one: (-one.priority, one.name))


def next_begin(waiting: Iterable[FleetJob], room: Room) -> tuple[FleetJob, tuple[int, ...]] | None:
    """Return the job that begins now, and the numbers of its devices; None if none may begin.

    A ready job that needs more devices than are free keeps them from later jobs; jobs without devices still pass it.
    """
    if room.slots < 1:
        return None
    free = sorted(room.free)
    for one in ordered(waiting):
        if one.ready > room.now or unaffordable(one, room) is not None:
            continue
        if one.needs <= len(free):
            return one, tuple(free[: one.needs])
        free = []  # kept for this one
    return None


def unaffordable(one: FleetJob, room: Room) -> str | None:
    """Return why a job must not begin any more in this round; None if it may begin now or later."""
    if room.left_bytes is not None and room.left_bytes <= 0:
        return "the round's disk is used up"
    if room.left_s is None:
        return None
    left = room.left_s - max(0.0, one.ready - room.now)
    if left <= 0:
        return "the round's time is used up"
    if one.expected_s > left:
        from quantmint.eval.report.numbers import duration

        return f"it took {duration(one.expected_s)} the last time, and {duration(left)} are left"
    return None


# How a recipe leaves a round.


def not_run(request: Request, due: Due, options: Options, devices: Devices) -> Ended | None:
    """Return how a recipe leaves the round without an attempt; None if it has to be attempted."""
    if due.state == "broken":
        return _left(request, due, "broken", 2, due.reason)
    if not options.everything:
        if due.state == "damaged":
            return _left(request, due, "damaged", DamagedError.exit_code, due.reason)
        if due.state == "held" and due.verdict is not None:
            return replace(_left(request, due, "held", due.verdict.exit_code, due.reason), verdict=due.verdict.value)
        if due.state != "due":
            return _left(request, due, due.state, 0, due.reason)
    needed, there = devices_needed(due), len(devices.values)
    if devices.variable is None or needed <= there:
        return None
    return _left(request, due, "failed", 2, f"its target has {needed} devices, and this fleet has {there}")


def queued(
    request: Request, due: Due, options: Options, devices: Devices, warn: Callable[[str], None]
) -> FleetJob | Ended:
    """Return a job for the queue, or how the recipe leaves the round without an attempt."""
    if (ended := not_run(request, due, options, devices)) is not None:
        return ended
    needs = 0 if devices.variable is None else devices_needed(due)
    return FleetJob(request, due, read_state(options.store, due.name, warn=warn), needs=needs)


def unrun(job: FleetJob, state: State, code: int, reason: str) -> Ended:
    """Return how a queued job leaves the round without a result; the log and time of earlier attempts are kept."""
    ended = _left(job.request, job.due, state, code, reason)
    log = None if job.last is None else str(job.last.log)
    return replace(ended, attempts=job.attempts, duration_s=round(job.seconds, 1), log=log)


def ran(job: FleetJob, attempted: Attempted, stopped_by: int | None) -> Ended:
    """Return how a job leaves the round after its last attempt; ``stopped_by`` is the signal that ended the round."""
    if attempted.cut_short and job.why == "signal":
        return unrun(job, "interrupted", 128 + (stopped_by or 0), "told to stop; it goes on from there next time")
    if attempted.cut_short and job.why == "time":
        return unrun(job, "left", 0, "the round's time was used up; it goes on from there next time")
    if not attempted.judged:
        return unrun(job, "failed", attempted.failure, attempted.error)
    reasons = () if attempted.verdict in (None, "PASS") else attempted.answer.get("reasons") or ()
    ended = unrun(job, "ran", attempted.exit_code, "; ".join(map(str, reasons)))
    places = tuple(attempted.answer.get("published") or ())
    tags = [str(place["tag"]) for place in places if "tag" in place]
    return replace(ended, verdict=attempted.verdict, tag=tags[0] if tags else None, places=places)


def _left(request: Request, due: Due, state: State, code: int, reason: str) -> Ended:
    from quantmint.pipeline.upkeep.due.causes import what_changed

    never = (due.reason,) if due.state == "due" else ()
    return Ended(
        recipe=due.name,
        state=state,
        exit_code=code,
        causes=due.causes,
        changes=never if due.release is None else what_changed(due.changes),
        reason=reason,
    )


def state_after(job: FleetJob, ended: Ended) -> RecipeState:
    """Return the recipe's state after its last attempt in a round."""
    now, before = now_utc(), job.state
    common = replace(before, last_attempt=now, reason=ended.reason)
    if ended.state in {"left", "interrupted"}:
        return common
    common = replace(common, last_exit=ended.exit_code, last_verdict=ended.verdict)
    if ended.state == "failed":
        return replace(common, attempts_failed=before.attempts_failed + 1)
    took = job.last.seconds if job.last is not None else 0.0
    common = replace(common, last_duration_s=round(took, 1), attempts_failed=0)
    if ended.verdict == "PASS":
        common = replace(common, last_success=now)
    if ended.tag is not None and ended.tag != before.tag:
        common = replace(common, tag=ended.tag, released=now)
    return common


def again_in_s(ended: Attempted, *, failed: int, retries: int, first: float) -> float | None:
    """Return the seconds until the next attempt in this round; None if there is none.

    ``failed`` counts the attempts that ended by a transient fault, this one included; ``retries`` of them are repeated.
    The wait is ``first`` seconds, doubled each time up to an hour, plus a random tenth of ``first``, so that recipes
    that one outage stopped do not all come back at the same moment.
    """
    if not ended.transient or failed > retries:
        return None
    return min(first * 2.0 ** min(failed - 1, 60), _LONGEST_WAIT_S) + random.uniform(0, first / 10)  # noqa: S311


# What a round would do; nothing is locked or run.


def foresee(
    recipes: Sequence[str], options: Options, warn: Callable[[str], None]
) -> tuple[tuple[FleetJob, ...], tuple[Ended, ...]]:
    """Return the jobs that a round would run, in their order, and how the other recipes would leave it."""
    devices = NONE if options.on is not None else devices_of(Host())
    room = Room(0.0, 1, left_s=options.max_s, left_bytes=options.max_disk)
    left: list[Ended] = []
    jobs: dict[str, FleetJob] = {}
    for recipe, due in zip(recipes, options.look()(recipes), strict=True):
        found = queued(Request(recipe), due, options, devices, warn)
        if isinstance(found, FleetJob) and (reason := unaffordable(found, room)) is not None:
            found = unrun(found, "left", 0, reason)
        if isinstance(found, FleetJob):
            jobs.setdefault(found.name, found)
        else:
            left.append(found)
    return tuple(ordered(jobs.values())), tuple(left)
