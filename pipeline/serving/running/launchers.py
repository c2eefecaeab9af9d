"""Starts vLLM from a plan, and leaves nothing behind: on this machine, in containers, on a Ray cluster that is there;
or takes a server that already runs.

Servers listen on 127.0.0.1 only. What tells replicas apart (port, devices) comes with each process of the plan. A
container is no child of the docker client, whose output is the server's log: the supervisor stops and removes it by its
name, also when our own end was SIGKILL.
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
    RunningServer,
    Say,
    node_processes,
    require_model,
    start_processes,
)


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts this machine's processes of a plan. ``stop_grace`` is seconds between SIGTERM and SIGKILL."""

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
        say: Say = print,
    ) -> Iterator[Deployment]:
        """Every process of this machine while the block runs, each with a log of its own in ``logs``.

        Raises ServingError, with the cause that the log names, when one ends or does not answer within
        ``startup_timeout`` seconds; UserError when what it needs is not here: the model's folder, a port, docker.
        """
        here = node_processes(plan, processes, self.node_rank)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, logs / f"{process.role}-{process.replica}.log", say)

        with start_processes(plan, here, start, startup_timeout=startup_timeout, say=say) as ready:
            yield ready()

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, say: Say) -> Child:
        raise NotImplementedError


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """Runs ``vllm serve`` on this machine."""

    executable: Path | str

    @contextmanager
    def launch(self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0) -> Iterator[RunningServer]:
        """One server on any free port while the block runs, its log in ``log_path``; raises what `deploy` does."""
        with self.launch_in_background(plan, log_path, startup_timeout=startup_timeout) as ready:
            yield ready()

    @contextmanager
    def launch_in_background(
        self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0, say: Say = lambda _: None
    ) -> Iterator[Callable[[], RunningServer]]:
        """As `launch`, for a block that has something to do until it calls, once, for the server that answers."""
        require_model(plan)
        process = Process(0, "server", 0, (), None, {}, plan.argv)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, log_path, print)

        with start_processes(plan, [process], start, startup_timeout=startup_timeout, say=say) as ready:
            yield lambda: ready().servers[0]

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, say: Say) -> Child:
        command = [str(self.executable), *process.argv[1:]]
        if port is not None:  # on the loopback interface, unless its own arguments say otherwise
            command += [*([] if "--host" in process.argv else ["--host", HOST]), "--port", str(port)]
        return Child(command, self._environment(plan, process), log_path, grace=self.stop_grace)

    def _environment(self, plan: LaunchPlan, process: Process) -> dict[str, str]:
        environment = child_environment(os.environ, {**plan.env, **process.env})
        if "CUDA_VISIBLE_DEVICES" in process.env:
            # The process has its GPUs by this variable, and vLLM on ROCm stops where HIP's says something else.
            environment.pop("HIP_VISIBLE_DEVICES", None)
        return environment


# A name in fingerprints, not what is run: it stays where the module moved, or what was measured would be again.
_COMMAND = ("python", "-mquantmint.pipeline.reference")
_ROOT = Path(__file__).parents[4]  # where `quantmint` is found, however this process found it


def reference_plan(
    model: Path, *, served_model_name: str, max_model_len: int, kv_cache_dtype: str, trust_remote_code: bool = False
) -> LaunchPlan:
    """The launch of a checkpoint on the reference runtime; the device is that of whoever starts it."""
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
    """The command line of a `reference_plan`, but for the socket; ``device`` is PyTorch's name of it, or auto."""
    # -P: a folder here that is called pipeline is not ours.
    return [sys.executable, "-P", "-m", "quantmint.pipeline.serving.reference", *plan.argv[2:], "--device", device]


def reference_environment(plan: LaunchPlan) -> dict[str, str]:
    """The variables of a `reference_plan`, with where `pipeline` is found, however this process found it."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**plan.env, "PYTHONPATH": path, "TQDM_DISABLE": "1"}


#: How the client finds its engine. Its credentials lie in files that these name.
_CLIENT = re.compile(r"DOCKER_(HOST|CONTEXT|CONFIG|CERT_PATH|TLS_VERIFY|API_VERSION)|XDG_RUNTIME_DIR|SSH_AUTH_SOCK")


@dataclass(frozen=True)
class DockerLauncher(Launcher):
    """Runs containers; ``image`` overrides the plan's. One that is not here is pulled, which counts as starting."""

    image: str | None = None

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, say: Say) -> Child:
        docker = shutil.which("docker")
        if docker is None:
            raise UserError("there is no `docker` command on PATH", hint="Install it, or take another launcher.")
        name = f"quantmint-{os.getpid()}-{process.replica}"
        say(f"running {image_of(plan, self.image)} as {name}")
        here = replace(process, port=port, env={**process.env, **dict(sorted(OFFLINE.items()))})
        command = docker_run(plan, here, image=self.image, name=name)
        passed = {variable: value for variable, value in os.environ.items() if _CLIENT.fullmatch(variable)}
        end = [[docker, "stop", f"--time={self.stop_grace:.0f}", name], [docker, "rm", "--force", name]]
        environment = child_environment(os.environ, {}) | passed
        return Child([docker, *command[1:]], environment, log_path, grace=self.stop_grace, after=end)


_EXECUTOR = "--distributed-executor-backend"
#: How Ray is told to ask for a token; a path, never the token.
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as a process on one of its nodes joins it: the head's HOST:PORT, and the node's ``own`` address."""

    address: str
    own: str


@dataclass(frozen=True)
class ClusterLauncher(LocalLauncher):
    """One server here whose engine has the cluster's nodes; vLLM's environment has the cluster's own version of Ray."""

    cluster: Cluster

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path, say: Say) -> Child:
        self.require(plan)
        spread = () if plan.option(_EXECUTOR) is not None else (_EXECUTOR, "ray")
        return super()._start(plan, replace(process, argv=(*process.argv, *spread)), port, log_path, say)

    def require(self, plan: LaunchPlan) -> None:
        """UserError for engines parallel in data, which each node starts itself."""
        if plan.layout.data > 1:
            raise UserError(
                f"the plan has {plan.layout.data} engines over {plan.layout.nodes} nodes, each started on its own node,"
                " and a run serves one engine",
                hint="`serve: knobs:` can ask for tensor and pipeline parallelism instead.",
            )

    def _environment(self, plan: LaunchPlan, process: Process) -> dict[str, str]:
        """Ray gives the engine its GPUs: the server's own process must see none of its own choosing."""
        passed = {name: os.environ[name] for name in _AUTH if name in os.environ}
        # vLLM hands its own variables to Ray's workers; what else the plan sets, it is told to (vLLM ray/ray_env.py).
        others = sorted(name for name in plan.env if not name.startswith("VLLM_"))
        told = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(others)} if others else {}
        own = {"RAY_ADDRESS": self.cluster.address, "VLLM_HOST_IP": self.cluster.own}
        environment = child_environment(os.environ, {**_QUIET, **told, **plan.env, **own}) | passed
        return {name: value for name, value in environment.items() if name not in _VISIBLE}


class EndpointLauncher:
    """Takes a server that already runs: looks whether it is the right one, and never stops it.

    HTTP tells a name, a folder and a version, never the weights: on this machine the folder is proof; elsewhere a
    server can be shown to be the wrong one, never the right, which is said.
    """

    def __init__(self, url: str) -> None:
        self.url = endpoint_url(url)

    @contextmanager
    def deploy(self, plan: LaunchPlan, *_: object, say: Say = print, **__: object) -> Iterator[Deployment]:
        """The server while the block runs; the plan's processes, logs and timeout have no part in it.

        Raises ServingError where nobody answers, or another model does.
        """
        server = RunningServer(plan.served_model_name, self.url, None, 0.0)
        server.get("/health")
        yield _Attached([replace(server, model_name=_name(server, plan, say))], [])


class _Attached(Deployment):
    """A server of somebody else: there is no process to look at, so it is asked."""

    poll_s = 5.0

    def check(self) -> None:
        """Raise `ServingError` when it does not answer for half a minute."""
        self.servers[0].get("/health")


def endpoint_url(text: str) -> str:
    """An address without the API's path: "http://gpu7:8000/v1/" is "http://gpu7:8000". UserError for another thing."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UserError("--endpoint is not the address of a server: expected something like http://gpu7:8000")
    if parts.username is not None or parts.password is not None:
        raise UserError("the address holds a name or password, which would stand in the process list")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _name(server: RunningServer, plan: LaunchPlan, say: Say) -> str:
    """What the server calls our model, found by its name, else by its folder; what cannot be proven of it is said.

    ServingError where it has another.
    """
    try:
        models = [dict(model) for model in json.loads(server.get("/v1/models"))["data"]]
        ours = [model for model in models if model["id"] == server.model_name]
        ours += [model for model in models if model.get("root") == plan.model]
    except (ValueError, KeyError, TypeError) as error:
        raise ServingError(f"{server.base_url} does not list its models as vLLM does: {error}") from error
    another = f"{server.base_url} is not the server of this plan"
    if not ours:
        names = ", ".join(str(model["id"]) for model in models) or "nothing"
        raise ServingError(f"{another}: it serves {names}, expected {plan.served_model_name}")
    root, version = ours[0].get("root"), server.version()
    local = urlsplit(server.base_url).hostname in {"127.0.0.1", "localhost", "::1"}
    if root is None or not local or not Path(root).is_dir():
        seen = root or "a folder that it does not name"
        say(f"warning: {server.base_url}: it serves {seen}, whose files cannot be seen from here")
    elif not (Path(plan.model).is_dir() and Path(root).samefile(plan.model)):
        raise ServingError(f"{another}: it serves {root}, expected {plan.model}")
    if plan.vllm_version and parse_version(version) != parse_version(plan.vllm_version):
        say(f"warning: {server.base_url}: it is vLLM {version}, the plan was made for {plan.vllm_version}")
    return str(ours[0]["id"])
