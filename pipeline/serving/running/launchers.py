"""Starts vLLM from a plan, and leaves nothing behind: on this machine, or on a Ray cluster that is there.

Servers listen on 127.0.0.1 only. What tells replicas apart (port, devices) comes with each process of the plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.processes import Child, child_environment
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.deployment import Deployment, Say, deployed, log_of, on_node, require_model, starting
from pipeline.serving.running.server import HOST, Server


class LocalLauncher:
    """Launches ``vllm serve`` on this machine, ``node_rank`` of the plan.

    ``stop_grace`` is how many seconds a server gets between SIGTERM and SIGKILL.
    """

    def __init__(self, vllm_executable: Path | str, *, node_rank: int = 0, stop_grace: float = 15.0) -> None:
        self.executable = Path(vllm_executable)
        self.node_rank = node_rank
        self.stop_grace = stop_grace

    @contextmanager
    def launch(self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0) -> Iterator[Server]:
        """One server of the plan on any free port while the block runs; the log goes to ``log_path``.

        Raises ServingError, with the cause that the log names, when the server ends or does not answer within
        ``startup_timeout`` seconds; UserError when the model's folder is not there.
        """
        with self.starting(plan, log_path, startup_timeout=startup_timeout) as ready:
            yield ready()

    @contextmanager
    def starting(
        self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0
    ) -> Iterator[Callable[[], Server]]:
        """As `launch`, for a block that has something to do until it calls, once, for the server that answers."""
        require_model(plan)
        process = Process(0, "server", 0, (), None, {}, plan.argv)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, log_path)

        with starting(plan, [process], start, startup_timeout=startup_timeout, say=lambda _: None) as ready:
            yield lambda: ready().servers[0]

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

        Raises as `launch` does, and UserError where a port that the plan asks for is not free.
        """
        here = on_node(plan, processes, self.node_rank)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, log_of(process, logs))

        with deployed(plan, here, start, startup_timeout=startup_timeout, say=say) as running:
            yield running

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path) -> Child:
        command = [str(self.executable), *process.argv[1:], *([] if port is None else listening(process, port))]
        environment = child_environment(os.environ, {**plan.env, **process.env})
        return Child(command, environment, log_path, grace=self.stop_grace)


def listening(process: Process, port: int) -> list[str]:
    """The arguments that say where a server listens: on the loopback interface, unless its own say otherwise."""
    return [*([] if "--host" in process.argv else ["--host", HOST]), "--port", str(port)]


# A name in fingerprints, not what is run: it stays where the module moved, or what was measured would be again.
_COMMAND = ("python", "-mpipeline.reference")
_ROOT = Path(__file__).parents[3]  # where `pipeline` is found, however this process found it


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
    return [sys.executable, "-P", "-m", "pipeline.serving.reference", *plan.argv[2:], "--device", device]


def reference_environment(plan: LaunchPlan) -> dict[str, str]:
    """The variables of a `reference_plan`, with where `pipeline` is found, however this process found it."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**plan.env, "PYTHONPATH": path, "TQDM_DISABLE": "1"}


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


class ClusterLauncher(LocalLauncher):
    """One server here whose engine has the cluster's nodes; ``vllm`` has the cluster's own version of Ray."""

    def __init__(self, vllm: VllmEnvironment, cluster: Cluster, *, stop_grace: float = 15.0) -> None:
        super().__init__(vllm.executable, stop_grace=stop_grace)
        self.cluster = cluster

    def _start(self, plan: LaunchPlan, process: Process, port: int | None, log_path: Path) -> Child:
        self.require(plan)
        assert port is not None  # noqa: S101 - a server has one
        spread = () if plan.option(_EXECUTOR) is not None else (_EXECUTOR, "ray")
        command = [str(self.executable), *process.argv[1:], *spread, *listening(process, port)]
        return Child(command, self._environment(plan), log_path, grace=self.stop_grace)

    def require(self, plan: LaunchPlan) -> None:
        """UserError for engines parallel in data, which each node starts itself."""
        if plan.layout.data > 1:
            raise UserError(
                f"the plan has {plan.layout.data} engines over {plan.layout.nodes} nodes, each started on its own node,"
                " and a run serves one engine",
                hint="`serve: knobs:` can ask for tensor and pipeline parallelism instead.",
            )

    def _environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Ray gives the engine its GPUs: the server's own process must see none of its own choosing."""
        passed = {name: os.environ[name] for name in _AUTH if name in os.environ}
        # vLLM hands its own variables to Ray's workers; what else the plan sets, it is told to (vLLM ray/ray_env.py).
        others = sorted(name for name in plan.env if not name.startswith("VLLM_"))
        told = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(others)} if others else {}
        own = {"RAY_ADDRESS": self.cluster.address, "VLLM_HOST_IP": self.cluster.own}
        environment = child_environment(os.environ, {**_QUIET, **told, **plan.env, **own}) | passed
        return {name: value for name, value in environment.items() if name not in _VISIBLE}
