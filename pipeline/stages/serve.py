"""serve: one side on vLLM or the reference runtime, from a launch plan; what its start says about the checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from eval.measurements import Side
from eval.workloads import Workload
from pipeline.base.machine import Device, versions
from pipeline.quantize.digest import template_digest, tokenizer_digest
from pipeline.recipe.modules import assigned
from pipeline.recipe.schema import Quantization, Recipe
from pipeline.serving.host.detect import device_here
from pipeline.serving.knobs.table import NEWEST_READ
from pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.target import Target, parse_target, profile
from pipeline.serving.running.launchers import reference_plan
from pipeline.serving.running.log import LogScan
from pipeline.serving.running.server import Server
from pipeline.stages.servers import ReferenceServer, held_to, keep_log
from pipeline.stages.source import model_folder
from pipeline.stages.stage import Job, Output, Setting, SideStage, write_json
from pipeline.store.toolchain import ENVIRONMENT, environment_here, environment_of

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
