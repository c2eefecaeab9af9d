"""The servers of a run: one at a time, kept while stages ask the same one, always stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.suites import TASKS_FOLDER
from pipeline.base.errors import UserError
from pipeline.base.processes import Conversation, conversation
from pipeline.base.progress import Progress
from pipeline.quantize.device import give_back_memory
from pipeline.serving.running.launchers import reference_command, reference_environment
from pipeline.serving.running.log import LogScan, scan_log
from pipeline.serving.running.server import Server
from pipeline.stages.stage import Setting

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pipeline.serving.environment import VllmEnvironment
    from pipeline.serving.plan import LaunchPlan
    from pipeline.serving.running.launchers import ClusterLauncher

STARTUP_TIMEOUT = 3600.0
"""Seconds that a server may take to load; a 405B model from a network disk takes most of it."""


class Servers:
    """Starts a server when a stage first needs it and stops it when another is needed or the run ends.

    Two models side by side may not fit, and would share the machine that is being measured.
    """

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._running = ExitStack()
        self._found: tuple[str, Server] | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, side: str, plan: LaunchPlan) -> Server:
        """The running server of a side, started if need be. Raises `ServingError` where it does not start."""
        if self._found is None or self._found[0] != side:
            self.stop()
            log = self._setting.store.root / "logs" / f"{self._setting.recipe.name}-{side}.log"
            self._found = side, self._running.enter_context(self._launch(side, plan, log))
        return self._found[1]

    def fresh(self, side: str, plan: LaunchPlan, log: Path) -> AbstractContextManager[Server]:
        """A server that was started for this block and ends with it; what ran before is stopped.

        Its log is ``log``. Raises `ServingError` where it does not start.
        """
        self.stop()
        return self._launch(side, plan, log)

    @contextmanager
    def _launch(self, side: str, plan: LaunchPlan, log: Path) -> Iterator[Server]:
        from pipeline.serving.running.launchers import LocalLauncher

        setting = self._setting
        log.parent.mkdir(parents=True, exist_ok=True)
        give_back_memory()
        context: AbstractContextManager[Server]
        if setting.recipe.evaluation.runtime == "reference":
            title, context = "the reference runtime", started_reference(setting, plan, log)
        elif setting.vllm is None:
            raise UserError(
                "no vLLM was found to serve with.",
                hint="`make serving` builds one for a CPU; or set QUANTMINT_VLLM to a `vllm` executable.",
            )
        else:
            several = plan.layout.nodes > 1
            launcher = over_nodes(setting, setting.vllm, plan) if several else LocalLauncher(setting.vllm.executable)
            if several and setting.spread is not None:
                setting.spread.release()  # its workers hold the GPUs
            title = f"vLLM {setting.vllm.version}"
            context = launcher.launch(plan, log, startup_timeout=STARTUP_TIMEOUT)
        self._progress.say(f"starting {title} with the {side}, log in {log}")
        with context as server:
            self._progress.say(f"ready after {server.started_seconds:.0f} s at {server.base_url}")
            yield server

    def stop(self) -> None:
        """Stop the server that runs, if one does."""
        self._found = None
        self._running.close()


@dataclass(frozen=True, slots=True)
class ReferenceServer(Server):
    """The reference runtime in its process, which is talked to and speaks no HTTP."""

    talk: Conversation | None = None

    def ask(self, what: str, **given: Any) -> Any:
        """The reply to a message of `pipeline.serving.reference`."""
        assert self.talk is not None  # noqa: S101 - a field after those with defaults
        return self.talk.ask({what: given})


@contextmanager
def started_reference(setting: Setting, plan: LaunchPlan, log: Path) -> Iterator[ReferenceServer]:
    """The reference runtime with the checkpoint of a `reference_plan`, loaded; it has ended at the exit.

    lm-eval runs in it. So it has the Hub, and its token, where a task's data is there, but never together with code of
    the model's folder. Raises `StageError` with the end of its log where it does not come about.
    """
    local = all((TASKS_FOLDER / f"{task.task}.yaml").is_file() for task in setting.suite.tasks)
    env = {**reference_environment(plan), **({"HF_HUB_OFFLINE": "1"} if local else {})}
    secrets = () if local or setting.recipe.trust_remote_code else ("HF_TOKEN",)
    log.unlink(missing_ok=True)
    began = time.monotonic()
    command = reference_command(plan, setting.device.partition(",")[0])
    with conversation(command, log, what="the reference runtime", env=env, secrets=secrets) as talk:
        yield ReferenceServer("model", "a socket", log, time.monotonic() - began, talk=talk)


def over_nodes(setting: Setting, vllm: VllmEnvironment, plan: LaunchPlan) -> ClusterLauncher:
    """What starts a launch over several nodes: on the cluster that the run is spread over. `UserError` without one."""
    from pipeline.serving.running.launchers import ClusterLauncher

    if setting.spread is None:
        raise UserError(
            f"the launch is over {plan.layout.nodes} nodes, and this run is on one.",
            hint="`--on ray` runs on a Ray cluster's nodes; `quantmint submit` takes a run to several.",
        )
    return ClusterLauncher(vllm, setting.spread.cluster())


def keep_log(server: Server, destination: Path) -> LogScan:
    """Copy what the server has logged so far; returns what it says."""
    assert server.log_path is not None  # noqa: S101 - a run starts its servers itself
    text = server.log_path.read_text(encoding="utf-8", errors="replace")
    destination.write_text(text, encoding="utf-8")
    return scan_log(text)
