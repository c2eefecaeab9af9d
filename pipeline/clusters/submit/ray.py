"""Ray Jobs, through the client of the head's dashboard.

Everyone who sees the dashboard reads a job's environment. So no token is sent: the cluster's nodes have their own. The
entry point is a shell line of quoted words.
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
from quantmint.pipeline.clusters.submit import job
from quantmint.pipeline.clusters.submit.job import BROKEN, JobRequest, JobState, Scheduler, SubmittedJob

_NO_ROOM = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
_NODE_LOST = {"JOB_SUPERVISOR_ACTOR_DIED", "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"}
_TIMEOUT_S = 60.0
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables that Ray's client prefers to its argument."""
_STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "20"}
"""Seconds from SIGTERM to SIGKILL: in Ray's default of 3 s a server does not release its GPUs."""
_LOG_END = 1 << 20  # characters, of which the run's JSON object is the last


def description(request: JobRequest, folder: Path, variables: Mapping[str, str] = {}) -> dict[str, Any]:
    """Return the arguments of `JobSubmissionClient.submit_job`; the run starts in ``folder``, which the nodes share.

    On one node the entry point reserves the run's GPUs, or a core: Ray starts an entry point without resources at once
    on the head. On several nodes the run reserves its own. Raises `UserError` for secrets and for a time limit.
    """
    job.require_printable("the working folder", str(folder))
    for name in variables:
        job.refuse_secret("--env", name, "Set it where the nodes of the cluster get their environment from.")
    if request.seconds is not None:
        raise UserError("--time: Ray Jobs have no time limit", hint="Leave it out; `ray job stop ID` ends a job.")
    one_node = request.nodes == 1
    cpus = 1 if request.cpus is None and not request.gpus and one_node else request.cpus
    # Without `exit` an absent folder would end with 1, as a run with the verdict FAIL does.
    line = f"cd {shlex.quote(str(folder))} || exit {BROKEN}; exec "
    return {
        "entrypoint": line + shlex.join(request.command(*job.quantmint_program())),
        "metadata": {"quantmint": request.name},
        "runtime_env": {"env_vars": {**_STOP_WAIT, **variables}},
        **({} if cpus is None else {"entrypoint_num_cpus": cpus}),
        **({"entrypoint_num_gpus": request.gpus} if one_node and request.gpus else {}),
        **({} if request.memory_gb is None else {"entrypoint_memory": request.memory_gb * 10**9}),
    }


class RayJobs(Scheduler):
    """The cluster with its dashboard at ``address``, such as http://head:8265; ``auto`` is the one that Ray finds here.

    A run starts in ``folder``, with ``variables`` besides those of the nodes.
    """

    def __init__(self, address: str, folder: Path, variables: Mapping[str, str] = {}) -> None:
        if address.startswith("ray://"):
            message = f"--ray: found {address}, the address of Ray's client, and jobs go to the dashboard"
            raise UserError(message, hint="Its default address is http://HEAD:8265.")
        self._address = None if address == "auto" else address if "://" in address else f"http://{address}"
        super().__init__()
        self._folder, self._variables = folder, variables
        self._pending = False

    def describe(self, request: JobRequest) -> str:
        """Return the arguments of the client's call, as JSON."""
        return json.dumps(description(request, self._folder, self._variables), indent=1) + "\n"

    def submit(self, request: JobRequest) -> SubmittedJob:
        """Submit the job, and return its identifier and the command that shows its log."""
        identifier = str(self.call("submit_job", **description(request, self._folder, self._variables)))
        address = f"--address {shlex.quote(self._address)} " if self._address else ""
        return SubmittedJob(identifier, f"ray job logs {address}--follow {identifier}")

    def state(self, identifier: str) -> JobState:
        """Return Ray's status, and at the end the run's exit code, 128 + N after signal N."""
        details = self.details(identifier)
        status, code = str(details.status.value), details.driver_exit_code or None
        self._pending = status == "PENDING"
        if status == "SUCCEEDED":
            return JobState(status, 0)
        if status in ("FAILED", "STOPPED"):
            return JobState(status, BROKEN if code is None else code if code >= 0 else 128 - code)
        return JobState(status, waits=" ".join(str(details.message or "").split()) or None if self._pending else None)

    def details(self, identifier: str) -> Any:
        """Return Ray's `JobDetails`."""
        job.require_job_id(identifier, r"\w[\w.-]*", "the identifier that Ray gave it")
        return self.call("get_job_info", identifier)

    def logs(self, identifier: str) -> Iterator[tuple[str, str]]:
        """Yield the job's log unless the job is pending: Ray writes its search for room into it."""
        if not self._pending:
            yield identifier, str(self.call("get_job_logs", identifier))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of `JobSubmissionClient`, with its errors as ours."""
        client = self._connect()
        with _client_errors():
            return getattr(client, method)(*arguments, **options)

    def _connect(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):  # type: ignore[misc]
            """Ray's client with a timeout; its own waits for ever when a connection was dropped."""

            def _do_request(self, *arguments: Any, **options: Any) -> Any:
                return super()._do_request(*arguments, timeout=_TIMEOUT_S, **options)

        names = () if self._address is None else _ADDRESS_VARIABLES
        hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
        try:
            with _client_errors():
                return Client(self._address)
        except (KeyError, TypeError, ValueError) as error:  # for a wrong address, or an answer of another server
            server = self._address or "the cluster that Ray finds here"
            raise UserError(f"--ray: {server} is not the address of a Ray dashboard") from error
        finally:
            os.environ.update(hidden)


def run_attached(jobs: RayJobs, request: JobRequest, show: Callable[[str], None]) -> tuple[int, str]:
    """Run the job like a child process: return its exit code and the JSON object it printed; ``show`` gets the log.

    A job that Ray gave up for lack of room (by default after 15 minutes) is submitted again, as if it waited in a
    queue. SIGTERM, SIGHUP and Ctrl-C end the job; the signals' handlers stay replaced. Raises `StageError` for a job
    that was stopped from outside, a transient one for an unreachable cluster and a lost node, and the errors of
    `RayJobs.submit`.
    """
    log = identifier = ""

    def show_and_keep(piece: str) -> None:
        nonlocal log
        log = (log + piece)[-_LOG_END:]
        show(piece)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        while True:
            identifier = jobs.submit(request).identifier
            show(f"{identifier} was submitted\n")
            state = job.follow(jobs, identifier, show_and_keep, lambda _: None)
            details = jobs.details(identifier)
            if details.error_type != _NO_ROOM:
                break
            show(f"{identifier} found no room and is submitted again\n")
    except (KeyboardInterrupt, SystemExit):
        if identifier:
            with suppress(QuantmintError):
                jobs.call("stop_job", identifier)  # SIGTERM, after 20 s SIGKILL
        raise
    if state.status == "STOPPED" or (state.status == "FAILED" and details.driver_exit_code is None):
        message = f"{identifier}: {details.message or state.status}"
        raise StageError(message, transient=details.error_type in _NODE_LOST)
    return state.exit_code or 0, _last_object(log)


def _last_object(log: str) -> str:
    """Return the last JSON object of a log as text, "" without one. Ray mixes standard output and error in one log."""
    for match in reversed(list(re.finditer(r"^\{", log, re.MULTILINE))):
        with suppress(ValueError):
            _, end = json.JSONDecoder().raw_decode(log, match.start())
            return log[match.start() : end] + "\n"
    return ""


@contextmanager
def _client_errors() -> Iterator[None]:
    """Raise the client's errors as a transient `StageError`, or as `UserError` for a refusal."""
    try:
        yield
    except Exception as error:
        message = (str(error).strip().splitlines() or ["without a word"])[-1]
        if is_transient(error) or re.search(r"status code 5\d\d", message):
            raise StageError(f"no Ray dashboard answers: {message}", transient=True) from error
        library = type(error).__module__.partition(".")[0] in ("ray", "requests") and not isinstance(error, ValueError)
        if library or isinstance(error, RuntimeError):  # RuntimeError for any refusal of the dashboard
            raise UserError(f"Ray refused: {message}") from error
        raise
