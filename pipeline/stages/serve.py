"""serve: one side on vLLM or the reference runtime, from a launch plan; what its start says about the checkpoint.

The servers of a run are kept while stages ask the same one, beside each other where there is room, and always stopped.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from quantmint.calibration.container import memory_left
from quantmint.calibration.room import free_bytes
from quantmint.eval.measurements import Side
from quantmint.eval.suites import TASKS_FOLDER
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.base.machine import Device, versions
from quantmint.pipeline.base.processes import Conversation, conversation
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.quantize.device import give_back_memory
from quantmint.pipeline.quantize.digest import template_digest, tokenizer_digest
from quantmint.pipeline.recipe.modules import assigned
from quantmint.pipeline.recipe.schema import Quantization, Recipe
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.host.detect import device_here
from quantmint.pipeline.serving.knobs.table import NEWEST_READ
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.target import Target, parse_target, profile
from quantmint.pipeline.serving.running.launchers import (
    ClusterLauncher,
    LocalLauncher,
    reference_command,
    reference_environment,
    reference_plan,
)
from quantmint.pipeline.serving.running.log import LogScan, broken_promises, checkpoint_quantization, scan_log
from quantmint.pipeline.serving.running.server import Server
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import Job, Output, Setting, SideStage, write_json
from quantmint.pipeline.store.toolchain import ENVIRONMENT, environment_here, environment_of

STARTUP_TIMEOUT = 3600.0
"""Seconds that a server may take to load; a 405B model from a network disk takes most of it."""
_PROGRAM = 2 << 30
"""Bytes that the two processes of a vLLM take beside its model and its cache."""


class Servers:
    """Starts a server when a stage first needs it and stops it when another is needed or the run ends.

    Two models side by side may not fit. Where they do, which is on a CPU with memory to spare, both sides start beside
    each other, most of which each does on one core, and stay. What measures the machine has a `fresh` one to itself.
    """

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._running = ExitStack()
        self._ready: dict[str, Callable[[], Server]] = {}
        self._expected: tuple[str, LaunchPlan] | None = None
        self._asking = ExitStack()
        self._lm_eval: tuple[object, Conversation] | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._asking.close()
        self.stop()

    def get(self, side: str, plan: LaunchPlan) -> Server:
        """The running server of a side, started if need be. Raises `ServingError` where it does not start."""
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
        """A server that will be asked for soon: it is started beside the next one, where there is room for both."""
        self._expected = side, plan

    def _both_fit(self, plan: LaunchPlan) -> bool:
        """Whether this launch fits beside the one that is there, which may not have taken its own share yet."""
        if hardware(self._setting.recipe.target.hardware).kind != "cpu" or plan.memory is None:
            return False
        left = memory_left()
        free = free_bytes("cpu") if left is None else min(free_bytes("cpu"), left)
        return 2 * (plan.memory.total + _PROGRAM) <= free

    @contextmanager
    def fresh(self, side: str, plan: LaunchPlan, log: Path) -> Iterator[Server]:
        """A server of this block's own, logging to ``log``; what ran before is stopped. Raises `ServingError`."""
        self._lm_eval = None
        self._asking.close()
        self.stop()
        with self._launch(side, plan, log) as ready:
            yield ready()

    def lm_eval(self, env: Mapping[str, str], secrets: Collection[str]) -> tuple[Conversation, Path]:
        """lm-eval and its log: as it imports for long, one is kept for all stages that want the same variables."""
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

    def _launch(self, side: str, plan: LaunchPlan, log: Path) -> AbstractContextManager[Callable[[], Server]]:
        setting = self._setting
        log.parent.mkdir(parents=True, exist_ok=True)
        give_back_memory()
        context: AbstractContextManager[Callable[[], Server]]
        if setting.recipe.evaluation.runtime == "reference":
            title, context = "the reference runtime", _started_reference(setting, plan, log)
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
            context = launcher.starting(plan, log, startup_timeout=STARTUP_TIMEOUT, say=self._progress.say)
        self._progress.say(f"starting {title} with the {side}, log in {log}")
        return context

    def stop(self) -> None:
        """Stop what runs."""
        self._ready.clear()
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
def _started_reference(setting: Setting, plan: LaunchPlan, log: Path) -> Iterator[Callable[[], Server]]:
    """The reference runtime with the checkpoint of a `reference_plan`, loaded; it has ended at the exit.

    lm-eval runs in it. So it has the Hub, and its token, where a task's data is there, but never together with code of
    the model's folder or templates of a suite of somebody's own. Raises `StageError` with the end of its log where it
    does not come about.
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
    """What starts a launch over several nodes: on the cluster that the run is spread over. `UserError` without one."""
    if setting.spread is None:
        raise UserError(
            f"the launch is over {plan.layout.nodes} nodes, and this run is on one.",
            hint="`--on ray` runs on a Ray cluster's nodes; `quantmint submit` takes a run to several.",
        )
    return ClusterLauncher(vllm.executable, setting.spread.cluster())


def keep_log(server: Server, destination: Path) -> LogScan:
    """Copy what the server has logged so far; returns what it says."""
    assert server.log_path is not None  # noqa: S101 - a run starts its servers itself
    text = server.log_path.read_text(encoding="utf-8", errors="replace")
    destination.write_text(text, encoding="utf-8")
    return scan_log(text)


def held_to(plan: LaunchPlan, scan: LogScan, model: Path) -> LogScan:
    """What a log says, with what the plan promised for the checkpoint in ``model`` and the server does not keep."""
    broken = broken_promises(plan, scan, quantization=checkpoint_quantization(model))
    return replace(scan, findings=(*scan.findings, *broken))


SIDES: tuple[Side, ...] = ("baseline", "candidate")
LAUNCH = "launch.json"
SERVER_LOG = "server.log"


class ServeStage(SideStage):
    """Starts the server; the stages after it ask the same one as long as the run goes on."""

    family = "serve"
    version = 2

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """The candidate comes from `quantize`, the baseline from `source`."""
        return {"model": model_key(self.side)}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The launch, without where the model lies, and the container."""
        launch = launch_plan(setting, self.side, Path("MODEL")).canonical()
        kernels = setting.loaded.tunableop
        if kernels is not None:  # what TunableOp found, and not where that lies
            digest = hashlib.sha256(kernels.read_bytes()).hexdigest()
            env = {name: digest if value == str(kernels) else value for name, value in launch["env"].items()}
            launch = {**launch, "env": env}
        runtime = setting.recipe.evaluation.runtime
        return {
            "launch": launch,
            "hardware": setting.recipe.target.hardware,
            "runtime": runtime,
            **image_settings(setting),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Versions of what answers."""
        return runtime_tools(setting)

    def run(self, job: Job) -> Output:
        """Start the server and keep what its log says."""
        folder = model_folder(job.inputs["model"])
        plan = launch_plan(job.setting, self.side, folder)
        server = job.servers.get(self.side, plan)
        scan = held_to(plan, keep_log(server, job.path / SERVER_LOG), folder)
        for finding in scan.findings:
            job.progress.warn(f"{finding.why}: {finding.line}")
        launch = launch_plan(job.setting, self.side, Path("MODEL")).to_json()
        answering = runtime_of(server, scan, job.path / SERVER_LOG)
        template = template_digest(folder, plan.option("--chat-template"))
        write_json(
            job.path / LAUNCH,
            {
                "plan": launch,
                "log": {**asdict(scan), "findings": [finding._asdict() for finding in scan.findings]},
                **answering,
                "template": template,
                "tokenizer": tokenizer_digest(folder),
                "image": job.setting.image,
            },
        )
        vllm = None if job.setting.recipe.evaluation.runtime == "reference" else job.setting.vllm
        environment = environment_here(runtime_tools(job.setting)) if vllm is None else environment_of(vllm.python)
        write_json(job.path / ENVIRONMENT, environment.to_json())
        tokens = f", room for {scan.kv_tokens:,} tokens of KV cache" if scan.kv_tokens is not None else ""
        return Output(
            result={"faults": faults(scan), "started_seconds": round(server.started_seconds, 1)},
            summary=f"ready after {server.started_seconds:.0f} s{tokens}",
        )


def faults(scan: LogScan) -> list[str]:
    """The lines of a server's log that void its measurements, each with what it means."""
    return [f"{finding.why}: {finding.line}" for finding in scan.invalid]


def model_key(side: Side) -> str:
    """The stage whose entry holds a side's model."""
    return "quantize" if side == "candidate" else "source"


def image_settings(setting: Setting) -> dict[str, str]:
    """The container in a fingerprint; nothing outside one."""
    return {} if setting.image is None else {"image": setting.image}


def launch_plan(setting: Setting, side: Side, model: Path) -> LaunchPlan:
    """The launch of a side on what answers: the layout that the 16-bit side needs, and the same knobs for both.

    They differ by the type of the KV cache. Of several independent servers one is planned for and measured.
    """
    recipe = setting.recipe
    if recipe.evaluation.runtime == "reference":
        return reference_plan(
            model,
            served_model_name="model",
            max_model_len=recipe.target.max_model_len,
            kv_cache_dtype="auto" if side == "baseline" else recipe.quantization.kv_cache,
            trust_remote_code=recipe.trust_remote_code,
        )
    tunableop = setting.loaded.tunableop
    plan = partial(
        planning(recipe, setting.workload, parse_target(f"{recipe.target.hardware}:{recipe.target.gpus}")),
        model,
        vllm_version=NEWEST_READ if setting.vllm is None else setting.vllm.version,
        purpose="measure",
        cpu_threads=os.cpu_count() or 1,
        tunableop=None if tunableop is None else str(tunableop),
    )
    source = facts_of_config(setting.config)
    baseline = plan(source, kv_cache_dtype="auto")
    if side == "baseline":
        return baseline
    made = facts_made(source, recipe.quantization)
    return plan(made, kv_cache_dtype=recipe.quantization.kv_cache, layout=baseline.layout)


def planning(recipe: Recipe, workload: Workload, target: Target) -> Callable[..., LaunchPlan]:
    """`plan_serving` with all that a recipe says of a launch on ``target``; what a call says goes first."""
    return partial(
        plan_serving,
        target=target,
        profile=profile(
            recipe.serve.profile or workload.profile,
            concurrency=max(recipe.evaluation.concurrency, workload.in_flight),
            max_model_len=recipe.target.max_model_len,
        ),
        overrides=recipe.serve.overrides,
        speculative=recipe.serve.speculative,
        trust_remote_code=recipe.trust_remote_code,
        packed=recipe.serve.pack,
        arguments=recipe.serve.arguments,
    )


def facts_made(source: ModelFacts, section: Quantization) -> ModelFacts:
    """The facts of what a recipe makes of a model, before it is made."""
    scheme_of = partial(assigned, section)
    return as_quantized(
        source, scheme=section.scheme, kv_cache=section.kv_cache, format=section.format, assigned=scheme_of
    )


def runtime_tools(setting: Setting) -> dict[str, str]:
    """Versions of what answers questions: of vLLM, or of the libraries of the reference runtime."""
    if setting.recipe.evaluation.runtime == "reference":
        return versions("transformers", "torch")
    return vllm_version(setting)


def vllm_version(setting: Setting) -> dict[str, str]:
    """The serving environment's version, "absent" where there is none."""
    return {"vllm": "absent" if setting.vllm is None else setting.vllm.version}


_LOGGED_DEVICE = re.compile(r"\bdevice_config=(\w+)")


def runtime_of(server: Server, scan: LogScan, log: Path) -> dict[str, Any]:
    """Ask a server, and read the ``log`` that was kept of it. Raises `ServingError` where it does not answer.

    ``runtime`` are the words that a verdict names, ``version`` what both sides must have in common, ``kv_cache_dtype``
    is that of the cache that is there ("auto", "fp8", ...), None where nobody says.
    """
    if isinstance(server, ReferenceServer):
        return dict(server.ask("facts"))
    version, device = f"vllm {server.version()}", asdict(vllm_device(log))
    return {"runtime": version, "version": version, "device": device, "kv_cache_dtype": scan.kv_cache_dtype}


def vllm_device(log: Path) -> Device:
    """The device that a vLLM of this machine runs on, by its ``log``: a machine with GPUs may run its CPU build."""
    logged = _LOGGED_DEVICE.search(log.read_text(encoding="utf-8", errors="replace"))
    return device_here(logged[1] if logged else "cuda")
