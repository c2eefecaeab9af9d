"""Launchers: start a plan's servers on this machine, in containers, or on a Ray cluster.

Started servers listen on 127.0.0.1 only, and none survives the launcher. Ports and devices of replicas come with the
plan's processes. A container is no child of the docker client, whose output is the server's log: the supervisor stops
and removes it by its name, even after this process was killed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.processes import OFFLINE, Child, child_environment
from quantmint.pipeline.serving.plan import LaunchPlan, Process
from quantmint.pipeline.serving.render.docker import docker_run
from quantmint.pipeline.serving.render.invocation import image_of
from quantmint.pipeline.serving.running.server import (
    HOST,
    Deployment,
    Notify,
    RunningServer,
    node_processes,
    require_model,
    start_processes,
)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts the processes of a plan on node ``node_rank``; ``stop_grace`` is seconds from SIGTERM to SIGKILL."""

    node_rank: int = 0
    stop_grace: float = 15.0

    @contextmanager
    def deploy(
        self,
        plan: LaunchPlan,
        processes: Sequence[Process],
        logs: Path,
        *,
        startup_timeout: float = 3600.0,
        notify: Notify = print,
    ) -> Iterator[Deployment]:
        """Run every process of this node during the block, each with its own log in folder ``logs``.

        Raises `ServingError`, with the cause that the log names, when a process ends or does not answer within
        ``startup_timeout`` seconds; `UserError` when the model's folder, a port or docker is not available.
        """
        on_node = node_processes(plan, processes, self.node_rank)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, logs / f"{process.role}-{process.replica}.log", notify)

        with start_processes(plan, on_node, start, startup_timeout=startup_timeout, notify=notify) as ready:
            yield ready()

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, notify: Notify) -> Child:
        raise NotImplementedError


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """Runs `vllm serve` on this machine with ``executable``, the ``vllm`` command."""

    executable: Path | str

    @contextmanager
    def launch(self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0) -> Iterator[RunningServer]:
        """Run one server on a free port during the block, with its log in ``log_path``. Raises as `deploy`."""
        with self.launch_in_background(plan, log_path, startup_timeout=startup_timeout) as ready:
            yield ready()

    @contextmanager
    def launch_in_background(
        self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0, notify: Notify = lambda _: None
    ) -> Iterator[Callable[[], RunningServer]]:
        """Start one server during the block, and yield a function that waits until it answers and returns it."""
        require_model(plan)
        process = Process(0, "server", 0, (), None, {}, plan.argv)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, log_path, print)

        with start_processes(plan, [process], start, startup_timeout=startup_timeout, notify=notify) as ready:
            yield lambda: ready().servers[0]

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, notify: Notify) -> Child:
        command = [str(self.executable), *process.argv[1:]]
        if port is not None:  # on the loopback interface, unless the arguments name a host
            command += [*([] if "--host" in process.argv else ["--host", HOST]), "--port", str(port)]
        return Child(command, self._environment(plan, process), log_path, grace=self.stop_grace)

    def _environment(self, plan: LaunchPlan, process: Process) -> dict[str, str]:
        environment = child_environment(os.environ, {**plan.env, **process.env})
        if "CUDA_VISIBLE_DEVICES" in process.env:
            # This variable selects the process's GPUs, and vLLM on ROCm stops if HIP's differs.
            environment.pop("HIP_VISIBLE_DEVICES", None)
        return environment


#: Variables by which the docker client finds its engine and the files with its credentials.
_CLIENT = re.compile(r"DOCKER_(HOST|CONTEXT|CONFIG|CERT_PATH|TLS_VERIFY|API_VERSION)|XDG_RUNTIME_DIR|SSH_AUTH_SOCK")


@dataclass(frozen=True)
class DockerLauncher(Launcher):
    """Runs containers; ``image`` overrides the plan's. A missing image is pulled, within the startup timeout."""

    image: str | None = None

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, notify: Notify) -> Child:
        docker = shutil.which("docker")
        if docker is None:
            raise UserError("there is no `docker` command on PATH", hint="Install docker, or use another launcher.")
        name = f"quantmint-{os.getpid()}-{process.replica}"
        notify(f"running {image_of(plan, self.image)} as {name}")
        offline = replace(process, port=port, env={**process.env, **dict(sorted(OFFLINE.items()))})
        command = docker_run(plan, offline, image=self.image, name=name)
        client = {variable: value for variable, value in os.environ.items() if _CLIENT.fullmatch(variable)}
        cleanup = [[docker, "stop", f"--time={self.stop_grace:.0f}", name], [docker, "rm", "--force", name]]
        environment = child_environment(os.environ, {}) | client
        return Child([docker, *command[1:]], environment, log_path, grace=self.stop_grace, after=cleanup)


_EXECUTOR = "--distributed-executor-backend"
#: Ray's authentication mode, and the path of its token (never the token).
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster seen from one of its nodes: the head's HOST:PORT, and the node's own address."""

    address: str
    node_address: str


@dataclass(frozen=True)
class ClusterLauncher(LocalLauncher):
    """Runs one server on this node whose engine uses GPUs of the whole Ray cluster.

    vLLM's environment must have the cluster's version of Ray.
    """

    cluster: Cluster

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, notify: Notify) -> Child:
        self.require(plan)
        spread = () if plan.option(_EXECUTOR) is not None else (_EXECUTOR, "ray")
        return super()._start(plan, replace(process, argv=(*process.argv, *spread)), port, log_path, notify)

    def require(self, plan: LaunchPlan) -> None:
        """Raise `UserError` for a plan with data parallel engines, which must be started on each node."""
        if plan.layout.data > 1:
            raise UserError(
                f"the plan has {plan.layout.data} engines on {plan.layout.nodes} nodes, each started on its own node,"
                " but a run starts one engine",
                hint="Set tensor and pipeline parallelism under `serve: knobs:` instead.",
            )

    def _environment(self, plan: LaunchPlan, process: Process) -> dict[str, str]:
        """Return the server's variables without any that selects GPUs, because Ray assigns the engine's GPUs."""
        authentication = {name: os.environ[name] for name in _AUTH if name in os.environ}
        # vLLM copies its own variables to Ray's workers; this one names the plan's others (vLLM ray/ray_env.py).
        other_names = sorted(name for name in plan.env if not name.startswith("VLLM_"))
        copied = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(other_names)} if other_names else {}
        ray = {"RAY_ADDRESS": self.cluster.address, "VLLM_HOST_IP": self.cluster.node_address}
        environment = child_environment(os.environ, {**_QUIET, **copied, **plan.env, **ray}) | authentication
        return {name: value for name, value in environment.items() if name not in _VISIBLE}
