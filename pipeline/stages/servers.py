"""The servers of a run: started when a stage first asks one, kept while stages ask it, and always stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantmint.calibration.container import memory_left
from quantmint.calibration.room import free_bytes
from quantmint.eval.suites import TASKS_FOLDER
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.processes import Conversation, conversation
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.quantize.device import give_back_memory
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.reference.launch import reference_command, reference_environment
from quantmint.pipeline.serving.running.endpoint import EndpointLauncher, Endpoints
from quantmint.pipeline.serving.running.launchers import ClusterLauncher, LocalLauncher
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.setting import Setting

STARTUP_TIMEOUT = 3600.0
"""Seconds that a server may take to load; a 405B model from a network disk takes most of it."""
_PROGRAM = 2 << 30
"""Bytes that the two processes of a vLLM take beside its model and its cache."""


class Servers:
    """The servers of a run: each starts when a stage needs it, and stops when another is needed or the run ends.

    On a CPU with enough memory both sides start at once and stay. A stage that measures the machine gets a `fresh`
    server of its own.
    """

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._running = ExitStack()
        self._ready: dict[str, Callable[[], RunningServer]] = {}
        self._expected: tuple[str, LaunchPlan] | None = None
        self._asking = ExitStack()
        self._lm_eval: tuple[object, Conversation] | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.close()
        self.stop()

    def get(self, side: str, plan: LaunchPlan) -> RunningServer:
        """Return the running server of a side, started if need be.

        Raises `ServingError` where it does not start, `UserError` without a vLLM.
        """
        for name, launch in ((side, plan), *([] if self._expected is None else [self._expected])):
            if name not in self._ready:
                if self._ready and not self._both_fit(launch):
                    if name != side:
                        break
                    self.stop()
                log = self._setting.store.root / "logs" / f"{self._setting.recipe.name}-{name}.log"
                self._ready[name] = cache(self._running.enter_context(self._launch(name, launch, log)))
        self._expected = None
        return self._ready[side]()

    def expect(self, side: str, plan: LaunchPlan) -> None:
        """Announce the server that will be needed next; the next `get` starts it too, where there is room for both."""
        self._expected = side, plan

    def _both_fit(self, plan: LaunchPlan) -> bool:
        """Return whether free memory holds two launches of this size; the running one may not have taken its share.

        Always False on GPUs.
        """
        if hardware(self._setting.recipe.target.hardware).kind != "cpu" or plan.memory is None:
            return False
        left = memory_left()
        free = free_bytes("cpu") if left is None else min(free_bytes("cpu"), left)
        return 2 * (plan.memory.total + _PROGRAM) <= free

    @contextmanager
    def fresh(self, side: str, plan: LaunchPlan, log: Path) -> Iterator[RunningServer]:
        """Yield a new server of ``side`` with its log in ``log``, after stopping all others; it stops with the block.

        Raises `ServingError` where it does not start.
        """
        self._lm_eval = None
        self._asking.close()
        self.stop()
        with self._launch(side, plan, log) as ready:
            yield ready()

    def lm_eval(self, env: Mapping[str, str], secrets: Collection[str]) -> tuple[Conversation, Path]:
        """Return a conversation with lm-eval, and its log.

        Stages with the same ``env`` and ``secrets`` share one process.
        """
        how = (dict(env), tuple(secrets))
        log = self._setting.store.root / "logs" / f"{self._setting.recipe.name}-lm-eval.log"
        if self._lm_eval is None or self._lm_eval[0] != how:
            self._asking.close()
            log.unlink(missing_ok=True)
            self._progress.say(f"starting lm-eval, log in {log}")
            argv = [sys.executable, "-P", "-m", "quantmint.eval.harness_child"]
            talk = self._asking.enter_context(conversation(argv, log, what="lm-eval", env=env, secrets=secrets))
            self._lm_eval = how, talk
        return self._lm_eval[1], log

    def _launch(self, side: str, plan: LaunchPlan, log: Path) -> AbstractContextManager[Callable[[], RunningServer]]:
        setting = self._setting
        log.parent.mkdir(parents=True, exist_ok=True)
        give_back_memory()
        context: AbstractContextManager[Callable[[], RunningServer]]
        if setting.recipe.evaluation.runtime == "reference":
            title, context = "the reference runtime", _started_reference(setting, plan, log)
        elif setting.endpoints is not None:
            self._progress.say(f"asking {setting.endpoints.dialect.title} with the {side} at its endpoint")
            return _attached(setting.endpoints, side, plan, self._progress)
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
            context = launcher.launch_in_background(
                plan, log, startup_timeout=STARTUP_TIMEOUT, notify=self._progress.say
            )
        self._progress.say(f"starting {title} with the {side}, log in {log}")
        return context

    def stop(self) -> None:
        """Stop all running model servers, but not lm-eval."""
        self._ready.clear()
        self._running.close()


@contextmanager
def _attached(
    endpoints: Endpoints, side: str, plan: LaunchPlan, progress: Progress
) -> Iterator[Callable[[], RunningServer]]:
    """Yield a function that returns the running server of a side. Raises `ServingError` where it serves another model.

    The server is not stopped.
    """
    server = EndpointLauncher(endpoints.addresses[side], endpoints.dialect).attach(plan, progress.say)
    yield lambda: server


@dataclass(frozen=True, slots=True)
class ReferenceServer(RunningServer):
    """The reference runtime in a process of its own, which is asked over a socket instead of HTTP."""

    talk: Conversation | None = None

    def ask(self, what: str, **given: Any) -> Any:
        """Send the message ``what`` with arguments to `pipeline.serving.reference`, and return its reply."""
        assert self.talk is not None  # noqa: S101 - a field after those with defaults
        return self.talk.ask({what: given})


@contextmanager
def _started_reference(setting: Setting, plan: LaunchPlan, log: Path) -> Iterator[Callable[[], RunningServer]]:
    """Start the reference runtime with the checkpoint of a `reference_plan`; it ends with the block.

    lm-eval runs in it. It is online, with our Hub token, where a task's data is on the Hub; it never has the token
    together with code of the model's folder or templates of a foreign suite. Raises `StageError` with the end of its
    log where it does not start.
    """
    local = all(setting.suite.files(task) for task in setting.suite.tasks)
    env = {**reference_environment(plan), **({"HF_HUB_OFFLINE": "1"} if local else {})}
    suite = setting.suite
    foreign = suite.own_tasks != TASKS_FOLDER and any(suite.files(task) for task in suite.tasks)
    secrets = () if local or foreign or setting.recipe.trust_remote_code else ("HF_TOKEN",)
    log.unlink(missing_ok=True)
    began = time.monotonic()
    command = reference_command(plan, setting.device.partition(",")[0])
    with conversation(command, log, what="the reference runtime", env=env, secrets=secrets) as talk:
        server = ReferenceServer("model", "a socket", log, time.monotonic() - began, talk=talk)
        yield lambda: server


def over_nodes(setting: Setting, vllm: VllmEnvironment, plan: LaunchPlan) -> ClusterLauncher:
    """Return the launcher for a plan over several nodes, on the cluster of `Setting.spread`.

    Raises `UserError` where the run is not spread over machines.
    """
    if setting.spread is None:
        raise UserError(
            f"the launch is over {plan.layout.nodes} nodes, and this run is on one.",
            hint="`--on ray` runs on a Ray cluster's nodes; `quantmint submit` takes a run to several.",
        )
    return ClusterLauncher(vllm.executable, setting.spread.cluster())
