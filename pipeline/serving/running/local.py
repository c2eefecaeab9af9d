"""Starts vLLM from a plan on this machine, and leaves no process behind; how the reference runtime is started.

::

    with LocalLauncher(find_vllm().executable).launch(plan, log_path, startup_timeout=600) as server:
        print(server.base_url, server.scan_log().kv_tokens)

Servers listen on 127.0.0.1 only. What tells replicas apart (port, devices) comes with each process of the plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.base.processes import Child, child_environment
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.deployment import Deployment, Say, deployed, log_of, on_node, require_model
from pipeline.serving.running.server import HOST, Server


class LocalLauncher:
    """Launches ``vllm serve`` with one executable on this machine.

    ``node_rank`` says which machine of the plan this one is. ``stop_grace`` is how many seconds a server gets between
    SIGTERM and SIGKILL.
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
        require_model(plan)
        process = Process(0, "server", 0, (), None, {}, plan.argv)

        def start(process: Process, port: int | None) -> Child:
            return self._start(plan, process, port, log_path)

        with deployed(plan, [process], start, startup_timeout=startup_timeout, say=_quiet) as running:
            yield running.servers[0]

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


def _quiet(_: str) -> None:
    return


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
