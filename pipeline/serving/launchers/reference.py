"""Starts the reference runtime (`pipeline.reference`) on this machine, supervised as vLLM is: nothing survives us.

::

    plan = reference_plan(folder, served_model_name="model", max_model_len=4096, kv_cache_dtype="fp8")
    with ReferenceLauncher("auto").launch(plan, log_path) as server: ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.serving.launchers.child import Child
from pipeline.serving.launchers.deployment import deployed
from pipeline.serving.launchers.local import listening, require_model
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.running.child_environment import child_environment
from pipeline.serving.running.server import Server

_COMMAND = ("python", "-mpipeline.reference")
_GRACE_S = 5.0  # it has nothing to tidy up
_ROOT = Path(__file__).parents[3]  # where `pipeline` is found, however this process found it


def reference_plan(
    model: Path, *, served_model_name: str, max_model_len: int, kv_cache_dtype: str, trust_remote_code: bool = False
) -> LaunchPlan:
    """The launch of a checkpoint on the reference runtime; the device is the launcher's."""
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


class ReferenceLauncher:
    """Launches with this interpreter; ``device`` is PyTorch's name of where it computes, or auto."""

    def __init__(self, device: str) -> None:
        self.device = device

    @contextmanager
    def launch(self, plan: LaunchPlan, log_path: Path, *, startup_timeout: float = 900.0) -> Iterator[Server]:
        """The server of a `reference_plan` on any free port while the block runs; raises as `LocalLauncher` does."""
        require_model(plan)
        process = Process(0, "server", 0, (), None, {}, plan.argv)

        def start(process: Process, port: int | None) -> Child:
            # -P: a folder here that is called pipeline is not ours.
            command = [sys.executable, "-P", "-m", "pipeline.reference", *process.argv[2:], "--device", self.device]
            path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
            environment = child_environment({**os.environ, "PYTHONPATH": path}, plan.env)
            listens = [] if port is None else listening(process, port)
            return Child([*command, *listens], environment, log_path, grace=_GRACE_S)

        def quiet(_: str) -> None:
            return

        with deployed(plan, [process], start, startup_timeout=startup_timeout, say=quiet) as running:
            yield running.servers[0]
