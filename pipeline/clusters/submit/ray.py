"""A Ray cluster as a place: Ray Jobs, through the client that speaks to the head's dashboard.

Ray keeps a job's environment where everyone who sees the dashboard reads it, so nothing of ours goes along: tokens are
what the cluster's nodes have. The entry point is a line for a shell, made of quoted words.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.errors import QuantmintError, StageError, UserError
from quantmint.pipeline.base.transience import is_transient
from quantmint.pipeline.clusters.submit.place import (
    BROKEN,
    Log,
    State,
    Submitted,
    Task,
    follow,
    program_here,
    require_job,
    require_no_secret,
    require_plain,
)

_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
_UNPLACED = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
_LOST = {"JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"}
_THEIRS = re.compile(r"status code 5\d\d")
_TIMEOUT_S = 60.0
_CLIENTS = ("ray", "requests")  # which the client's errors are of, besides
_INSTEAD = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # which the client takes, whatever address it is given
# Ray kills 3 s after SIGTERM otherwise, and a server needs longer to let go of its GPUs.
_GRACE = {"RAY_JOB_STOP_WAIT_TIME_S": "20"}
_TAIL = 1 << 20  # characters of a log, of which the run's own object is the last


def description(task: Task, folder: Path, variables: Mapping[str, str] = {}) -> dict[str, Any]:
    """Arguments of `JobSubmissionClient.submit_job`; the run starts in ``folder``, which the nodes share.

    On one node the run itself holds the GPUs, or a core where it needs none: Ray begins what asks for nothing at once,
    on its head. On several the run is spread by Ray, and holds none.
    """
    require_plain("the working folder", str(folder))
    for name in variables:
        require_no_secret("--env", name, "Set it where the nodes of the cluster get their environment from.")
    if task.seconds is not None:
        raise UserError("--time: Ray Jobs have no time limit", hint="Leave it out; `ray job stop ID` ends a job.")
    several = task.nodes > 1
    cpus = 1 if task.cpus is None and not task.gpus and not several else task.cpus
    # A shell that cannot go there would end as a run does that judged.
    line = f"cd {shlex.quote(str(folder))} || exit {BROKEN}; exec "
    return {
        "entrypoint": line + shlex.join(task.words(*program_here())),
        "metadata": {"quantmint": task.name},
        "runtime_env": {"env_vars": {**_GRACE, **variables}},
        **({} if cpus is None else {"entrypoint_num_cpus": cpus}),
        **({} if several or not task.gpus else {"entrypoint_num_gpus": task.gpus}),
        **({} if task.memory_gb is None else {"entrypoint_memory": task.memory_gb * 10**9}),
    }


class RayJobs:
    """The cluster with its dashboard at ``address``, such as http://head:8265; ``auto`` is what Ray finds here.

    A run starts in ``folder``, with ``variables`` besides those that the nodes have.
    """

    def __init__(self, address: str, folder: Path, variables: Mapping[str, str] = {}) -> None:
        if address.startswith("ray://"):
            raise UserError(
                f"--ray: found {address}, the address of Ray's client, and jobs go to the dashboard",
                hint="http://HEAD:8265 where nothing else was set.",
            )
        self._address = None if address == "auto" else address if "://" in address else f"http://{address}"
        self._how = folder, variables
        self._log = Log()
        self._waits = False

    def text(self, task: Task) -> str:
        """What the client is called with, as JSON."""
        return json.dumps(description(task, *self._how), indent=1) + "\n"

    def submit(self, task: Task) -> Submitted:
        """Send it."""
        described = description(task, *self._how)
        client = self._connect()
        with _answers():
            identifier = str(client.submit_job(**described))
        self._log = Log()
        at = f"--address {shlex.quote(self._address)} " if self._address else ""
        return Submitted(identifier, f"ray job logs {at}--follow {identifier}")

    def state(self, identifier: str) -> State:
        """Ray's status, and the run's exit code once there is one, 128 + N after signal N."""
        job = self.job(identifier)
        word, code = str(job.status.value), job.driver_exit_code or None
        self._waits = word == "PENDING"
        if word not in _ENDED:
            return State(word, waits=" ".join(str(job.message or "").split()) or None if word == "PENDING" else None)
        if word == "SUCCEEDED":
            return State(word, 0)
        return State(word, BROKEN if code is None else code if code >= 0 else 128 - code)

    def job(self, identifier: str) -> Any:
        """Ray's `JobDetails`."""
        require_job(identifier, r"\w[\w.-]*", "the identifier that Ray gave it")
        client = self._connect()
        with _answers():
            return client.get_job_info(identifier)

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """What its log has grown by; nothing of a job that waits."""
        if self._waits:  # Ray writes into its log before it has found room
            return
        client = self._connect()
        with _answers():
            show(self._log.new(str(client.get_job_logs(identifier))))

    def cancel(self, identifier: str) -> None:
        """SIGTERM, then SIGKILL, by Ray."""
        client = self._connect()
        with _answers():
            client.stop_job(identifier)

    def _connect(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):  # type: ignore[misc]
            """Waits for ever, for a head behind a connection that was dropped, unless it is told not to."""

            def _do_request(self, *words: Any, **given: Any) -> Any:
                return super()._do_request(*words, timeout=_TIMEOUT_S, **given)

        hidden = {} if self._address is None else {name: os.environ.pop(name, None) for name in _INSTEAD}
        try:
            with _answers():
                return Client(self._address)
        except (KeyError, TypeError, ValueError) as error:  # of its answer, or of the address
            raise UserError(
                f"--ray: {self._address or 'what Ray finds here'} is not the address of a Ray dashboard"
            ) from error
        finally:
            os.environ.update({name: value for name, value in hidden.items() if value is not None})


def run_attached(jobs: RayJobs, task: Task, show: Callable[[str], None]) -> tuple[int, str]:
    """Run ``task`` to its end as if it were a child of this process: its exit code, and the JSON object it printed.

    ``show`` takes the log, piece by piece. Ray gives up a job that it found no room for (after 15 minutes, unless its
    head says otherwise): that is submitted again, which is what waiting in a queue means. SIGTERM, SIGHUP and Ctrl-C
    end the job, and from then on this process. Raises a transient `StageError` for a cluster that stays away and for a
    job whose node is gone, `StageError` for one that was stopped there, and what `RayJobs.submit` raises.
    """
    log = identifier = ""

    def shown(piece: str) -> None:
        nonlocal log
        log = (log + piece)[-_TAIL:]
        show(piece)

    for told in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(told, lambda number, _: sys.exit(128 + number))
    try:
        while True:
            identifier = jobs.submit(task).identifier
            show(f"{identifier} was submitted\n")
            state = follow(jobs, identifier, shown, lambda _: None)
            job = jobs.job(identifier)
            if job.error_type != _UNPLACED:
                break
            show(f"{identifier} found no room; it is asked for again\n")
    except (KeyboardInterrupt, SystemExit):
        if identifier:
            with suppress(QuantmintError):
                jobs.cancel(identifier)
        raise
    if state.word == "STOPPED" or (state.word == "FAILED" and job.driver_exit_code is None):
        raise StageError(f"{identifier}: {job.message or state.word}", transient=job.error_type in _LOST)
    return state.exit_code or 0, _last_object(log)


def _last_object(log: str) -> str:
    """The text of the JSON object that a run ended with, "" where there is none. Ray keeps one log for both outputs."""
    for begin in reversed([found.start() for found in re.finditer(r"^\{", log, re.MULTILINE)]):
        with suppress(ValueError):
            _, end = json.JSONDecoder().raw_decode(log, begin)
            return log[begin:end] + "\n"
    return ""


@contextmanager
def _answers() -> Iterator[None]:
    """The client's errors as ours: RuntimeError is what it raises for whatever the dashboard answers."""
    try:
        yield
    except Exception as error:
        said = (str(error).strip().splitlines() or ["without a word"])[-1]
        if is_transient(error) or _THEIRS.search(said):
            raise StageError(f"no Ray dashboard answers: {said}", transient=True) from error
        library = type(error).__module__.partition(".")[0] in _CLIENTS and not isinstance(error, ValueError)
        if library or isinstance(error, RuntimeError):
            raise UserError(f"Ray refused: {said}") from error
        raise
