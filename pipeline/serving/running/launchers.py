"""Launchers: start a plan's servers on this machine, in containers or on a Ray cluster, or attach to a running server.

Started servers listen on 127.0.0.1 only, and none survives the launcher. Ports and devices of replicas come with the
plan's processes. A container is no child of the docker client, whose output is the server's log: the supervisor stops
and removes it by its name, even after this process was killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from quantmint.pipeline.base.errors import ServingError, UserError
from quantmint.pipeline.base.processes import OFFLINE, Child, child_environment
from quantmint.pipeline.serving.environment import parse_version
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

        ServingError, with the cause that the log names, when a process ends or does not answer within
        ``startup_timeout`` seconds; UserError when the model's folder, a port or docker is not available.
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


# Part of fingerprints, and never executed: it keeps the module's old path, or everything would be measured again.
_COMMAND = ("python", "-mquantmint.pipeline.reference")
_ROOT = Path(__file__).parents[4]  # the folder to import `quantmint` from


def reference_plan(
    model: Path, *, served_model_name: str, max_model_len: int, kv_cache_dtype: str, trust_remote_code: bool = False
) -> LaunchPlan:
    """Return the plan of a checkpoint on the reference runtime; its device is chosen at the start."""
    return LaunchPlan(
        env={"TOKENIZERS_PARALLELISM": "false"},
        argv=(
            *_COMMAND,
            str(model),
            *("--served-model-name", served_model_name),
            *("--max-model-len", str(max_model_len)),
            *(() if kv_cache_dtype == "auto" else ("--kv-cache-dtype", kv_cache_dtype)),
            *(("--trust-remote-code",) if trust_remote_code else ()),
        ),
        served_model_name=served_model_name,
        tensor_parallel_size=1,
        reasons=(),
        profile="reference",
    )


def reference_command(plan: LaunchPlan, device: str) -> list[str]:
    """Return the command line of a `reference_plan`, without the socket; ``device`` is PyTorch's name, or "auto"."""
    # -P: a folder called `quantmint` in the current folder must not shadow ours.
    return [sys.executable, "-P", "-m", "quantmint.pipeline.serving.reference", *plan.argv[2:], "--device", device]


def reference_environment(plan: LaunchPlan) -> dict[str, str]:
    """Return the variables of a `reference_plan`, with PYTHONPATH for importing `quantmint`."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**plan.env, "PYTHONPATH": path, "TQDM_DISABLE": "1"}


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
        """Raise UserError for a plan with data parallel engines, which must be started on each node."""
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


class EndpointLauncher:
    """Attaches to a running server: checks that it serves the plan's model, and never stops it.

    Over HTTP a server reports a name, a folder and a version, but not its weights. On this machine the folder proves
    the model; a remote server can only be shown to serve a different model, and a warning says so.
    """

    def __init__(self, url: str) -> None:
        self.url = endpoint_url(url)

    @contextmanager
    def deploy(self, plan: LaunchPlan, *_: object, notify: Notify = print, **__: object) -> Iterator[Deployment]:
        """Yield the server; the plan's processes, logs and timeout are ignored.

        ServingError when no server answers, or it serves another model.
        """
        server = RunningServer(plan.served_model_name, self.url, None, 0.0)
        server.get("/health")
        yield _Attached([replace(server, model_name=_model_name(server, plan, notify))], [])


class _Attached(Deployment):
    """A server that quantmint did not start: it has no process to check, so `check` asks it."""

    poll_s = 5.0

    def check(self) -> None:
        """Raise ServingError if the server does not answer for half a minute."""
        self.servers[0].get("/health")


def endpoint_url(text: str) -> str:
    """Return an address without its API path: "http://gpu7:8000" for "http://gpu7:8000/v1/".

    UserError for a text that is no address, or contains credentials.
    """
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UserError("--endpoint is not the address of a server: expected something like http://gpu7:8000")
    if parts.username is not None or parts.password is not None:
        raise UserError("the address contains a user name or password, which the process list would show")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _model_name(server: RunningServer, plan: LaunchPlan, notify: Notify) -> str:
    """Return the server's name for the plan's model, found by name, else by folder; warn about what is not proven.

    ServingError when it serves another model.
    """
    try:
        models = [dict(model) for model in json.loads(server.get("/v1/models"))["data"]]
        ours = [model for model in models if model["id"] == server.model_name]
        ours += [model for model in models if model.get("root") == plan.model]
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{server.base_url} does not list its models as vLLM does: {error}") from error
    mismatch = f"{server.base_url} is not the server of this plan"
    if not ours:
        names = ", ".join(str(model["id"]) for model in models) or "nothing"
        raise ServingError(f"{mismatch}: it serves {names}, expected {plan.served_model_name}")
    root, version = ours[0].get("root"), server.version()
    local = urlsplit(server.base_url).hostname in {"127.0.0.1", "localhost", "::1"}
    if root is None or not local or not Path(root).is_dir():
        folder = root or "a folder that it does not name"
        notify(f"warning: {server.base_url}: it serves {folder}, whose files cannot be checked from this machine")
    elif not (Path(plan.model).is_dir() and Path(root).samefile(plan.model)):
        raise ServingError(f"{mismatch}: it serves {root}, expected {plan.model}")
    if plan.vllm_version and parse_version(version) != parse_version(plan.vllm_version):
        notify(f"warning: {server.base_url}: it runs vLLM {version}, but the plan was made for {plan.vllm_version}")
    return str(ours[0]["id"])
