"""Starts one server of a plan on a Ray cluster that is there: `vllm serve` here, its engine over the cluster's nodes.

::

    with ClusterLauncher(find_vllm(), spread.cluster()).launch(plan, log_path) as server:
        print(server.base_url)

For a run that is spread over a cluster, which serves on it between its other stages. Ray takes part only in clusters of
its own version and Python's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.base.errors import ServingError, UserError
from pipeline.base.processes import Child, child_environment
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.deployment import deployed, require_model
from pipeline.serving.running.local import listening
from pipeline.serving.running.server import Server

_ASK = "import platform, ray; print(ray.__version__, platform.python_version())"
_TIMEOUT_S = 120
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
    ray: str
    python: str


class ClusterLauncher:
    """``vllm`` is an environment with the cluster's own version of Ray.

    ``stop_grace`` is how many seconds the server gets between SIGTERM and SIGKILL.
    """

    def __init__(self, vllm: VllmEnvironment, cluster: Cluster, *, stop_grace: float = 15.0) -> None:
        self.vllm = vllm
        self.cluster = cluster
        self.stop_grace = stop_grace

    @contextmanager
    def launch(self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 3600.0) -> Iterator[Server]:
        """The server on any free port of this machine while the block runs; the log goes to ``log_path``.

        Raises as `LocalLauncher.launch` does, and as `require` does.
        """
        require_model(plan)
        self.require(plan)
        process = Process(0, "server", 0, (), None, {}, plan.argv)

        def start(process: Process, port: int | None) -> Child:
            assert port is not None  # noqa: S101 - a server has one
            spread = () if plan.option(_EXECUTOR) is not None else (_EXECUTOR, "ray")
            command = [str(self.vllm.executable), *process.argv[1:], *spread, *listening(process, port)]
            return Child(command, self._environment(plan), log_path, grace=self.stop_grace)

        with deployed(plan, [process], start, startup_timeout=startup_timeout, say=lambda _: None) as running:
            yield running.servers[0]

    def require(self, plan: LaunchPlan) -> None:
        """UserError for a Ray of another version, and for engines parallel in data, which each node starts itself."""
        if plan.layout.data > 1:
            raise UserError(
                f"the plan has {plan.layout.data} engines over {plan.layout.nodes} nodes, each started on its own node,"
                " and a run serves one engine",
                hint="`serve: knobs:` can ask for tensor and pipeline parallelism instead.",
            )
        self._require_same_ray()

    def _environment(self, plan: LaunchPlan) -> dict[str, str]:
        """Ray gives the engine its GPUs: the server's own process must see none of its own choosing."""
        passed = {name: os.environ[name] for name in _AUTH if name in os.environ}
        # vLLM hands its own variables to Ray's workers; what else the plan sets, it is told to (vLLM ray/ray_env.py).
        others = sorted(name for name in plan.env if not name.startswith("VLLM_"))
        told = {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(others)} if others else {}
        own = {"RAY_ADDRESS": self.cluster.address, "VLLM_HOST_IP": self.cluster.own}
        environment = child_environment(os.environ, {**_QUIET, **told, **plan.env, **own}) | passed
        return {name: value for name, value in environment.items() if name not in _VISIBLE}

    def _require_same_ray(self) -> None:
        python = self.vllm.python
        try:
            done = subprocess.run(
                [str(python), "-c", _ASK], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServingError(f"{python} does not answer: {error}") from error
        expected = f"{self.cluster.ray} {self.cluster.python}"
        found = done.stdout.strip()
        if done.returncode != 0 or found != expected:
            ray, _, version = found.partition(" ")
            here = f"Ray {ray} with Python {version}" if done.returncode == 0 else "no Ray"
            raise UserError(
                f"vLLM's environment has {here}; the cluster is Ray {self.cluster.ray} with Python"
                f" {self.cluster.python}, and takes no other",
                hint=f"Start the cluster from an environment like {python.parent.parent}, or install that Ray there.",
            )
