"""A run on a Ray cluster as if it were a child of this process: its JSON, its exit code, and it ends when we must.

Ray keeps one log for both outputs, with lines of its own. So the job writes what the run prints to a file of the store,
by which nobody has to tell the run's object from its log. Ray gives up a job that it found no room for (after 15
minutes, unless its head says otherwise): that is asked for again, which is what waiting in a queue means.

That file is made before, and without it a job does nothing: so one that was given up ends even where nobody could tell
the cluster, or where Ray had not begun it. Two jobs of one run would be safe, as they meet at the locks of stages, and
one of them for nothing: so one that is under way, and whose file is there, is followed.
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pipeline.errors import QuantmintError, StageError
from pipeline.store.disk import disk_errors
from pipeline.store.tree import REFRESH
from pipeline.submit.following import PATIENCE_S, followed
from pipeline.submit.task import Task

_PAUSE_S: Final = 2.0
_STOPPING_S: Final = 25.0  # a fleet ends us after 30
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RUNNING: Final = "RUNNING"
RUNS: Final = "has found room"
"""What is shown of a job, after its identifier, once it runs: who limits its time counts from there."""


@dataclass(frozen=True, slots=True)
class Mark:
    """``identifier`` is what a job is to be called, ``key`` what it has in common with others of the same run, and
    ``answer`` the absolute path of the file that the run's standard output goes to.
    """

    identifier: str
    key: str
    answer: Path


@dataclass(frozen=True, slots=True)
class Now:
    """How a job is. ``exit_code`` is the run's once it has ended, 128 + N after signal N, None where it came to none.

    ``unplaced``: no node had room for it, and it never began. ``lost``: what it ran on went away. ``word`` and
    ``message`` are Ray's.
    """

    word: str
    ended: bool
    exit_code: int | None = None
    unplaced: bool = False
    lost: bool = False
    message: str = ""


class Jobs(Protocol):
    """What is asked of a cluster. Errors are those of `pipeline.submit.place.Place`."""

    def begin(self, task: Task, mark: Mark) -> None:
        """Submit a job with this mark."""

    def under_way(self, key: str) -> tuple[str, ...]:
        """The identifiers of jobs with this key that have not ended."""

    def lines(self, identifier: str) -> Iterator[str]:
        """The job's log from its beginning, piece by piece, until it has ended."""

    def now(self, identifier: str) -> Now:
        """How the job is."""

    def cancel(self, identifier: str) -> None:
        """End it."""


def key_of(task: Task, program: Sequence[str], folder: Path, text: str) -> str:
    """What two jobs have in common that would do the same: the command, its folder, machines and recipe ``text``."""
    same = [*task.words(*program), str(folder), task.gpus, task.nodes, text]
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:32]


def new_mark(task: Task, key: str, store: Path) -> Mark:
    """That of a job which is not there yet."""
    identifier = f"quantmint-{task.name}-{uuid.uuid4().hex[:12]}"
    return Mark(identifier, key, _answer_of(store, task.name, identifier))


def run_attached(
    jobs: Jobs,
    task: Task,
    key: str,
    *,
    store: Path,
    show: Callable[[str], None],
    pause_s: float = _PAUSE_S,
    patience_s: float = PATIENCE_S,
) -> tuple[int, str]:
    """Run ``task`` to its end: the exit code, and what the run printed on its standard output, "" for nothing.

    ``show`` takes the log, piece by piece. SIGTERM, Ctrl-C and SIGHUP end the job: 128 + N. Raises a transient
    `StageError` for a cluster that is away for longer than ``patience_s`` seconds, and for a job whose node is gone;
    `StageError` for one that somebody else stopped; `UserError` for what the cluster refuses.
    """
    identifier: str | None = None
    with _signals() as held_back:
        try:
            wanted = (one for one in jobs.under_way(key) if _answer_of(store, task.name, one).exists())
            identifier = next(wanted, None)
            if identifier is not None:
                show(f"{identifier} runs there already, and is followed\n")
            while True:
                if identifier is None:
                    with held_back():  # what was submitted must be known, to be ended
                        identifier = _begun(jobs, task, key, store)
                    show(f"{identifier} was submitted\n")
                watch = _Watch(jobs, show)
                now = followed(identifier, watch.lines, watch.now, show, pause_s=pause_s, patience_s=patience_s)
                text = _take(_answer_of(store, task.name, identifier))
                if not now.unplaced:
                    return _outcome(identifier, now, text)
                show(f"{identifier} found no room; it is asked for again\n")
                identifier = None
        except _ToldToStop as told:
            if identifier is not None:
                _take(_answer_of(store, task.name, identifier))
                _stop(jobs, identifier, pause_s)
            return 128 + told.number, ""


class _Watch:
    """Tells once that a job runs. The cluster is asked, for Ray writes into its log before it has found room."""

    def __init__(self, jobs: Jobs, show: Callable[[str], None]) -> None:
        self._jobs, self._show, self._runs = jobs, show, False

    def now(self, identifier: str) -> Now:
        found = self._jobs.now(identifier)
        if found.word == _RUNNING and not self._runs:
            self._runs = True
            self._show(f"{identifier} {RUNS}\n")
        return found

    def lines(self, identifier: str) -> Iterator[str]:
        for piece in self._jobs.lines(identifier):
            if not self._runs:
                with suppress(QuantmintError):
                    self.now(identifier)
            yield piece


def _begun(jobs: Jobs, task: Task, key: str, store: Path) -> str:
    mark = new_mark(task, key, store)
    with disk_errors(mark.answer):
        mark.answer.parent.mkdir(parents=True, exist_ok=True)
        mark.answer.touch(exist_ok=False)
    try:
        jobs.begin(task, mark)
    except QuantmintError:
        _take(mark.answer)
        raise
    return mark.identifier


def _stop(jobs: Jobs, identifier: str, pause_s: float) -> None:
    """End a job, and wait until one that runs has: it has locks that whoever comes next would wait for."""
    with suppress(QuantmintError):
        jobs.cancel(identifier)
        end = time.monotonic() + _STOPPING_S
        while jobs.now(identifier).word == _RUNNING and time.monotonic() < end:
            time.sleep(min(pause_s, 0.2))


def _outcome(identifier: str, now: Now, text: str) -> tuple[int, str]:
    if now.word == "STOPPED":
        raise StageError(f"{identifier} was stopped at the cluster")
    if now.exit_code is None:
        raise StageError(f"{identifier}: {now.message or now.word}", transient=now.lost)
    return now.exit_code, text


def _answer_of(store: Path, name: str, identifier: str) -> Path:
    return (store / REFRESH).absolute() / "logs" / name / f"{identifier}.answer"


def _take(answer: Path) -> str:
    with disk_errors(answer):
        try:
            text = answer.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        answer.unlink(missing_ok=True)
    return text


class _ToldToStop(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _signals() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """The first of our signals as `_ToldToStop`, later ones as nothing; what it yields holds it back for a block."""
    told: list[int] = []
    holding = False

    def hear(number: int, _frame: object) -> None:
        told.append(number)
        if len(told) == 1 and not holding:
            raise _ToldToStop(number)

    @contextmanager
    def held_back() -> Iterator[None]:
        nonlocal holding
        holding = True
        try:
            yield
        finally:
            holding = False
        if told:
            raise _ToldToStop(told[0])

    before: dict[int, Any] = {number: signal.signal(number, hear) for number in _SIGNALS}
    try:
        yield held_back
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
