"""Runs one server over several machines through Ray, one `deploy` on each of them.

::

    RayLauncher(vllm, node_rank=0)      # the head: starts Ray, waits for the others, then starts the server
    RayLauncher(vllm, node_rank=1)      # joins, and stays until the head ends

Ray is the one of vLLM's environment. What is started here belongs to this launch alone: its processes are children of
our supervisors, its files lie in a folder of their own, and `ray stop`, which ends every Ray of a machine, is not used.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.errors import ServingError, UserError
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.launchers.child import Child, stop
from pipeline.serving.launchers.deployment import Deployment, Member, Say, deployed, ended, log_of
from pipeline.serving.launchers.local import listening, require_model
from pipeline.serving.launchers.ray_commands import (
    head_address,
    own_address,
    ray_command,
    ray_environment,
    start_argv,
)
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.child_environment import child_environment

_NODES = Path(__file__).with_name("ray_nodes.py")
_POLL_S = 0.2
_HEAD_S = 60.0  # for Ray's own start, which a busy machine draws out
#: How Ray is told to ask for a token; a path, never the token. The cluster is open to its network without.
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
_CLEAN = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"


class RayLauncher:
    """Launches what node ``node_rank`` of a plan runs. ``vllm_executable`` lies in the environment that has Ray too.

    ``stop_grace`` is how many seconds a process gets between SIGTERM and SIGKILL.
    """

    def __init__(self, vllm_executable: Path | str, *, node_rank: int = 0, stop_grace: float = 15.0) -> None:
        self.vllm = VllmEnvironment(Path(vllm_executable), "the argument")
        self.node_rank = node_rank
        self.stop_grace = stop_grace

    @contextmanager
    def deploy(
        self,
        plan: LaunchPlan,
        processes: Sequence[Process],
        logs: Path,
        *,
        startup_timeout: float = 3600.0,
        say: Say = print,
    ) -> Iterator[Deployment]:
        """This machine's part while the block runs; a machine that only joins has no servers.

        ``startup_timeout`` counts twice: for the other machines to join, then for the server to load. Raises
        ServingError where one is missing or something ends; UserError where there is no Ray, no model or no such node.
        """
        require_model(plan)
        ray = ray_command(self.vllm)
        here = [process for process in processes if process.node == self.node_rank]
        joins = next((process for process in here if process.role in {"ray-head", "ray-worker"}), None)
        if joins is None:
            raise UserError(f"this launch has no Ray on node {self.node_rank}")
        self._warn(joins, say)
        with ExitStack() as started:
            if joins.role == "ray-worker":
                _wait_for_head(head_address(joins), startup_timeout, say)
            cluster = self._start_ray(plan, joins, ray, logs)
            started.callback(stop, [cluster.child])
            servers = [process for process in here if process.role == "server"]
            if not servers:
                say(f"node {self.node_rank} joins the head at {head_address(joins)} and leaves with it, or at Ctrl-C")
                yield Deployment([], [cluster])
                return
            self._wait_for_nodes(plan, processes, cluster, logs, startup_timeout, say)

            def start(process: Process, port: int | None) -> Child:
                assert port is not None  # noqa: S101 - servers have one
                environment = self._environment(plan, process) | {"RAY_ADDRESS": head_address(joins)}
                command = [str(self.vllm.executable), *process.argv[1:], *listening(process, port)]
                return Child(command, environment, log_of(process, logs), grace=self.stop_grace)

            with deployed(plan, servers, start, beside=[cluster], startup_timeout=startup_timeout, say=say) as running:
                yield running

    def _start_ray(self, plan: LaunchPlan, process: Process, ray: Sequence[str], logs: Path) -> Member:
        after: list[list[str]] = []
        argv = start_argv(process, ray)
        if process.role == "ray-head":
            # A path of a socket below it must not be longer than 107 characters.
            folder = tempfile.mkdtemp(prefix="qm-ray-", dir="/tmp")
            argv.append(f"--temp-dir={folder}")
            after.append([sys.executable, "-I", "-c", _CLEAN, folder])
        child = Child(
            argv,
            ray_environment(plan, self._environment(plan, process)),
            log_of(process, logs),
            grace=self.stop_grace,
            after=after,
        )
        return Member("Ray", child)

    def _wait_for_nodes(
        self, plan: LaunchPlan, processes: Sequence[Process], cluster: Member, logs: Path, timeout: float, say: Say
    ) -> None:
        """Wait until every machine of the plan has joined with its GPUs."""
        joined = [process for process in processes if process.role in {"ray-head", "ray-worker"}]
        wanted = {own_address(process): len(process.gpus) for process in joined}
        head = next(process for process in joined if process.role == "ray-head")
        for process in joined:
            if process is not head:
                line = shlex.join([f"VLLM_HOST_IP={own_address(process)}", *start_argv(process, ["ray"])])
                say(f"on {own_address(process)}: this command with `--node-rank {process.node}`, or {line}")
        began, shown = time.monotonic(), ""
        up: float | None = None  # since when the head answers: its own start is not the others' lateness
        probe: Member | None = None
        try:
            while True:
                if cluster.child.exit_code is not None:
                    raise ended(cluster, "before every machine had joined")
                if probe is None or probe.child.exit_code is not None:  # the head was not up yet
                    probe = Member("Ray's client", self._probe(plan, head, logs))
                alive = _last_line(probe.child)
                missing = {own: gpus for own, gpus in wanted.items() if alive.get(own, 0) < gpus or own not in alive}
                if not missing:
                    say(f"Ray has {len(wanted)} of {len(wanted)} machines, {sum(wanted.values())} GPUs")
                    return
                state = f"Ray has {len(wanted) - len(missing)} of {len(wanted)} machines, waiting for "
                state += ", ".join(_lacking(own, gpus, alive) for own, gpus in missing.items())
                if state != shown and alive:
                    say(state)
                    shown = state
                if alive and up is None:
                    up = time.monotonic()
                if time.monotonic() > (began + max(timeout, _HEAD_S) if up is None else up + timeout):
                    raise ServingError(
                        f"after {timeout:g} s {state.removeprefix('Ray has ')}",
                        hint=f"its log: {cluster.child.log_path}",
                    )
                time.sleep(_POLL_S)
        finally:
            if probe is not None:
                stop([probe.child])

    def _probe(self, plan: LaunchPlan, head: Process, logs: Path) -> Child:
        command = [str(self.vllm.python), str(_NODES), head_address(head), own_address(head)]
        return Child(command, self._environment(plan, head), logs / "ray-nodes.log", grace=1.0)

    def _environment(self, plan: LaunchPlan, process: Process) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _AUTH if name in os.environ}
        return child_environment(os.environ, {**_QUIET, **plan.env, **process.env}) | passed

    def _warn(self, process: Process, say: Say) -> None:
        own = own_address(process)
        try:
            private = ipaddress.ip_address(own).is_private
        except ValueError:
            private = True  # a name: nobody can tell
        if not private:
            raise UserError(
                f"{own} is an address of the open internet: Ray runs what anybody sends it there",
                hint="Name the addresses of a private network.",
            )
        if os.environ.get("RAY_AUTH_MODE") != "token":
            say(
                "warning: whoever reaches this machine's network can run code through Ray, which listens on every"
                " interface; keep it private, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on every machine"
            )


def _wait_for_head(address: str, timeout: float, say: Say) -> None:
    """Wait until somebody listens there: `ray start` gives up after seconds, and people start machines in any order."""
    host, _, port = address.rpartition(":")
    began, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() - began > timeout:
                raise ServingError(
                    f"after {timeout:g} s no Ray answers at {address}: {error}", transient=True
                ) from error
        if not told:
            say(f"waiting for the head at {address}")
            told = True
        time.sleep(_POLL_S)


def _lacking(own: str, gpus: int, alive: Mapping[str, float]) -> str:
    return f"{own} ({alive[own]:g} of {gpus} GPUs)" if own in alive else f"{own} ({gpus} GPUs)"


def _last_line(probe: Child) -> dict[str, float]:
    """The last whole line that says which nodes are alive."""
    lines = [line for line in probe.log().splitlines()[:-1] or probe.log().splitlines() if line.startswith("{")]
    try:
        return dict(json.loads(lines[-1])) if lines else {}
    except ValueError:  # half a line
        return {}
