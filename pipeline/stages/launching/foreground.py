"""Servers that run until somebody says stop, and what is told of them: where they are, and what their logs admit.

Ctrl-C, SIGTERM and SIGHUP are one order; what was started ends with the block that started it, whatever else happens.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from pipeline.base.errors import UserError
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.log import Finding, LogScan

if TYPE_CHECKING:
    from pipeline.serving.running.deployment import Deployment, Say
    from pipeline.serving.running.server import Server
    from pipeline.stages.launching.request import Request


class Launcher(Protocol):
    """One of `pipeline.serving.running`."""

    def deploy(
        self,
        plan: LaunchPlan,
        processes: Sequence[Process],
        logs: Path,
        *,
        startup_timeout: float,
        say: Say,
    ) -> AbstractContextManager[Deployment]:
        """The running servers."""
        ...


@dataclass(frozen=True, slots=True)
class How:
    """Who starts the servers: ``kind`` is local, docker or endpoint."""

    kind: str
    logs: Path
    startup_timeout: float
    image: str | None = None
    endpoint: str | None = None
    api_key_variable: str | None = None
    node_rank: int = 0


def serve(request: Request, how: How) -> int:
    """Serve until somebody asks for the end, which is exit code 0; 130 where that was before a server answered.

    Raises `ServingError` where a server does not start or dies, with the cause that its log names.
    """
    from rich.console import Console

    from pipeline.base.progress import PlainReporter, RichReporter

    plan, processes = request.plan()
    terminal = Console(stderr=True, highlight=False) if sys.stderr.isatty() else None
    reporter = PlainReporter() if terminal is None else RichReporter(terminal)
    launcher = _launcher(request, plan, how)
    if how.kind != "endpoint":
        for line in _unready(request, plan):
            reporter.warn(line)
    folder = how.logs / f"serve-{plan.served_model_name.replace('/', '-')}-{request.port}"
    text = f"starting {plan.served_model_name}: weights, graphs, KV cache"
    answered = False
    try:
        with stoppable(), ExitStack() as stack:
            with nullcontext() if terminal is None else terminal.status(text):
                running = stack.enter_context(
                    launcher.deploy(plan, processes, folder, startup_timeout=how.startup_timeout, say=reporter.say)
                )
            answered = True
            for line in _report(plan, running.servers, folder):
                click.echo(line)
            running.watch()
    except StoppedError:
        click.echo("stopped" if answered else "stopped before it answered", err=not answered)
    return 0 if answered else 130


def _report(plan: LaunchPlan, servers: Sequence[Server], logs: Path) -> Iterator[str]:
    """What there is to know of servers that answer, and what became of the plan's promises; how one is asked.

    A node that only joins has none.
    """
    from pipeline.serving.running.log import broken_promises, checkpoint_quantization

    for server in servers:
        scan = None if server.log_path is None else server.scan_log()
        yield from told(server, scan)
        quantization = checkpoint_quantization(Path(plan.model))
        for broken in () if scan is None else broken_promises(plan, scan, quantization=quantization):
            yield from _finding(broken)
    if servers:
        yield f"try         {example(servers[0])}"
    else:
        yield "joined      the head of this launch serves"
    yield f"stop        Ctrl-C; logs in {logs}"


def _unready(request: Request, plan: LaunchPlan) -> Iterator[str]:
    """What the machine lacks for the plan, as `quantmint doctor` finds it."""
    from pipeline.base.machine import Machine
    from pipeline.serving.host.checks import preflight
    from pipeline.serving.host.subject import wanted_by

    vllm = None if request.environment is None else request.environment.executable
    for finding in preflight(plan, Machine(), vllm=vllm, wanted=wanted_by(request.model.facts)):
        if finding.status in ("warn", "fail"):
            yield f"{finding.name}: found {finding.found}, expected {finding.expected}; {finding.fix}"


def _launcher(request: Request, plan: LaunchPlan, how: How) -> Launcher:
    from pipeline.serving.running.launchers import DockerLauncher, EndpointLauncher, LocalLauncher

    if how.kind == "endpoint":
        if how.endpoint is None:
            raise UserError("--launcher endpoint: found no --endpoint URL, expected the address of the server")
        return EndpointLauncher(how.endpoint, api_key_variable=how.api_key_variable)
    nodes = plan.layout.nodes
    if nodes > 1 and len(request.hosts) < nodes:
        raise UserError(f"--host-ip: found {len(request.hosts)} addresses, expected {nodes}, one for each node")
    if how.kind == "docker":
        return DockerLauncher(how.image, node_rank=how.node_rank)
    assert request.environment is not None  # noqa: S101 - looked for before anything else
    return LocalLauncher(request.environment.executable, node_rank=how.node_rank)


class StoppedError(BaseException):
    """Somebody asked for the end; no `Exception`, so that nothing on the way takes it for a fault."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `StoppedError` at the first Ctrl-C, SIGTERM or SIGHUP; later ones do not disturb the end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def order(_number: int, _frame: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise StoppedError

    before = {number: signal.signal(number, order) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told(server: Server, scan: LogScan | None) -> Iterator[str]:
    """What is known of a server that answers, a line each; one that somebody else started has no log here."""
    yield f"serving     {server.model_name} at {server.base_url}, ready after {server.started_seconds:.0f} s"
    if scan is None:
        yield f"vllm        {server.version()}"
        return
    version = scan.vllm_version or server.version()
    yield f"vllm        {version}" + (f", attention {scan.attention_backend}" if scan.attention_backend else "")
    if scan.kernels:
        yield f"kernels     {', '.join(scan.kernels)}"
    if scan.kv_tokens is not None:
        many = f", {scan.concurrency:,.1f} requests of full length at a time" if scan.concurrency is not None else ""
        yield f"KV cache    {scan.kv_tokens:,} tokens{many}"
    for finding in scan.findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{'fault' if finding.level == 'invalid' else 'caution':<11} {finding.why}"
    yield f"{'':<11}   {finding.line}"


def example(server: Server) -> str:
    """A request to paste."""
    body = json.dumps({"model": server.model_name, "prompt": "Hello", "max_tokens": 16})
    words = ["curl", "-s", f"{server.base_url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    return shlex.join(words)
