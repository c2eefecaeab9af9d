"""Many recipes over the devices of one machine: queued, begun, repeated, judged, summed up.

One thread decides: it calls what comes out of an inbox, asks `next_begin` what begins, and owns every lock. What takes
long has a thread of its own that puts its result there: looking at what is due, and a child. So requests may come while
others run, and an order to stop is heard at once.

A recipe is looked at twice: with all others, for the queue, and once more when its lock is ours. In between another
fleet may have made it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from quantmint.pipeline.base.errors import QuantmintError, redact
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.upkeep.fleet import jobs
from quantmint.pipeline.upkeep.fleet.attempt import Attempted, attempt, new_log, quotable
from quantmint.pipeline.upkeep.fleet.devices import NONE, devices_of, free_of, take, try_lock
from quantmint.pipeline.upkeep.fleet.events import (
    Ended,
    Event,
    Kind,
    RoundSummary,
    State,
    folder_of,
    now_utc,
    read_state,
    write_state,
)
from quantmint.pipeline.upkeep.fleet.jobs import FleetJob, Look, Options, Request, Room

if TYPE_CHECKING:
    from quantmint.pipeline.upkeep.due.due import Due

_ASK_AGAIN_S: Final = 1.0  # between two looks at what another fleet has
_STOPPED: Final = "it was told to stop"
_T = TypeVar("_T")


class Fleet:
    """The engine of a round. ``add``, ``close`` and ``stop`` may be called from any thread.

    ``stop`` may also be called by a signal handler. ``on_event`` is called in the thread of ``run``. ``warn`` is called
    with faults that stop nothing. ``look`` replaces `pipeline.upkeep.due.due.look` (None: that function, by the
    options).
    """

    def __init__(
        self,
        options: Options,
        *,
        on_event: Callable[[Event], None],
        warn: Callable[[str], None],
        look: Look | None = None,
        on_end: Callable[[Ended], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._on_event, self._on_end = on_event, on_end
        self._look = look or options.look()
        self._tell_warning = warn
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._one_look = threading.Lock()  # what two looks at once would ask the Hub for is mostly the same
        self._devices = NONE if options.on is not None else devices_of(Host())
        self._slots = options.slots(len(self._devices.values))
        self._looking: list[Request] = []
        self._waiting: dict[str, FleetJob] = {}
        self._running: dict[str, FleetJob] = {}
        self._ended: list[Ended] = []
        self._warnings: list[str] = []
        self._closed = False
        self._stopped_by: int | None = None
        self._started, self._began = now_utc(), time.monotonic()
        self._bytes_before = 0 if options.max_disk is None else bytes_below(options.store)
        self._grown: int | None = None if options.max_disk is None else 0

    def add(self, requests: Iterable[Request]) -> None:
        """Queue recipes that turn out to be due; a recipe that is queued or runs already is not queued twice."""
        self._inbox.put(partial(self._add, tuple(dict.fromkeys(requests))))

    def close(self) -> None:
        """Announce that no more requests come: ``run`` returns when the last recipe has ended."""
        self._inbox.put(self._close)

    def stop(self, number: int) -> None:
        """End the children, free the locks and let ``run`` return; ``number`` is the signal that asked for it."""
        self._inbox.put(partial(self._end_all, number))

    def run(self) -> RoundSummary:
        """Work until `close` was called and all recipes have ended, or until `stop`; return the summary.

        Raises what ``on_event`` raises.
        """
        try:
            while True:
                self._advance()
                over = self._closed or self._stopped_by is not None
                if over and not (self._looking or self._waiting or self._running):
                    return RoundSummary(
                        started=self._started,
                        finished=now_utc(),
                        ended=tuple(self._ended),
                        grown_bytes=self._grown,
                        stopped_by=self._stopped_by,
                        warnings=tuple(self._warnings),
                    )
                with suppress(Empty):
                    self._inbox.get(timeout=self._wake_in())()
                    while True:
                        self._inbox.get_nowait()()
        finally:
            self._abandon()

    # What comes out of the inbox.

    def _in_background(self, work: Callable[[], _T], then: Callable[[_T | None, str], None]) -> threading.Thread:
        """Call ``work`` in a thread, then ``then`` in the deciding thread; return the thread.

        ``then`` gets the value of ``work`` and "", or None and the message of its exception.
        """

        def errand() -> None:
            try:
                self._inbox.put(partial(then, work(), ""))
            except QuantmintError as error:
                self._inbox.put(partial(then, None, quotable(error.message, os.environ)))
            except Exception as error:  # a fault of ours ends its recipe, and must not make the others wait for ever
                self._inbox.put(partial(then, None, quotable(f"{type(error).__name__}: {error}", os.environ)))

        thread = threading.Thread(target=errand, daemon=True)
        thread.start()
        return thread

    def _find(self, recipes: Sequence[str]) -> tuple[Due, ...]:
        with self._one_look:
            return self._look(recipes)

    def _close(self) -> None:
        self._closed = True

    def _add(self, requests: Sequence[Request]) -> None:
        new = [request for request in requests if request not in self._looking]
        if self._stopped_by is not None:
            self._turn_away(new, "interrupted", 128 + self._stopped_by, _STOPPED)
        elif new:
            self._looking += new
            self._in_background(lambda: self._find([one.recipe for one in new]), partial(self._queue, new))

    def _turn_away(self, requests: Iterable[Request], state: State, code: int, reason: str) -> None:
        for one in requests:
            self._end(Ended(recipe=one.recipe, state=state, exit_code=code, reason=reason))

    def _queue(self, requests: Sequence[Request], found: tuple[Due, ...] | None, error: str) -> None:
        if self._stopped_by is not None:
            return  # they were turned away
        self._looking = [one for one in self._looking if one not in requests]
        if found is None:
            self._turn_away(requests, "failed", 5, error)
            return
        for sentence in dict.fromkeys(sentence for due in found for sentence in due.unknown):
            self._warn(sentence)
        for request, due in zip(requests, found, strict=True):
            if due.name in self._waiting or due.name in self._running:
                self._warn(f"{request.recipe}: {due.name} is queued or runs already")
                continue
            job = jobs.queued(request, due, self._options, self._devices, self._warn)
            if isinstance(job, Ended):
                self._end(job)
                continue
            self._waiting[due.name] = job
            self._tell("queued", job)

    def _confirm(self, job: FleetJob, found: tuple[Due, ...] | None, error: str) -> None:
        """Attempt a recipe whose lock was taken if it is still due at the second look; else close its job.

        ``found`` is that look's result, None if it failed with ``error``.
        """
        if self._running.get(job.name) is not job:
            return  # it was told to stop
        if found is None:
            self._close_job(job, jobs.unrun(job, "failed", 5, error))
            return
        job.due, job.state = found[0], read_state(self._options.store, job.name, warn=self._warn)
        ended = jobs.not_run(job.request, job.due, self._options, self._devices)
        if ended is None and job.why is not None:
            ended = jobs.unrun(job, "left", 0, "the round's time is used up")
        if ended is not None:
            self._close_job(job, ended)
        else:
            self._attempt(job)

    def _attempt(self, job: FleetJob) -> None:
        job.attempts += 1
        self._tell("started", job)
        options = self._options
        # It fetches, signs and publishes as a person's run does, but tells nobody.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("QUANTMINT_WEBHOOK")}
        environment = self._devices.environment(ours, job.devices)

        def work() -> Attempted:
            return attempt(
                options.command_line(job.request.recipe),
                new_log(options.store, job.name),
                environment=environment,
                grace_s=options.grace_s,
                limit_s=job.limit_s,
                stop=job.stop,
                on_stage=lambda stage: self._inbox.put(partial(self._tell, "stage", job, stage=stage)),
                queues=options.on is not None,
            )

        job.thread = self._in_background(work, partial(self._done, job))

    def _done(self, job: FleetJob, attempted: Attempted | None, error: str) -> None:
        job.thread = None
        if self._grown is not None:
            self._grown = bytes_below(self._options.store) - self._bytes_before
        if attempted is None:
            self._close_job(job, jobs.unrun(job, "failed", 5, error), keep=True)
            return
        job.last, job.seconds = attempted, job.seconds + attempted.seconds
        job.failed += attempted.transient
        options = self._options
        pause = jobs.again_in_s(attempted, failed=job.failed, retries=options.retries, first=options.first_wait_s)
        job.ready = time.monotonic() + (pause or 0.0)
        spent = jobs.unaffordable(job, self._room()) is not None
        if pause is None or job.why is not None or spent:
            self._close_job(job, jobs.ran(job, attempted, self._stopped_by), keep=True)
            return
        del self._running[job.name]
        self._give_back(job)
        self._waiting[job.name] = job  # its lock stays ours: nobody else tries in between
        told = {"exit_code": attempted.exit_code, "reason": attempted.error, "log": str(attempted.log)}
        self._tell("retrying", job, wait_s=round(pause, 1), **told)

    def _end_all(self, number: int) -> None:
        if self._stopped_by is not None:
            return
        self._stopped_by = number
        for job in (*self._waiting.values(), *self._running.values()):
            if job.thread is None:
                self._close_job(job, jobs.unrun(job, "interrupted", 128 + number, _STOPPED))
            else:
                self._cut(job, "signal")
        self._turn_away(self._looking, "interrupted", 128 + number, _STOPPED)
        self._looking = []

    # What begins.

    def _advance(self) -> None:
        if self._stopped_by is not None:
            return
        left = self._left_s()
        if left is not None and left <= 0:
            for job in self._running.values():
                self._cut(job, "time")
        while self._waiting and self._begin_next():
            pass

    def _begin_next(self) -> bool:
        room = self._room()
        for job in list(self._waiting.values()):
            reason = jobs.unaffordable(job, room)
            if reason is not None and job.last is None:
                self._close_job(job, jobs.unrun(job, "left", 0, reason))
            elif reason is not None and job.last is not None:
                self._close_job(job, jobs.ran(job, job.last, None), keep=True)
        begin = jobs.next_begin(self._waiting.values(), room)
        if begin is None:
            return False
        job, devices = begin
        del self._waiting[job.name]
        try:
            self._begin(job, devices)
        except QuantmintError as error:
            self._close_job(job, jobs.unrun(job, "failed", error.exit_code, error.message))
        return True

    def _begin(self, job: FleetJob, devices: tuple[int, ...]) -> None:
        """Take the locks of recipe and devices and begin; put the job back if another process holds one of them."""
        root, now = self._options.store, time.monotonic()
        with disk_errors(root):
            folder_of(root).mkdir(parents=True, exist_ok=True)
            if job.lock is None:
                lock = Lock(folder_of(root) / f"{job.name}.lock")
                if not try_lock(lock):
                    self._elsewhere(job, now)
                    return
                job.lock = lock
            held = take(root, devices)
        if held is None:  # another fleet was quicker since we looked
            if not job.attempts:
                self._free(job)
            job.ready = now + _ASK_AGAIN_S
            self._waiting[job.name] = job
            return
        job.held, job.devices, job.elsewhere = held, devices, False
        self._running[job.name] = job
        if job.attempts:
            self._attempt(job)
        else:
            self._in_background(lambda: self._find([job.request.recipe]), partial(self._confirm, job))

    def _elsewhere(self, job: FleetJob, now: float) -> None:
        first, job.elsewhere, job.ready = not job.elsewhere, True, now + _ASK_AGAIN_S
        if not self._options.wait:
            self._close_job(job, jobs.unrun(job, "elsewhere", 0, "another process works on it"))
            return
        self._waiting[job.name] = job
        if first:
            self._tell("waiting", job, reason="another process works on it")

    # What ends.

    def _cut(self, job: FleetJob, why: Literal["time", "signal"]) -> None:
        job.why = job.why or why
        job.stop.set()

    def _close_job(self, job: FleetJob, ended: Ended, *, keep: bool = False) -> None:
        """Remove a job and free its locks; with ``keep`` write its state first, while its lock is still held."""
        self._running.pop(job.name, None)
        self._waiting.pop(job.name, None)
        if keep and job.lock is not None:
            try:
                with disk_errors(job.lock.path):
                    job.lock.check()
                write_state(self._options.store, jobs.state_after(job, ended))
            except QuantmintError as error:
                self._warn(f"{job.name}: how it ended could not be noted: {error.message}")
        self._free(job)
        self._end(ended)

    def _free(self, job: FleetJob) -> None:
        if job.lock is not None:
            job.held.callback(job.lock.release)
        self._give_back(job)
        job.lock = None

    def _give_back(self, job: FleetJob) -> None:
        try:
            with disk_errors(self._options.store):
                job.held.close()
        except QuantmintError as error:
            self._warn(f"{job.name}: {error.message}")
        job.devices = ()

    def _abandon(self) -> None:
        """End every child and free every lock, however ``run`` ends."""
        left = [*self._running.values(), *self._waiting.values()]
        for job in left:
            job.stop.set()
        for job in left:
            if job.thread is not None:
                job.thread.join()
            self._free(job)

    # What is told.

    def _warn(self, message: str) -> None:
        message = redact(message, os.environ)  # of a proxy, a bucket or the Hub, in whatever words
        self._warnings.append(message)
        self._tell_warning(message)

    def _tell(self, kind: Kind, job: FleetJob, **facts: Any) -> None:
        facts = {"reason": job.due.reason, **facts}
        self._send(kind=kind, recipe=job.name, attempt=job.attempts, **facts)

    def _end(self, ended: Ended) -> None:
        ended = replace(ended, reason=redact(ended.reason, os.environ))
        self._ended.append(ended)
        self._on_end(ended)
        told = {name: getattr(ended, name) for name in Ended.__slots__ if name not in ("attempts", "changes")}
        self._send(kind="held" if ended.state == "held" else "finished", attempt=ended.attempts, **told)

    def _send(self, **facts: Any) -> None:
        self._on_event(Event(at=now_utc(), queued=len(self._waiting), running=len(self._running), **facts))

    # What is known now.

    def _left_s(self) -> float | None:
        limit = self._options.max_s
        return None if limit is None else self._began + limit - time.monotonic()

    def _room(self) -> Room:
        slots = self._slots - len(self._running)
        taken = {number for job in self._running.values() for number in job.devices}
        ours = [number for number in self._devices.values if number not in taken]
        free = free_of(self._options.store, ours) if slots > 0 else ()
        limit = self._options.max_disk
        bytes_left = None if limit is None else limit - (self._grown or 0)
        return Room(time.monotonic(), slots, free, self._left_s(), bytes_left)

    def _wake_in(self) -> float | None:
        """Return the seconds after which to look again without a message in the inbox; None if only messages matter."""
        now, left = time.monotonic(), self._left_s()
        moments = [job.ready - now for job in self._waiting.values() if job.ready > now]
        if self._waiting:
            moments.append(_ASK_AGAIN_S)  # a device that another fleet has
        if left is not None and (self._waiting or self._running):
            moments.append(max(left, 0.0) or _ASK_AGAIN_S)
        return min(moments, default=None)


def bytes_below(folder: Path) -> int:
    """Return the bytes of the files below a folder; a file with several names (hard links) counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(f"{parent}/{name}")  # a Path for each would be slow
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
