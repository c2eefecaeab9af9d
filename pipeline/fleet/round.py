"""Many recipes over the devices of one machine: queued, begun, repeated, judged, summed up.

::

    summary = run([Request("llama8b-ptpc"), Request("qwen-mxfp4")], Options(store=Path("store")), on_event=print)

One thread decides: it takes messages from a queue, asks `pipeline.fleet.order` what begins, and owns every lock. What
takes long has a thread of its own that only sends messages: looking at what is due, and a child. So requests may come
while others run, and an order to stop is heard at once.

A recipe is looked at twice: with all others, for the queue, and once more when its lock is ours. In between another
fleet may have made it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Literal

from pipeline.errors import QuantmintError
from pipeline.fleet.account import Account
from pipeline.fleet.attempt import child_variables
from pipeline.fleet.devices import NONE, devices_of, free_of, give_back, take
from pipeline.fleet.errands import Errands
from pipeline.fleet.events import Event, State
from pipeline.fleet.job import Job, impossible, not_run, ran, state_after, unrun
from pipeline.fleet.locking import try_lock
from pipeline.fleet.messages import Add, Close, Done, Looked, LookedAgain, Message, Stage, Stop
from pipeline.fleet.order import Room, Waiting, next_begin, unaffordable, wake_at
from pipeline.fleet.requests import Look, Options, Request
from pipeline.fleet.retries import again_in_s
from pipeline.fleet.summary import Ended, Summary
from pipeline.locks import Lock
from pipeline.publish.folder import RELEASES
from pipeline.refresh.state import RecipeState, folder_of, read_state, write_state
from pipeline.serving.host.machine import Machine
from pipeline.store.disk import disk_errors

if TYPE_CHECKING:
    from pipeline.refresh.due import Due

_ASK_AGAIN_S: Final = 1.0  # between two looks at a lock that another process has


def run(
    requests: Iterable[Request],
    options: Options,
    *,
    on_event: Callable[[Event], None],
    look: Look | None = None,
    warn: Callable[[str], None] | None = None,
) -> Summary:
    """Run what is due of these recipes to its end; see `Fleet`."""
    fleet = Fleet(options, on_event=on_event, look=look, warn=warn)
    fleet.add(requests)
    fleet.close()
    return fleet.run()


class Fleet:
    """The engine. ``add``, ``close`` and ``stop`` are for any thread, and ``stop`` for signal handlers too.

    ``on_event`` is called in the thread of ``run``; so is ``on_round``, with every round that is over: a round goes
    from the first request to when nothing is left to do. ``look`` is `pipeline.refresh.due.look` where nothing else is
    given, ``warn`` hears what went wrong and stopped nothing. Raises `UserError` for devices that are not there.
    """

    def __init__(
        self,
        options: Options,
        *,
        on_event: Callable[[Event], None],
        look: Look | None = None,
        warn: Callable[[str], None] | None = None,
        on_round: Callable[[Summary], None] | None = None,
    ) -> None:
        self._options = options
        self._on_event = on_event
        self._warn = warn or logging.getLogger(__name__).warning
        self._on_round = on_round
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._errands = Errands(look or options.look(), options, self._inbox.put)
        self._devices = NONE if options.on is not None else devices_of(Machine(), options.devices)
        self._slots = options.slots(len(self._devices.numbers))
        self._unlooked: list[Request] = []
        self._looked_at: tuple[Request, ...] = ()
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._closed = False
        self._stopped_by: int | None = None
        self._account = self._new_account()

    def add(self, requests: Iterable[Request]) -> None:
        """Ask for recipes. One that is queued or runs already is not queued twice."""
        self._inbox.put(Add(tuple(requests)))

    def close(self) -> None:
        """No more requests come: ``run`` returns when the last recipe has ended."""
        self._inbox.put(Close())

    def stop(self, number: int) -> None:
        """End the children, free the locks and let ``run`` return; ``number`` is the signal's that asked for it."""
        self._inbox.put(Stop(number))

    def run(self) -> Summary:
        """Work until all is done and `close` was called, or until `stop`. Raises what ``on_event`` raises."""
        summary = None
        try:
            while True:
                self._advance()
                if self._idle():
                    over = self._closed or self._stopped_by is not None
                    if self._account.ended or (over and summary is None):
                        summary = self._end_round()
                    if over and summary is not None:
                        return summary
                self._hear(self._wake_in())
        finally:
            self._abandon()

    def _hear(self, timeout: float | None) -> None:
        """Take every message there is, after waiting for the first (``timeout`` seconds; None: as long as it takes)."""
        with suppress(Empty):
            self._handle(self._inbox.get(timeout=timeout))
            while True:
                self._handle(self._inbox.get_nowait())

    def _handle(self, message: Message) -> None:
        match message:
            case Add(requests) if self._stopped_by is not None:
                self._turn_away(requests, self._stopped_by)
            case Add(requests):
                if self._idle() and not self._account.ended:
                    self._account = self._new_account()  # its time begins with its first request
                known = {*self._unlooked, *self._looked_at}
                self._unlooked += [one for one in dict.fromkeys(requests) if one not in known]
            case Close():
                self._closed = True
            case Stop(number):
                self._end_all(number)
            case Looked() if message.requests is self._looked_at:
                self._looked_at = ()
                self._queue(message)
            case LookedAgain(job) if self._running.get(job.name) is job and job.thread is None:
                self._confirm(message)
            case Stage(job, stage) if self._running.get(job.name) is job:
                self._account.tell("stage", job, stage=stage)
            case Done(job) if self._running.get(job.name) is job:
                self._done(message)
            case _:
                pass  # from a thread that nobody waits for any more

    # New requests.

    def _queue(self, message: Looked) -> None:
        if message.error:
            for request in message.requests:
                self._account.end(_unknown(request, "failed", 5, message.error))
            return
        for sentence in dict.fromkeys(sentence for due in message.found for sentence in due.unknown):
            self._account.warn(sentence)
        for request, due in zip(message.requests, message.found, strict=True):
            known = self._waiting.get(due.name) or self._running.get(due.name)
            if known is not None and _other_file(known.due, due):
                reason = f"another file's recipe has the name {due.name} too, and would publish over it"
                self._account.end(_unknown(request, "broken", 2, reason))
                continue
            if known is not None:
                if due.state != "broken":
                    self._account.warn(f"{request.recipe}: {due.name} is queued or runs already")
                continue
            state = RecipeState(name=due.name) if due.state == "broken" else self._state_of(due.name)
            ended = self._no_attempt(request, due, state)
            if ended is not None:
                self._account.end(ended)
                continue
            now = time.monotonic()
            if due.loaded is not None and due.loaded.recipe.publish.folder is not None:
                releases = Path(due.loaded.recipe.publish.folder) / RELEASES / due.name  # the link's end moves
                self._account.budgets.watch([releases])
            job = self._waiting[due.name] = Job(request, due, state, since=now, ready=now)
            self._account.tell("queued", job, reason=due.reason)

    def _no_attempt(self, request: Request, due: Due, state: RecipeState) -> Ended | None:
        return not_run(request, due, state, everything=self._options.runs_everything) or impossible(
            request, due, self._devices
        )

    # What begins.

    def _advance(self) -> None:
        if self._stopped_by is not None:
            return
        if self._unlooked and not self._looked_at:
            self._looked_at, self._unlooked = tuple(self._unlooked), []
            self._errands.look_at(self._looked_at)
        left = self._account.budgets.left_s(time.monotonic())
        if left is not None and left <= 0:
            for job in list(self._running.values()):
                self._cut(job, "time")
        while self._waiting and self._begin_next():
            pass

    def _begin_next(self) -> bool:
        """Begin a recipe, or find that some are not begun any more; False where nothing is to be done now."""
        room = self._room()
        if next_begin([self._as_waiting(job) for job in self._waiting.values()], room) is not None:
            self._account.budgets.measure()
            room = self._room()
        for job in list(self._waiting.values()):
            reason = unaffordable(self._as_waiting(job), room)
            if reason is not None:
                del self._waiting[job.name]
                self._leave_undone(job, reason)
        begin = next_begin([self._as_waiting(job) for job in self._waiting.values()], room)
        if begin is None:
            return False
        job = self._waiting.pop(begin.name)
        try:
            self._begin(job, begin.devices)
        except QuantmintError as error:
            self._close_job(job, unrun(job, "failed", error.exit_code, error.message))
        return True

    def _begin(self, job: Job, devices: tuple[int, ...]) -> None:
        """Take the locks and begin; or put it back, where somebody else has one of them."""
        root, now = self._options.store, time.monotonic()
        with disk_errors(root):
            folder_of(root).mkdir(parents=True, exist_ok=True)
            if job.lock is not None and job.lock.lost:  # this machine slept between two attempts
                self._free(job)
            if job.lock is None:
                lock = Lock(folder_of(root) / f"{job.name}.lock")
                if not try_lock(lock):
                    self._elsewhere(job, now)
                    return
                job.lock = lock
            held = take(root, devices, self._devices.uuids)
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
            self._errands.look_again(job)

    def _elsewhere(self, job: Job, now: float) -> None:
        first, job.elsewhere, job.ready = not job.elsewhere, True, now + _ASK_AGAIN_S
        if not self._options.wait:
            self._close_job(job, unrun(job, "elsewhere", 0, "another process works on it"))
            return
        self._waiting[job.name] = job
        if first:
            self._account.tell("waiting", job, reason="another process works on it")

    def _confirm(self, message: LookedAgain) -> None:
        """The recipe is ours, and was looked at again: attempt it if that is still to be done."""
        job, due = message.job, message.due
        if due is None:
            self._close_job(job, unrun(job, "failed", 5, message.error))
            return
        job.due, job.state = due, self._state_of(job.name)
        ended = self._no_attempt(job.request, due, job.state)
        if ended is None and job.why is not None:
            ended = unrun(job, "left", 0, "the round's time is used up")
        if ended is not None:
            self._close_job(job, ended)
        elif self._as_waiting(job).devices != len(job.devices):  # the recipe was edited in between
            del self._running[job.name]
            self._free(job)
            self._waiting[job.name] = job
        else:
            self._attempt(job)

    def _attempt(self, job: Job) -> None:
        job.attempts += 1
        self._account.tell("started", job)
        environment = self._devices.environment(child_variables(os.environ), job.devices)
        job.thread = self._errands.run_child(job, environment)

    # What ends.

    def _done(self, message: Done) -> None:
        job, attempted, options = message.job, message.attempted, self._options
        job.thread = None
        self._account.budgets.spent()
        if attempted is None:
            self._close_job(job, unrun(job, "failed", 5, message.error), keep=True)
            return
        job.last, job.seconds = attempted, job.seconds + attempted.seconds
        job.made |= attempted.finished
        job.failed += attempted.transient
        job.killed += attempted.killed
        pause = again_in_s(
            attempted, failed=job.failed, killed=job.killed, retries=options.retries, first=options.first_wait_s
        )
        job.ready = time.monotonic() + (pause or 0.0)
        if pause is None or job.why is not None or unaffordable(self._as_waiting(job), self._room()) is not None:
            self._close_job(job, ran(job, attempted, self._stopped_by), keep=True)
            return
        del self._running[job.name]
        self._free_devices(job)
        self._waiting[job.name] = job  # its lock stays ours: nobody else tries in between
        self._account.tell(
            "retrying",
            job,
            wait_s=round(pause, 1),
            exit_code=attempted.exit_code,
            reason=attempted.error,
            log=str(attempted.log),
        )

    def _leave_undone(self, job: Job, reason: str) -> None:
        if job.last is None:
            self._close_job(job, unrun(job, "left", 0, reason))
        else:
            self._close_job(job, ran(job, job.last, None), keep=True)

    def _end_all(self, number: int) -> None:
        if self._stopped_by is not None:
            return
        self._stopped_by = number
        for job in list(self._waiting.values()):
            del self._waiting[job.name]
            self._close_job(job, unrun(job, "interrupted", 128 + number, "it was told to stop"))
        for job in list(self._running.values()):
            if job.thread is None:
                self._close_job(job, unrun(job, "interrupted", 128 + number, "it was told to stop"))
            else:
                self._cut(job, "signal")
        self._turn_away((*self._looked_at, *self._unlooked), number)
        self._looked_at, self._unlooked = (), []

    def _turn_away(self, requests: Iterable[Request], number: int) -> None:
        for request in requests:
            self._account.end(_unknown(request, "interrupted", 128 + number, "it was told to stop"))

    def _cut(self, job: Job, why: Literal["time", "signal"]) -> None:
        job.why = job.why or why
        job.stop.set()

    def _close_job(self, job: Job, ended: Ended, *, keep: bool = False) -> None:
        """The end of a job in this round; with ``keep``, its state is written while its lock is ours."""
        self._running.pop(job.name, None)
        if keep and job.lock is not None:
            try:
                with disk_errors(job.lock.path):
                    job.lock.check()
                write_state(self._options.store, state_after(job, ended))
            except QuantmintError as error:
                self._account.warn(f"{job.name}: how it ended could not be noted: {error.message}")
        self._free(job)
        self._account.end(ended)

    def _free(self, job: Job) -> None:
        self._free_devices(job)
        lock, job.lock = job.lock, None
        if lock is not None:
            self._give_back(job, (lock,))

    def _free_devices(self, job: Job) -> None:
        held, job.held, job.devices = job.held, (), ()
        self._give_back(job, held)

    def _give_back(self, job: Job, locks: Iterable[Lock]) -> None:
        try:
            with disk_errors(self._options.store):
                give_back(locks)
        except QuantmintError as error:
            self._account.warn(f"{job.name}: {error.message}")

    # Rounds.

    def _idle(self) -> bool:
        return not (self._unlooked or self._looked_at or self._waiting or self._running)

    def _new_account(self) -> Account:
        return Account(
            self._options, on_event=self._on_event, warn=self._warn, waiting=self._waiting, running=self._running
        )

    def _end_round(self) -> Summary:
        summary = self._account.close(self._stopped_by)
        self._account = self._new_account()
        if self._on_round is not None:
            self._on_round(summary)
        return summary

    def _abandon(self) -> None:
        """Leave nothing behind, however ``run`` ends: no child, no lock."""
        jobs = [*self._running.values(), *self._waiting.values()]
        for job in jobs:
            job.stop.set()
        for job in jobs:
            if job.thread is not None:
                job.thread.join()
            self._free(job)
        self._running.clear()
        self._waiting.clear()

    # What is known now.

    def _as_waiting(self, job: Job) -> Waiting:
        return job.waiting(any_devices=self._devices.variable is not None)

    def _room(self) -> Room:
        now, slots = time.monotonic(), self._slots - len(self._running)
        taken = {number for job in self._running.values() for number in job.devices}
        ours = [number for number in self._devices.numbers if number not in taken]
        return Room(
            now=now,
            slots=slots,
            free=free_of(self._options.store, ours, self._devices.uuids) if slots > 0 else (),
            running=frozenset(self._running),
            left_s=self._account.budgets.left_s(now),
            left_bytes=self._account.budgets.left_bytes(),
        )

    def _wake_in(self) -> float | None:
        """Seconds until something may have changed that sends no message; None where all does."""
        now = time.monotonic()
        moments: list[float | None] = [wake_at([self._as_waiting(job) for job in self._waiting.values()], now)]
        if len(self._running) < self._slots and any(job.ready <= now for job in self._waiting.values()):
            moments.append(now + _ASK_AGAIN_S)  # a device that another fleet has
        left = self._account.budgets.left_s(now)
        if left is not None and any(job.why is None for job in (*self._running.values(), *self._waiting.values())):
            moments.append(now + left)
        known = [moment for moment in moments if moment is not None]
        return max(0.0, min(known) - now) if known else None

    def _state_of(self, name: str) -> RecipeState:
        try:
            return read_state(self._options.store, name, warn=self._account.warn)
        except QuantmintError as error:
            self._account.warn(error.message)
            return RecipeState(name=name)


def _other_file(one: Due, other: Due) -> bool:
    """Whether two recipes of one name are two recipes."""
    files = [due.loaded.path.resolve() for due in (one, other) if due.loaded is not None]
    return len(files) == 2 and files[0] != files[1]


def _unknown(request: Request, state: State, code: int, reason: str) -> Ended:
    """The end of a request of which not even the name is known."""
    return Ended(recipe=request.recipe, trigger=request.trigger, state=state, exit_code=code, reason=reason)
