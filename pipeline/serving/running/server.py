"""Start the processes of a launch, wait until their servers answer, and stop all when one ends; talk to a server.

All launchers that start processes use this module. A server is ready when it answers for the plan's own model; another
program on the same port would not. Ports are on the loopback interface. HTTP goes through plain `http.client`, because
a proxy from the environment must not see requests to our own machine.
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
from quantmint.pipeline.serving.running.dialect import VLLM, Dialect
from quantmint.pipeline.serving.running.log import LogScan, diagnose, last_lines, scan_log

HOST = "127.0.0.1"
_QUOTED = 300  # characters of a server's answer that an error quotes


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers requests.

    ``base_url`` is its address without an API path (``http://127.0.0.1:PORT``). ``log_path`` is None for a server that
    quantmint did not start. ``started_seconds`` is the time from its start to the first healthy answer. ``pid`` is the
    local process above the server's own processes, None if there is none. ``dialect`` has the runtime's own requests.
    """

    model_name: str
    base_url: str
    log_path: Path | None
    started_seconds: float
    pid: int | None = None
    dialect: Dialect = VLLM

    def version(self) -> str:
        """Ask the server for its runtime's version. Raises `ServingError` as in `get`."""
        return self.dialect.version(self)

    def scan_log(self) -> LogScan:
        """Scan the log written so far; only for a server with a ``log_path``."""
        assert self.log_path is not None  # noqa: S101 - callers check
        return scan_log(self.log_path.read_text(encoding="utf-8", errors="replace"))

    def get(self, path: str, *, timeout: float = 30.0) -> str:
        """Send a GET and return the body.

        Raises `ServingError` (transient) without an answer within ``timeout`` seconds, `RefusalError` for a status
        other than 200.
        """
        return self.post(path, None, timeout=timeout)

    def post(self, path: str, body: Mapping[str, object] | None, *, timeout: float = 30.0) -> str:
        """Send a POST with a JSON body, or a GET if ``body`` is None, and return the answer's body.

        Raises as `get` does.
        """
        where = f"its log: {self.log_path}" if self.log_path is not None else f"its address: {self.base_url}"
        try:
            status, answer = fetch(self.base_url, path, body=body, timeout=timeout)
        except (OSError, http.client.HTTPException) as error:
            raise ServingError(f"the server does not answer {path}: {error}", hint=where, transient=True) from error
        if status != 200:
            quote = f": {answer[:_QUOTED]}" if answer else ""
            raise RefusalError(
                f"the server answers {path} with {status}{quote}", status=status, answer=answer, hint=where
            )
        return answer


def fetch(base_url: str, path: str, *, timeout: float, body: Mapping[str, object] | None = None) -> tuple[int, str]:
    """Send a GET, or a POST of ``body`` as JSON; return status and body.

    Raises `OSError` or `HTTPException` without an answer within ``timeout`` seconds.
    """
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


Notify = Callable[[str], None]
StartProcess = Callable[[Process, int | None], Child]
"""Starts one process of a launch on a port; None for a headless engine."""

NO_BALANCER = (
    "each replica listens on its own port, and nothing spreads requests over them: put a load balancer in front of them"
)
"""The message after the start of several servers."""
_POLL_S = 0.1
_HEARTBEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A started process of a launch; ``title`` is its name in messages, ``port`` None for a headless engine."""

    title: str
    child: Child
    port: int | None = None

    def check(self, when: str = "while it was in use") -> None:
        """Raise `ServingError`, with the cause that its log names, if the process has ended."""
        if self.child.exit_code is None:
            return
        diagnosis = diagnose(self.child.log())
        if diagnosis.name == "port" and self.port is not None:
            raise port_in_use(self.port)
        hint = f"its log: {self.child.log_path}"
        raise ServingError(
            f"{self.title} ended with code {self.child.exit_code} {when}: {diagnosis.message}",
            hint=hint if diagnosis.fix is None else f"{diagnosis.fix}; {hint}",
        )


class Deployment:
    """The servers of a launch that answer, and all its processes in the order of their start."""

    poll_s = _POLL_S

    def __init__(self, servers: Sequence[RunningServer], processes: Sequence[RunningProcess]) -> None:
        self.servers = tuple(servers)
        self.processes = tuple(processes)

    def check(self) -> None:
        """Raise `ServingError` if a process has ended."""
        for process in self.processes:
            process.check()

    def watch(self) -> None:
        """Block until a process ends, then raise ServingError; KeyboardInterrupt passes through."""
        while True:
            self.check()
            time.sleep(self.poll_s)


def node_processes(plan: LaunchPlan, processes: Sequence[Process], rank: int) -> list[Process]:
    """Return the processes of one node.

    Raises `UserError` when the node has none, when the model's folder is missing, and for nodes with public addresses.
    """
    require_model(plan)
    for process in processes:
        _require_private(process)
    on_node = [process for process in processes if process.node == rank]
    if not on_node:
        raise UserError(f"this launch has no process for node {rank}")
    return on_node


def require_model(plan: LaunchPlan) -> None:
    """Raise `UserError` if the checkpoint's folder does not exist on this machine."""
    if not Path(plan.model).is_dir():
        raise UserError(f"{plan.model} is not a folder with a model")


def _require_private(process: Process) -> None:
    """Raise `UserError` for a node with a public address: ranks execute whatever anybody sends to their ports."""
    address = process.env.get("VLLM_HOST_IP", "")
    try:
        public = ipaddress.ip_address(address).is_global
    except ValueError:
        return  # no address, or a host name, which may be private
    if public:
        raise UserError(
            f"{address} is a public address, and vLLM's ranks do not authenticate each other",
            hint="Use the nodes' addresses on a private network.",
        )


@contextmanager
def start_processes(
    plan: LaunchPlan, processes: Sequence[Process], start: StartProcess, *, startup_timeout: float, notify: Notify
) -> Iterator[Callable[[], Deployment]]:
    """Start every process, and stop all when the block ends.

    Yields a function to call once: it waits until every server answers and returns the deployment. Servers that share
    an accelerator start one after another, the later ones inside that call. A server without a port gets a free one.
    Raises `ServingError` when a process ends or does not answer within ``startup_timeout`` seconds, `UserError` when a
    port is not free.
    """
    started: list[RunningProcess] = []
    try:
        with ExitStack() as ports:
            with_ports = [
                replace(
                    process, port=ports.enter_context(reserve_port(process.port)) if process.role == "server" else None
                )
                for process in processes
            ]
            first, *later = waves(plan, with_ports)

            def begin(wave: Sequence[Process]) -> float:
                began = time.monotonic()
                for process in wave:
                    child = start(process, process.port)
                    started.append(RunningProcess(_title(process, with_ports), child, process.port))
                return began

            began = begin(first)

            def ready() -> Deployment:
                servers = _wait(plan, started, [], began, startup_timeout, notify)
                for wave in later:
                    servers = _wait(plan, started, servers, begin(wave), startup_timeout, notify)
                ports.close()
                if len(servers) > 1:
                    notify(NO_BALANCER)
                return Deployment(servers, started)

            yield ready
    finally:
        stop(process.child for process in started)


@contextmanager
def reserve_port(port: int | None) -> Iterator[int]:
    """Reserve a port during the block, a free one for None, and yield its number.

    The socket is bound with SO_REUSEADDR but does not listen: the kernel gives the port to no other program, while a
    server that sets the same option, as vLLM does, can listen on it. Raises `UserError` when ``port`` is not free.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind((HOST, port or 0))
        except PermissionError as error:
            hint = "Choose one above 1023 with --port."
            raise UserError(f"port {port} needs more rights than this user has", hint=hint) from error
        except OSError as error:
            assert port is not None  # noqa: S101 - the kernel has free ports
            raise port_in_use(port) from error
        yield reservation.getsockname()[1]


def port_in_use(port: int) -> UserError:
    """Return the error for a port that another process uses."""
    hint = f"`ss -ltnp 'sport = :{port}'` shows the process: end it, or choose another port with --port."
    return UserError(f"port {port} is in use", hint=hint)


def _wait(
    plan: LaunchPlan,
    started: Sequence[RunningProcess],
    answering: Sequence[RunningServer],
    began: float,
    timeout: float,
    notify: Notify,
) -> list[RunningServer]:
    """Wait until all ``started`` servers answer; return them, first those that are ``answering`` already.

    ``began`` is the monotonic time of the start. Raises `ServingError` when a process ends, or a server does not answer
    within ``timeout`` seconds.
    """
    waiting = [process for process in started if process.port is not None][len(answering) :]
    several = plan.layout.packed > 1 or len(waiting) > 1
    ready: dict[int, RunningServer] = {}
    last_message = began
    while waiting:
        for process in started:
            process.check("before it answered")
        for process in [process for process in waiting if _healthy(plan, process)]:
            waiting.remove(process)
            assert process.port is not None  # noqa: S101 - only servers wait
            server = RunningServer(
                plan.served_model_name,
                f"http://{HOST}:{process.port}",
                process.child.log_path,
                time.monotonic() - began,
                pid=process.child.supervisor_pid,
            )
            ready[process.port] = server
            if several:
                notify(f"{process.title} is ready after {server.started_seconds:.0f} s at {server.base_url}")
        if not waiting:
            break
        first = waiting[0]
        if time.monotonic() - began > timeout:
            words = diagnose(first.child.log()).message
            raise ServingError(
                f"{first.title} did not answer within {timeout:g} s; its last words: {words}",
                hint=f"its log: {first.child.log_path}",
            )
        if time.monotonic() - last_message >= _HEARTBEAT_S:
            last_message = time.monotonic()
            words = last_lines(first.child.log(4096), 1)
            notify(f"{first.title} is still starting after {last_message - began:.0f} s; its last words: {words}")
        time.sleep(_POLL_S)
    return [*answering, *(ready[process.port] for process in started if process.port in ready)]


def _healthy(plan: LaunchPlan, process: RunningProcess) -> bool:
    """Return whether the server answers for the plan's model. Raises `UserError` when another server has its port."""
    address = f"http://{HOST}:{process.port}"
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
        raise port_in_use(process.port or 0)
    return True


def _title(process: Process, processes: Sequence[Process]) -> str:
    """Return a process's name in messages: "vLLM" if it is the only one, else its role."""
    if len(processes) == 1:
        return "vLLM"
    if process.role == "server":
        return f"replica {process.replica}" if sum(p.role == "server" for p in processes) > 1 else "the server"
    return "the headless engine"
