"""A round: recipes over the devices of this machine, or as jobs of a Ray cluster.

One loop asks, some times a second, which children have ended and which recipe may begin. A recipe is looked at twice:
with all others, for the queue, and once more when its lock is ours, as another fleet may have made it in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quantmint.eval.report.numbers import duration
from quantmint.pipeline.base.errors import QuantmintError, redact
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.upkeep.fleet import jobs
from quantmint.pipeline.upkeep.fleet.attempt import RecipeProcess, new_log, quotable
from quantmint.pipeline.upkeep.fleet.devices import NONE, devices_of, free_of, take, try_lock
from quantmint.pipeline.upkeep.fleet.jobs import FleetJob, Look, Options, Room
from quantmint.pipeline.upkeep.fleet.records import Ended, RoundSummary, State, folder_of, now_utc, write_state

if TYPE_CHECKING:
    from quantmint.pipeline.upkeep.due.due import Due

_POLL_S: Final = 0.1
_ASK_AGAIN_S: Final = 1.0
"""Seconds between two looks at the locks of other fleets."""


class _StopLookingError(BaseException):
    """Raised by the handler of a signal into a look, which may wait for a network."""


class _NoLookError(Exception):
    """A look without a result; its arguments are the state, exit code and reason of the recipes' ends."""


class Fleet:
    """The engine of a round.

    ``write`` is called with each line of the log, ``warn`` with faults that stop nothing, ``on_end`` when a recipe
    leaves the round. ``look`` replaces `pipeline.upkeep.due.due.look` (None: that function, by the options).
    """

    def __init__(
        self,
        options: Options,
        *,
        write: Callable[[str], None],
        warn: Callable[[str], None],
        on_end: Callable[[Ended], None] = lambda _: None,
        look: Look | None = None,
    ) -> None:
        self._options, self._look = options, look or options.look()
        self._write, self._pass_on, self._on_end = write, warn, on_end
        self._devices = NONE if options.on is not None else devices_of(Host())
        self._waiting: dict[str, FleetJob] = {}
        self._running: dict[str, FleetJob] = {}
        self._ended: list[Ended] = []
        self._warnings: list[str] = []
        self._looking, self._stopped_by = False, 0
        self._began, self._nothing_until = time.monotonic(), 0.0
        self._bytes_before = 0 if options.max_disk is None else bytes_below(options.store)
        self._grown: int | None = None if options.max_disk is None else 0

    def stop(self, number: int) -> None:
        """End children, locks and looks, and let `run` return; ``number`` is the signal whose handler this is."""
        first, self._stopped_by = not self._stopped_by, self._stopped_by or number
        if first and self._looking:
            raise _StopLookingError

    def run(self, recipes: Sequence[str]) -> RoundSummary:
        """Work until all recipes have ended, or until `stop`; return the summary. Raises what ``write`` raises."""
        started = now_utc()
        try:
            with suppress(_StopLookingError):  # where the signal comes just as a look ends
                self._queue(tuple(dict.fromkeys(recipes)))
                while not self._stopped_by and (self._waiting or self._running):
                    self._watch()
                    if not self._begin_next():
                        time.sleep(_POLL_S)
            self._stop_attempts()
            for job in [*self._running.values(), *self._waiting.values()]:
                with self._faults_of(job):
                    if job.attempt is not None:
                        self._finish(job, job.attempt)
                    else:
                        self._close(job, jobs.unrun(job, *self._interrupted()))
        finally:
            self._stop_attempts()
            for job in [*self._running.values(), *self._waiting.values()]:
                self._free(job)
        return RoundSummary(
            started=started,
            finished=now_utc(),
            ended=tuple(self._ended),
            grown_bytes=self._grown,
            stopped_by=self._stopped_by or None,
            warnings=tuple(self._warnings),
        )

    # What begins.

    def _due(self, recipes: Sequence[str]) -> tuple[Due, ...]:
        """Return whether these recipes are due. Raises `_NoLookError` for faults and after a signal."""
        if self._stopped_by:
            raise _NoLookError(*self._interrupted())
        try:
            self._looking = True
            return self._look(recipes)
        except _StopLookingError:
            raise _NoLookError(*self._interrupted()) from None
        except Exception as error:  # a fault of ours ends these recipes, and not the others
            message = error.message if isinstance(error, QuantmintError) else f"{type(error).__name__}: {error}"
            raise _NoLookError("failed", 5, quotable(message, os.environ)) from error
        finally:
            self._looking = False

    def _queue(self, recipes: Sequence[str]) -> None:
        try:
            dues = self._due(recipes)
        except _NoLookError as error:
            state, code, reason = error.args
            for recipe in recipes:
                self._end(Ended(recipe=recipe, state=state, exit_code=code, reason=reason))
            return
        for sentence in dict.fromkeys(sentence for due in dues for sentence in due.unknown):
            self._warn(sentence)
        for recipe, due in zip(recipes, dues, strict=True):
            job = jobs.queued(due, self._options, self._devices, self._warn)
            if isinstance(job, Ended):
                self._end(job)
            elif due.name in self._waiting:
                self._warn(f"{recipe}: {due.name} is queued already")
            else:
                self._waiting[due.name] = job
                self._write(f"{due.name}: queued: {due.reason}")

    def _begin_next(self) -> bool:
        """Begin the next recipe that may; return whether one left the queue."""
        if not self._waiting or time.monotonic() < self._nothing_until:
            return False
        room = self._room()
        for job in list(self._waiting.values()):
            if (reason := jobs.unaffordable(job, room)) is not None:
                self._close(job, jobs.ran(job, job.last, 0) if job.last else jobs.unrun(job, "left", 0, reason))
        begin = jobs.next_begin(self._waiting.values(), room)
        if begin is None:
            self._nothing_until = time.monotonic() + _ASK_AGAIN_S
            return False
        job, numbers = begin
        with self._faults_of(job):
            self._begin(job, numbers)
        return job.name not in self._waiting

    def _begin(self, job: FleetJob, numbers: Sequence[int]) -> None:
        """Take the locks of recipe and devices and begin, if no other process holds one and the recipe is still due."""
        options, folder = self._options, folder_of(self._options.store)
        job.ready = time.monotonic() + _ASK_AGAIN_S
        folder.mkdir(parents=True, exist_ok=True)
        if job.lock is None:
            lock = Lock(folder / f"{job.name}.lock")
            if not try_lock(lock):
                self._leave_or_wait(job)
                return
            job.lock = lock
        devices = take(options.store, numbers)
        if devices is None:  # another fleet was quicker since we looked
            if not job.attempts:
                self._free(job)
            return
        job.devices = devices
        if not job.attempts and (ended := self._look_again(job)) is not None:
            self._close(job, ended)
            return
        # It fetches, signs and publishes as a person's run does, but notifies nobody.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("QUANTMINT_WEBHOOK")}
        job.attempt = RecipeProcess(
            options.command_line(job.due.recipe),
            new_log(options.store, job.name),
            self._devices.environment(ours, numbers),
            grace_s=options.grace_s,
            limit_s=job.limit_s,
            queues=options.on is not None,
        )
        job.attempts += 1
        self._running[job.name] = self._waiting.pop(job.name)
        self._write(f"{job.name}: started" + (f", attempt {job.attempts}" if job.attempts > 1 else ""))

    def _leave_or_wait(self, job: FleetJob) -> None:
        if not self._options.wait:
            self._close(job, jobs.unrun(job, "elsewhere", 0, "another process works on it"))
        elif not job.elsewhere:
            job.elsewhere = True
            self._write(f"{job.name}: waits: another process works on it")

    def _look_again(self, job: FleetJob) -> Ended | None:
        """Return how a recipe leaves the round that is not due any more, now that its lock is ours; None if it is."""
        try:
            (job.due,) = self._due([job.due.recipe])
        except _NoLookError as error:
            return jobs.unrun(job, *error.args)
        again = jobs.queued(job.due, self._options, self._devices, self._warn)
        if isinstance(again, Ended):
            return again
        job.state = again.state
        return None

    # What ends.

    def _watch(self) -> None:
        left_s = self._left_s()
        for job in list(self._running.values()):
            with self._faults_of(job):
                if job.attempt is None:
                    continue
                if left_s is not None and left_s <= 0 and not job.timed_out:
                    job.timed_out = True
                    job.attempt.stop()
                if (stage := job.attempt.watch()) is not None:
                    self._write(f"{job.name}: [{stage}]")
                if not job.attempt.running:
                    self._finish(job, job.attempt)

    def _finish(self, job: FleetJob, attempt: RecipeProcess) -> None:
        """Take the result of an attempt; queue its job again after a transient fault, else close it."""
        attempted = attempt.result()
        job.attempt, job.last, job.seconds = None, attempted, job.seconds + attempted.seconds
        job.failed += attempted.transient
        del self._running[job.name]
        self._nothing_until = 0.0
        if self._grown is not None:
            self._grown = bytes_below(self._options.store) - self._bytes_before
        pause = jobs.pause_s(job, attempted, self._options.first_wait_s)
        job.ready = time.monotonic() + (pause or 0.0)
        over = job.timed_out or self._stopped_by or jobs.unaffordable(job, self._room()) is not None
        if pause is None or over:
            self._close(job, jobs.ran(job, attempted, self._stopped_by))
            return
        self._give_back(job)
        self._waiting[job.name] = job  # its lock stays ours: nobody else tries in between
        self._write(f"{job.name}: failed, tried again in {duration(pause)}: {attempted.error}")

    @contextmanager
    def _faults_of(self, job: FleetJob) -> Iterator[None]:
        """Close a job whose disk fails, so that the others go on."""
        try:
            with disk_errors(self._options.store):
                yield
        except QuantmintError as error:
            self._close(job, jobs.unrun(job, "failed", error.exit_code, error.message))

    def _stop_attempts(self) -> None:
        for job in self._running.values():  # all at once: their times of grace go by together
            if job.attempt is not None:
                job.attempt.stop()

    def _close(self, job: FleetJob, ended: Ended) -> None:
        """Remove a job, and write its record before its lock is free."""
        self._running.pop(job.name, None)
        self._waiting.pop(job.name, None)
        if job.attempts and job.lock is not None:
            try:
                with disk_errors(job.lock.path):
                    job.lock.check()
                write_state(self._options.store, jobs.state_after(job, ended))
            except QuantmintError as error:
                self._warn(f"{job.name}: how it ended could not be noted: {error.message}")
        self._free(job)
        self._end(ended)

    def _free(self, job: FleetJob) -> None:
        if job.attempt is not None:
            job.attempt.close()
        if job.lock is not None:
            job.devices.callback(job.lock.release)
        job.attempt = job.lock = None
        self._give_back(job)

    def _give_back(self, job: FleetJob) -> None:
        try:
            with disk_errors(self._options.store):
                job.devices.close()
        except QuantmintError as error:
            self._warn(f"{job.name}: {error.message}")

    def _interrupted(self) -> tuple[State, int, str]:
        return "interrupted", 128 + self._stopped_by, "it was told to stop"

    def _end(self, ended: Ended) -> None:
        ended = replace(ended, reason=redact(ended.reason, os.environ))
        self._ended.append(ended)
        self._on_end(ended)
        self._write(str(ended))

    def _warn(self, message: str) -> None:
        message = redact(message, os.environ)  # of a proxy, a bucket or the Hub, in whatever words
        self._warnings.append(message)
        self._pass_on(message)

    def _left_s(self) -> float | None:
        hours = self._options.max_hours
        return None if hours is None else self._began + hours * 3600 - time.monotonic()

    def _room(self) -> Room:
        slots = self._options.slots(len(self._devices.values)) - len(self._running)
        free = free_of(self._options.store, self._devices.values) if slots > 0 else ()
        limit = self._options.max_disk
        bytes_left = None if limit is None else limit - (self._grown or 0)
        return Room(time.monotonic(), slots, free, self._left_s(), bytes_left)


def bytes_below(folder: Path) -> int:
    """Return the bytes of the files below a folder; a file with several names (hard links) counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.lstat(f"{parent}/{name}")  # a Path for each would be slow
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
