"""Processes of a launch, from their start to the moment when one of them ends: the others end with it; and a running
vLLM server, as seen over HTTP.

Common to every launcher that starts something. A server counts as ready when it answers for the plan's own model: one
that took the port first would serve another. Ports are those of the loopback interface. Plain `http.client`: a proxy
that the environment names must not see, or answer, what we ask our own machine.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from quantmint.pipeline.base.errors import RefusalError, ServingError, UserError
from quantmint.pipeline.base.processes import Child, stop
from quantmint.pipeline.serving.plan import LaunchPlan, Process, waves
from quantmint.pipeline.serving.running.log import LogScan, diagnose, last_lines, scan_log

HOST = "127.0.0.1"
_SHOWN = 300  # characters of a refusal that an error quotes


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answered. `started_seconds` is the time from its start to the first healthy answer.

    `base_url` is its address without a path of the API: ``http://127.0.0.1:PORT``. A server that somebody else started
    has no log here. `pid` is the process of this machine that the server is below, None where it is below none.
    """

    model_name: str
    base_url: str
    log_path: Path | None
    started_seconds: float
    pid: int | None = None

    def version(self) -> str:
        """vLLM's version as the server tells it."""
        return str(json.loads(self.get("/version"))["version"])

    def scan_log(self) -> LogScan:
        """What the log says up to now."""
        assert self.log_path is not None  # noqa: S101 - nobody reads the log of somebody else's server
        return scan_log(self.log_path.read_text(encoding="utf-8", errors="replace"))

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        """Body of a GET; ServingError unless the answer is 200 within ``timeout`` seconds."""
        return self.post(path, None, timeout=timeout)

    def post(self, path: str, body: Mapping[str, object] | None, *, timeout: float = 30.0) -> str:
        """The same of a POST of JSON."""
        where = f"its log: {self.log_path}" if self.log_path is not None else f"it was asked at {self.base_url}"
        try:
            status, answer = fetch(self.base_url, path, body=body, timeout=timeout)
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(f"the server does not answer {path}: {error}", hint=where, transient=True) from error
        if status != 200:
            said = f": {answer[:_SHOWN]}" if answer else ""
            raise RefusalError(
                f"the server answers {path} with {status}{said}", status=status, answer=answer, hint=where
            )
        return answer


def fetch(base_url: str, path: str, *, timeout: float, body: Mapping[str, object] | None = None) -> tuple[int, str]:
    """Status and body of one request: a GET, or a POST of ``body`` as JSON."""
    address = urlsplit(base_url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    content = None if body is None else json.dumps(body)
    connection = kind(address.hostname or HOST, address.port, timeout=timeout)
    try:
        method = "GET" if content is None else "POST"
        connection.request(method, address.path + path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode("utf-8", errors="replace")
    finally:
        connection.close()


Say = Callable[[str], None]
StartProcess = Callable[[Process, int | None], Child]
"""Starts one process of a launch; the port is None where nothing is served."""

NO_BALANCER = (
    "each replica listens on its own port, and nothing spreads requests over them: put a load balancer in front of them"
)
"""What to say of several servers."""
_POLL_S = 0.1
_HEARTBEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process that runs; ``title`` is what messages call it."""

    title: str
    child: Child
    port: int | None = None

    def check(self, when: str = "while it was in use") -> None:
        """Raise `ServingError`, with the cause that its log names, when it has ended although nobody asked it to."""
        if self.child.exit_code is None:
            return
        found = diagnose(self.child.log())
        if found.name == "port" and self.port is not None:
            raise port_in_use(self.port)
        hint = f"its log: {self.child.log_path}"
        raise ServingError(
            f"{self.title} ended with code {self.child.exit_code} {when}: {found.message}",
            hint=hint if found.fix is None else f"{found.fix}; {hint}",
        )


class Deployment:
    """Servers that answer. ``members`` are all processes behind them, in the order of their start."""

    poll_s = _POLL_S

    def __init__(self, servers: Sequence[RunningServer], members: Sequence[RunningProcess]) -> None:
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
            time.sleep(self.poll_s)


def node_processes(plan: LaunchPlan, processes: Sequence[Process], rank: int) -> list[Process]:
    """The processes of one node. UserError where it has none, where no model is here, and for nodes that all reach."""
    require_model(plan)
    for process in processes:
        _require_private(process)
    here = [process for process in processes if process.node == rank]
    if not here:
        raise UserError(f"this launch has nothing to run on node {rank}")
    return here


def require_model(plan: LaunchPlan) -> None:
    """Raise UserError where the checkpoint's folder is not here."""
    if not Path(plan.model).is_dir():
        raise UserError(f"{plan.model} is not a folder with a model")


def _require_private(process: Process) -> None:
    """UserError for a node on the open internet: the ranks of a launch run what anybody sends them there."""
    address = process.env.get("VLLM_HOST_IP", "")
    try:
        public = ipaddress.ip_address(address).is_global
    except ValueError:
        return  # none, or a name: nobody can tell
    if public:
        raise UserError(
            f"{address} is an address of the open internet, and vLLM's ranks ask nobody for a password",
            hint="Name the addresses of a private network.",
        )


@contextmanager
def start_processes(
    plan: LaunchPlan, processes: Sequence[Process], start: StartProcess, *, startup_timeout: float, say: Say
) -> Iterator[Callable[[], Deployment]]:
    """Start every process, and stop them all when the block ends; what it is given, once, waits until each answers.

    Servers that share an accelerator start one after the other, so all but the first of them in that waiting. A server
    without a port gets a free one. Raises `ServingError` where one ends or does not answer within
    ``startup_timeout`` seconds, `UserError` where a port is not free.
    """
    members: list[RunningProcess] = []
    try:
        with ExitStack() as ports:
            held = [
                replace(
                    process, port=ports.enter_context(reserve_port(process.port)) if process.role == "server" else None
                )
                for process in processes
            ]
            first, *later = waves(plan, held)

            def begin(wave: Sequence[Process]) -> float:
                began = time.monotonic()
                members.extend(RunningProcess(_title(one, held), start(one, one.port), one.port) for one in wave)
                return began

            began = begin(first)

            def ready() -> Deployment:
                servers = _ready(plan, members, [], began, startup_timeout, say)
                for wave in later:
                    servers = _ready(plan, members, servers, begin(wave), startup_timeout, say)
                ports.close()
                if len(servers) > 1:
                    say(NO_BALANCER)
                return Deployment(servers, members)

            yield ready
    finally:
        stop(member.child for member in members)


@contextmanager
def reserve_port(port: int | None) -> Iterator[int]:
    """A port that the kernel gives to nobody else during the block: the one asked for, or any that is free.

    Bound but not listening, with SO_REUSEADDR: that keeps it from being handed out, and lets a server that sets the
    same option, as vLLM does, listen on it. UserError where the port that was asked for is not free.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((HOST, port or 0))
        except PermissionError as error:
            hint = "Choose one above 1023 with --port."
            raise UserError(f"port {port} needs more rights than this user has", hint=hint) from error
        except OSError as error:
            assert port is not None  # noqa: S101 - the kernel has free ports
            raise port_in_use(port) from error
        yield held.getsockname()[1]


def port_in_use(port: int) -> UserError:
    """What to say of a port that another process listens on."""
    hint = f"`ss -ltnp 'sport = :{port}'` says by whom: end that process, or choose another port with --port."
    return UserError(f"port {port} is held", hint=hint)


def _ready(
    plan: LaunchPlan,
    members: Sequence[RunningProcess],
    before: Sequence[RunningServer],
    began: float,
    timeout: float,
    say: Say,
) -> list[RunningServer]:
    """Servers ``before``, which answer already, and after them those of the other members once they do."""
    waiting = [member for member in members if member.port is not None][len(before) :]
    several = plan.layout.packed > 1 or len(waiting) > 1
    ready: dict[int, RunningServer] = {}
    told = began
    while waiting:
        for member in members:
            member.check("before it answered")
        for member in [member for member in waiting if _healthy(plan, member)]:
            waiting.remove(member)
            assert member.port is not None  # noqa: S101 - only such wait
            server = RunningServer(
                plan.served_model_name,
                f"http://{HOST}:{member.port}",
                member.child.log_path,
                time.monotonic() - began,
                pid=member.child.supervisor_pid,
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
        if waiting and time.monotonic() - told >= _HEARTBEAT_S:
            told = time.monotonic()
            words = last_lines(waiting[0].child.log(4096), 1)
            say(f"{waiting[0].title} is still starting after {told - began:.0f} s; its last words: {words}")
        if waiting:
            time.sleep(_POLL_S)
    return [*before, *(ready[member.port] for member in members if member.port in ready)]


def _healthy(plan: LaunchPlan, member: RunningProcess) -> bool:
    address = f"http://{HOST}:{member.port}"
    try:
        status, _ = fetch(address, "/health", timeout=5)
        if status != 200:
            return False
        status, body = fetch(address, "/v1/models", timeout=5)
        models = {model["id"]: model.get("root") for model in json.loads(body)["data"]}
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    name = plan.served_model_name
    if status != 200 or name not in models or models[name] not in {None, plan.model}:
        raise port_in_use(member.port or 0)
    return True


def _title(process: Process, processes: Sequence[Process]) -> str:
    """Just what it is where there is one process, else which of them."""
    if len(processes) == 1:
        return "vLLM"
    if process.role == "server":
        return f"replica {process.replica}" if sum(other.role == "server" for other in processes) > 1 else "the server"
    return "the headless engine"
