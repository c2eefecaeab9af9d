"""A Ray cluster as a place: Ray Jobs, through the client that speaks to the head's dashboard.

Ray keeps a job's environment where everyone who sees the dashboard reads it, so nothing of ours goes along: tokens are
what the cluster's nodes have. The entry point is a line for a shell, made of quoted words.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import StageError, UserError
from pipeline.passing import passes
from pipeline.submit.attached import Mark, Now
from pipeline.submit.deadline import within
from pipeline.submit.place import BROKEN, State, Submitted
from pipeline.submit.task import Task, program_here, require_no_secret, require_plain
from pipeline.submit.waiting import Waiting

_THEIRS = re.compile(r"status code 5\d\d|WebSocket")
_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
_UNPLACED = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
_LOST = {"JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"}
_KEY = "quantmint-run"
_TIMEOUT_S = 60.0  # of everything but a log
_QUIET_S = 300.0  # after which a log is asked for again: a connection that is lost says nothing either
_CLIENTS = ("aiohttp", "ray", "requests")  # which the client's errors are of, besides
_INSTEAD = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # which the client takes, whatever address it is given
# Ray kills 3 s after SIGTERM otherwise, and a server needs longer to let go of its GPUs.
R = TypeVar("R")
_GRACE = {"RAY_JOB_STOP_WAIT_TIME_S": "20"}


@dataclass(frozen=True, slots=True)
class Options:
    """``folder`` is where the run starts, on the filesystem that the nodes share; ``venv`` an environment there."""

    folder: Path
    venv: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def description(task: Task, options: Options, mark: Mark | None = None) -> dict[str, Any]:
    """Arguments of `JobSubmissionClient.submit_job`.

    On one node the run itself holds the GPUs. On several the run is spread by Ray, and holds none. A job with a
    ``mark`` that needs no GPU asks for a core where nothing else was said: Ray begins all others at once, on its head.
    """
    require_plain("the working folder", str(options.folder))
    for name in options.variables:
        require_no_secret("--env", name, "Set it where the nodes of the cluster get their environment from.")
    if task.seconds is not None:
        raise UserError("--time: Ray Jobs have no time limit", hint="Leave it out; --cancel ID ends a job.")
    line = shlex.join(task.words(*program_here(options.venv)))
    several = task.nodes > 1
    there = f"cd {shlex.quote(str(options.folder))}"
    variables = {**_GRACE, **options.variables}
    cpus = task.cpus
    if mark is not None:
        answer = shlex.quote(str(mark.answer))
        there, line = f"test -e {answer} && {there}", f"{line} > {answer}"
        cpus = 1 if cpus is None and not task.gpus and not several else cpus
    return {
        "entrypoint": f"{there} || exit {BROKEN}; exec {line}",  # a shell would end as a run does that judged
        "metadata": {"quantmint": task.name, **({} if mark is None else {_KEY: mark.key})},
        **({} if mark is None else {"submission_id": mark.identifier}),
        "runtime_env": {"env_vars": variables},
        **({} if cpus is None else {"entrypoint_num_cpus": cpus}),
        **({} if several or not task.gpus else {"entrypoint_num_gpus": task.gpus}),
        **({} if task.memory_gb is None else {"entrypoint_memory": task.memory_gb * 10**9}),
    }


class RayJobs:
    """The cluster with its dashboard at ``address``, such as http://head:8265; ``auto`` is what Ray finds here."""

    def __init__(self, address: str, options: Options | None) -> None:
        if address.startswith("ray://"):
            raise UserError(
                f"--ray: found {address}, the address of Ray's client, and jobs go to the dashboard",
                hint="http://HEAD:8265 where nothing else was set.",
            )
        self._address = None if address == "auto" else address if "://" in address else f"http://{address}"
        self._options = options

    def text(self, task: Task, mark: Mark | None = None) -> str:
        """What the client is called with, as JSON."""
        return json.dumps(description(task, self._given, mark), indent=1) + "\n"

    def submit(self, task: Task) -> Submitted:
        """Send it."""
        described = description(task, self._given)
        client = self._connect()
        hint = f"The job may run there all the same: ray job list {self._at}shows one with the metadata quantmint: "
        identifier = str(self._asked(lambda: client.submit_job(**described), f"{hint}{task.name}, if it does."))
        return Submitted(identifier, f"ray job logs {self._at}--follow {identifier}")

    def begin(self, task: Task, mark: Mark) -> None:
        """Send it, as one whose standard output goes to a file."""
        require_plain("the store", str(mark.answer))
        described = description(task, self._given, mark)
        client = self._connect()
        # One whose answer is lost does nothing there: its mark is gone.
        self._asked(lambda: client.submit_job(**described), "The same command asks for it again.")

    def under_way(self, key: str) -> tuple[str, ...]:
        """Of all jobs that the cluster remembers."""
        client = self._connect()
        jobs = self._asked(client.list_jobs)
        return tuple(
            str(job.submission_id)
            for job in jobs
            if job.submission_id and (job.metadata or {}).get(_KEY) == key and _plain(job.status) not in _ENDED
        )

    def now(self, identifier: str) -> Now:
        """What Ray knows of it."""
        _require_name(identifier)
        client = self._connect()
        job = self._asked(lambda: client.get_job_info(identifier), self._later(identifier))
        word, why = _plain(job.status), _plain(job.error_type)
        code = 0 if word == "SUCCEEDED" else job.driver_exit_code or None
        return Now(
            word,
            word in _ENDED,
            code if code is None or code >= 0 else 128 - code,
            unplaced=why == _UNPLACED,
            lost=why in _LOST,
            message=" ".join(str(job.message or "").split()),
        )

    def state(self, identifier: str) -> State:
        """Ray's status, and the run's exit code once there is one."""
        now = self.now(identifier)
        waits = Waiting(now.message) if now.word == "PENDING" and now.message else None
        return State(now.word, None if not now.ended else BROKEN if now.exit_code is None else now.exit_code, waits)

    def lines(self, identifier: str, seen: Callable[[State], None] | None = None) -> Iterator[str]:
        """What the client tails, or as much as comes before it has been silent for long."""
        _require_name(identifier)
        if seen is not None:
            seen(self.state(identifier))
        client = self._connect()
        logging.getLogger(type(client).__module__).setLevel(logging.WARNING)  # it tells of its own connection
        with _answers():
            yield from stepwise(client.tail_job_logs(identifier), _QUIET_S)

    def cancel(self, identifier: str) -> None:
        """SIGTERM, then SIGKILL, by Ray."""
        _require_name(identifier)
        client = self._connect()
        self._asked(lambda: client.stop_job(identifier), self._later(identifier))

    @property
    def _given(self) -> Options:
        assert self._options is not None  # noqa: S101 - only who asks for jobs that are there leaves it out
        return self._options

    @property
    def _at(self) -> str:
        return f"--address {shlex.quote(self._address)} " if self._address else ""

    def _later(self, identifier: str) -> str:
        address = shlex.quote(self._address or "auto")
        return f"The job may run on: quantmint submit --ray {address} --status {identifier} looks again."

    def _asked(self, call: Callable[[], R], hint: str | None = None) -> R:
        """What the client answers; it waits for ever for a head behind a connection that was dropped."""

        def answered() -> R:
            with _answers():
                return call()

        try:
            return within(_TIMEOUT_S, answered)
        except TimeoutError as error:
            said = f"the Ray dashboard at {self._address or 'the address that Ray found'} gave no answer "
            raise StageError(f"{said}within {_TIMEOUT_S:g} s", hint=hint, transient=True) from error

    def _connect(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        hidden = {} if self._address is None else {name: os.environ.pop(name, None) for name in _INSTEAD}
        try:
            return self._asked(lambda: JobSubmissionClient(self._address))
        except (KeyError, TypeError, ValueError) as error:  # of its answer, or of the address
            raise UserError(
                f"--ray: {self._address or 'what Ray finds here'} is not the address of a Ray dashboard"
            ) from error
        finally:
            os.environ.update({name: value for name, value in hidden.items() if value is not None})


def _plain(word: Any) -> str:
    return str(getattr(word, "value", word))


def _require_name(identifier: str) -> None:
    """UserError for what would be another path of the dashboard."""
    if not re.fullmatch(r"\w[\w.-]*", identifier):
        raise UserError(f"found the job {identifier!r}, expected the identifier that Ray gave it")


def stepwise(pieces: AsyncIterator[str], quiet_s: float | None = None) -> Iterator[str]:
    """An asynchronous iterator's items, for readers that know of no loop; no more after ``quiet_s`` without one."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(asyncio.wait_for(anext(pieces), quiet_s))
            except (StopAsyncIteration, TimeoutError):
                return
    finally:
        waiting = asyncio.all_tasks(loop)  # one, where a signal's exception came while it waited
        for step in waiting:
            step.cancel()
        if waiting:
            loop.run_until_complete(asyncio.wait(waiting))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@contextmanager
def _answers() -> Iterator[None]:
    """The client's errors as ours: it raises RuntimeError for whatever the dashboard answers."""
    try:
        yield
    except ConnectionError as error:
        raise StageError(f"no Ray dashboard answers: {error}", transient=True) from error
    except RuntimeError as error:
        said = (str(error).strip().splitlines() or ["without a word"])[-1]
        if _THEIRS.search(said):
            raise StageError(f"Ray's dashboard cannot do it now: {said}", transient=True) from error
        raise UserError(f"Ray refused: {said}") from error
    except Exception as error:
        if passes(error) or getattr(error, "status", 0) >= 500:  # aiohttp's, of an answer
            raise StageError(f"no Ray dashboard answers: {error}", transient=True) from error
        if type(error).__module__.partition(".")[0] not in _CLIENTS or isinstance(error, ValueError):
            raise
        raise UserError(f"Ray refused: {error}") from error
