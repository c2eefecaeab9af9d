"""A Ray cluster as a place: Ray Jobs, through the client that speaks to the head's dashboard.

Ray keeps a job's environment where everyone who sees the dashboard reads it, so nothing of ours goes along: tokens are
what the cluster's nodes have. The entry point is a line for a shell, made of quoted words.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import StageError, UserError
from pipeline.submit.place import BROKEN, State, Submitted
from pipeline.submit.task import Task, program_here, require_no_secret, require_plain

_THEIRS = re.compile(r"status code 5\d\d")
_ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}


@dataclass(frozen=True, slots=True)
class Options:
    """``folder`` is where the run starts, on the filesystem that the nodes share; ``venv`` an environment there."""

    folder: Path
    venv: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def description(task: Task, options: Options) -> dict[str, Any]:
    """Arguments of `JobSubmissionClient.submit_job`.

    On one node the run itself holds the GPUs. On several the run is spread by Ray, and holds none.
    """
    require_plain("the working folder", str(options.folder))
    for name in options.variables:
        require_no_secret("--env", name, "Set it where the nodes of the cluster get their environment from.")
    if task.seconds is not None:
        raise UserError("--time: Ray Jobs have no time limit", hint="Leave it out; --cancel ID ends a job.")
    line = shlex.join(task.words(*program_here(options.venv)))
    several = task.nodes > 1
    return {
        "entrypoint": f"cd {shlex.quote(str(options.folder))} && exec {line}",
        "metadata": {"quantmint": task.name},
        **({"runtime_env": {"env_vars": dict(options.variables)}} if options.variables else {}),
        **({} if task.cpus is None else {"entrypoint_num_cpus": task.cpus}),
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

    def text(self, task: Task) -> str:
        """What the client is called with, as JSON."""
        return json.dumps(description(task, self._given), indent=1) + "\n"

    def submit(self, task: Task) -> Submitted:
        """Send it."""
        described = description(task, self._given)
        client = self._connect()
        with _answers():
            identifier = str(client.submit_job(**described))
        address = f"--address {shlex.quote(self._address)} " if self._address else ""
        return Submitted(identifier, f"ray job logs {address}--follow {identifier}")

    def state(self, identifier: str) -> State:
        """Ray's status, and the run's exit code once there is one."""
        client = self._connect()
        with _answers():
            job = client.get_job_info(identifier)
        word = str(getattr(job.status, "value", job.status))
        if word not in _ENDED:
            return State(word)
        code = job.driver_exit_code
        if word == "SUCCEEDED":
            return State(word, 0)
        return State(word, BROKEN if not code else code if code > 0 else 128 - code)

    def lines(self, identifier: str) -> Iterator[str]:
        """What the client tails."""
        client = self._connect()
        logging.getLogger(type(client).__module__).setLevel(logging.WARNING)  # it tells of its own connection
        with _answers():
            yield from _stepwise(client.tail_job_logs(identifier))

    def cancel(self, identifier: str) -> None:
        """SIGTERM, then SIGKILL, by Ray."""
        client = self._connect()
        with _answers():
            client.stop_job(identifier)

    @property
    def _given(self) -> Options:
        assert self._options is not None  # noqa: S101 - only who asks for jobs that are there leaves it out
        return self._options

    def _connect(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        with _answers():
            return JobSubmissionClient(self._address)


def _stepwise(pieces: AsyncIterator[str]) -> Iterator[str]:
    """An asynchronous iterator's items, for readers that know of no loop."""
    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(pieces))
            except StopAsyncIteration:
                return
    finally:
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
