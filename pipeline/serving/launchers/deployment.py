"""Processes of a launch, from their start to the moment when one of them ends: the others end with it.

Common to every launcher that starts something. A server counts as ready when it answers for the plan's own model: one
that took the port first would serve another.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ServingError
from pipeline.serving.launchers.child import Child, stop
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.diagnosis import diagnose
from pipeline.serving.running.ports import reserved, taken
from pipeline.serving.running.server import HOST, Server, fetch, served_models

Say = Callable[[str], None]
Start = Callable[[Process, int | None], Child]
"""Starts one process of a launch; the port is None where nothing is served."""

_PORT_ATTEMPTS = 3
_POLL_S = 0.1


class PortTakenError(Exception):
    """Another process listens on a port that a server wanted."""

    def __init__(self, port: int | None) -> None:
        super().__init__(port)
        self.port = port


@dataclass(frozen=True, slots=True)
class Member:
    """A process that runs; ``title`` is what messages call it."""

    title: str
    child: Child
    port: int | None = None

    def check(self) -> None:
        """Raise `ServingError` when it has ended, although nobody asked it to."""
        if self.child.exit_code is not None:
            raise ended(self, "while it was in use")


class Deployment:
    """Servers that answer. ``members`` are all processes behind them, in the order of their start."""

    def __init__(self, servers: Sequence[Server], members: Sequence[Member]) -> None:
        self.servers = tuple(servers)
        self.members = tuple(members)

    def check(self) -> None:
        """Raise `ServingError` when a process has ended."""
        for member in self.members:
            member.check()

    def watch(self) -> None:
        """Block until a process ends, which is a `ServingError`; an interrupt passes through."""
        while True:
            self.check()
            time.sleep(_POLL_S)


@contextmanager
def deployed(
    plan: LaunchPlan,
    processes: Sequence[Process],
    start: Start,
    *,
    beside: Sequence[Member] = (),
    startup_timeout: float,
    say: Say,
) -> Iterator[Deployment]:
    """Start every process; hand over when each server answers; stop them all when the block ends.

    ``beside`` are processes that run already and that the servers cannot do without. A server without a port gets a
    free one, and another if somebody took it meanwhile. Raises `ServingError` where one ends or does not answer within
    ``startup_timeout`` seconds, `UserError` where a port that was asked for is not free.
    """
    chosen = {process.port for process in processes}
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        members: list[Member] = []
        with ExitStack() as ports:
            held = [
                ports.enter_context(reserved(process.port)) if process.role == "server" else None
                for process in processes
            ]
            began = time.monotonic()
            try:
                for process, port in zip(processes, held, strict=True):
                    members.append(Member(_title(process, processes), start(process, port), port))
                servers = _ready(plan, [*beside, *members], began, startup_timeout, say)
            except PortTakenError as error:
                stop(member.child for member in members)
                if error.port is not None and error.port in chosen:
                    raise taken(error.port, error) from error
                if attempt == _PORT_ATTEMPTS:
                    hint = f"log: {members[-1].child.log_path}"
                    raise ServingError(f"{_PORT_ATTEMPTS} ports in a row were taken", hint=hint) from error
                continue
            except BaseException:
                stop(member.child for member in members)
                raise
        try:
            yield Deployment(servers, [*beside, *members])
        finally:
            stop(member.child for member in members)
        return


def log_of(process: Process, folder: Path) -> Path:
    """Where a process writes: ``server-0.log``, ``headless-0.log``."""
    return folder / f"{process.role}-{process.replica}.log"


def ended(member: Member, when: str) -> Exception:
    """What to raise when a process has ended: the cause that its log names."""
    found = diagnose(member.child.log())
    if found.name == "port" and member.port is not None:
        return PortTakenError(member.port)
    hint = f"its log: {member.child.log_path}"
    return ServingError(
        f"{member.title} ended with code {member.child.exit_code} {when}: {found.message}",
        hint=hint if found.fix is None else f"{found.fix}; {hint}",
    )


def _ready(plan: LaunchPlan, members: Sequence[Member], began: float, timeout: float, say: Say) -> list[Server]:
    """Wait for the servers among the processes; the others only have to stay alive."""
    for member in members:
        if member.child.pid is None:
            member.child.wait()
            raise ended(member, "before it answered")
    waiting = [member for member in members if member.port is not None]
    several = len(waiting) > 1
    ready: dict[int, Server] = {}
    while waiting:
        for member in members:
            if member.child.exit_code is not None:
                raise ended(member, "before it answered")
        for member in [member for member in waiting if _healthy(plan, member)]:
            waiting.remove(member)
            assert member.port is not None  # noqa: S101 - only such wait
            server = Server(
                plan.served_model_name,
                f"http://{HOST}:{member.port}",
                member.child.log_path,
                time.monotonic() - began,
                member.child.pid,
            )
            ready[member.port] = server
            if several:
                say(f"{member.title} is ready after {server.started_seconds:.0f} s at {server.base_url}")
        if waiting and time.monotonic() - began > timeout:
            late = waiting[0]
            words = diagnose(late.child.log()).message
            raise ServingError(
                f"{late.title} did not answer within {timeout:g} s; its last words: {words}",
                hint=f"its log: {late.child.log_path}",
            )
        if waiting:
            time.sleep(_POLL_S)
    return [ready[member.port] for member in members if member.port is not None]


def _healthy(plan: LaunchPlan, member: Member) -> bool:
    """Whether *our* server answers."""
    address = f"http://{HOST}:{member.port}"
    try:
        status, _ = fetch(address, "/health", timeout=5)
        if status != 200:
            return False
        status, body = fetch(address, "/v1/models", timeout=5)
        models = served_models(body)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    name = plan.served_model_name
    if status != 200 or name not in models or models[name] not in {None, plan.model}:
        raise PortTakenError(member.port)
    return True


def _title(process: Process, processes: Sequence[Process]) -> str:
    """Just what it is where there is one process, else which of them."""
    if process.role in {"ray-head", "ray-worker"}:
        return "Ray"
    if len(processes) == 1:
        return "the reference runtime" if process.argv[0] == "python" else "vLLM"
    if process.role == "server":
        return f"replica {process.replica}" if sum(other.role == "server" for other in processes) > 1 else "the server"
    return f"the headless engine of replica {process.replica}"
