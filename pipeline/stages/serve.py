"""serve: one side on vLLM or the reference runtime, from a launch plan; what its start says about the checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from quantmint.eval.measurements import Side
from quantmint.eval.workloads import Workload
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import needs
from quantmint.pipeline.base.machine import Device, versions
from quantmint.pipeline.base.schemes import has_mx_activations
from quantmint.pipeline.quantize.digest import template_digest, tokenizer_digest
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.modules import assigned
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.host.detect import local_device
from quantmint.pipeline.serving.knobs.overrides import LAYOUT
from quantmint.pipeline.serving.knobs.table import NEWEST_READ
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config
from quantmint.pipeline.serving.plan import LaunchPlan, ParallelLayout
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import ServingTarget, parse_target, profile
from quantmint.pipeline.serving.reference.launch import reference_plan
from quantmint.pipeline.serving.running.dialect import SGLANG, VLLM, dialect_of
from quantmint.pipeline.serving.running.endpoint import is_local
from quantmint.pipeline.serving.running.log import LogScan, checkpoint_quantization, plan_deviations, scan_log
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.serving.sglang import sglang_plan
from quantmint.pipeline.stages.draft import draft_digest, draft_model
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.servers import ReferenceServer, over_nodes
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.source import model_folder
from quantmint.pipeline.stages.stage import MODEL_MODULES, Check, Job, Output, SideStage, write_json
from quantmint.pipeline.store.toolchain import ENVIRONMENT, environment_here, environment_of


def keep_log(server: RunningServer, destination: Path) -> LogScan:
    """Copy the server's log so far to ``destination``, and return its scan; a server at an endpoint has none."""
    log = server.log_path
    text = "" if log is None else log.read_text(encoding="utf-8", errors="replace")
    destination.write_text(text, encoding="utf-8")
    return scan_log(text)


def held_to(plan: LaunchPlan, scan: LogScan, model: Path) -> LogScan:
    """Return the scan with a further finding for each promise of the plan that the log contradicts.

    ``model`` is the checkpoint's folder.
    """
    broken = plan_deviations(plan, scan, quantization=checkpoint_quantization(model))
    return replace(scan, findings=(*scan.findings, *broken))


SIDES: tuple[Side, ...] = ("baseline", "candidate")
LAUNCH = "launch.json"
SERVER_LOG = "server.log"
_EMULATION = {"amd-quark": "quark"}
"""What a distribution that vLLM needs beside it is imported as."""
_ABSENT = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if not u.find_spec(n)]))"
_ANSWER_S = 60
_PLACEHOLDER = Path("MODEL")
"""Name of the checkpoint in a launch that is recorded: where it lies tells nothing of it."""


class ServeStage(SideStage):
    """Start a side's server; later stages use the same server while it runs."""

    family = "serve"
    version = 2
    asks_server = True

    def imports(self, setting: Setting) -> Iterable[tuple[str, str]]:
        """Return (extra, module) pairs of the runtime's imports in this environment."""
        return runtime_modules(setting)

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_server`, and for the candidate `_require_vllm_packages`."""
        return (require_server,) if self.side == "baseline" else (require_server, _require_vllm_packages)

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of the side's start; a candidate on a CPU is taken to start beside the baseline."""
        return estimate.start if self.side == "baseline" else estimate.restart

    def inputs(self, setting: Setting) -> Mapping[str, str]:
        """Return the stage key of the side's `model`, `quantize` or `source`, and of the candidate's draft."""
        has_draft = self.side == "candidate" and setting.recipe.draft is not None
        return {"model": model_key(self.side), **({"draft": "draft"} if has_draft else {})}

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the launch plan without the model's path, the target hardware, the runtime and the container.

        A file of tuned kernels counts by its SHA-256.
        """
        launch = launch_plan(setting, self.side, Path("MODEL")).canonical()
        kernels = setting.loaded.tunableop
        if kernels is not None:  # what TunableOp found, and not where that lies
            digest = hashlib.sha256(kernels.read_bytes()).hexdigest()
            env = {name: digest if value == str(kernels) else value for name, value in launch["env"].items()}
            launch = {**launch, "env": env}
        return {
            "launch": launch,
            "hardware": setting.recipe.target.hardware,
            "runtime": setting.recipe.answered_by,
            **image_settings(setting),
            **({} if setting.recipe.draft is None else {"draft": draft_digest(setting)}),
            **({} if setting.endpoints is None else {"server": list(setting.endpoints.settings[self.side])}),
        }

    def tools(self, setting: Setting) -> Mapping[str, str]:
        """Return the versions of vLLM, or of the libraries that the reference runtime answers with, by name."""
        return runtime_tools(setting)

    def run(self, job: Job) -> Output:
        """Start the server, and record its plan, its log's findings, device, chat template and tokenizer."""
        folder = model_folder(job.inputs["model"])
        plan = launch_plan(job.setting, self.side, folder)
        server = job.servers.get(self.side, plan)
        scan = held_to(plan, keep_log(server, job.path / SERVER_LOG), folder)
        for finding in scan.findings:
            job.progress.warn(f"{finding.why}: {finding.line}")
        launch = launch_plan(job.setting, self.side, Path("MODEL")).to_json()
        launch["argv"] += server.dialect.arguments(server)
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
        vllm = job.setting.vllm if job.setting.recipe.answered_by == "vllm" else None
        environment = environment_here(runtime_tools(job.setting)) if vllm is None else environment_of(vllm.python)
        write_json(job.path / ENVIRONMENT, environment.to_json())
        tokens = f", room for {scan.kv_tokens:,} tokens of KV cache" if scan.kv_tokens is not None else ""
        return Output(
            result={"faults": faults(scan), "started_seconds": round(server.started_seconds, 1)},
            summary=f"ready after {server.started_seconds:.0f} s{tokens}",
        )


def runtime_modules(setting: Setting) -> Sequence[tuple[str, str]]:
    """Return (extra, module) pairs of the runtime's imports in this environment; none for vLLM, which has its own."""
    return (*MODEL_MODULES, ("evaluate", "accelerate")) if setting.recipe.evaluation.runtime == "reference" else ()


def require_server(setting: Setting) -> None:
    """Raise `UserError` where the runtime that answers is not there, or vLLM's launch needs nodes that are not."""
    if setting.recipe.evaluation.runtime == "reference":
        return
    if dialect_of(setting.recipe.serve.runtime) is not VLLM:
        require_endpoints(setting.loaded, "local" if setting.endpoints is None else "endpoint")
        return
    if setting.vllm is None:
        raise UserError(
            "no vLLM was found to serve with, which this recipe needs.",
            hint="`make serving` builds one for a CPU; else set QUANTMINT_VLLM, or stop earlier with --until inspect.",
        )
    launch = launch_plan(setting, "baseline", Path("MODEL"))
    if launch.layout.nodes > 1:
        over_nodes(setting, setting.vllm, launch).require(launch)


def require_endpoints(loaded: LoadedRecipe, launcher: str) -> None:
    """Raise `RecipeError` where the recipe's runtime is not one that ``launcher`` starts, with what works."""
    dialect = dialect_of(loaded.recipe.serve.runtime)
    if dialect is VLLM or launcher == "endpoint":
        return
    fault = f"found {dialect.runtime} with --launcher {launcher}, expected --launcher endpoint"
    works = "--endpoint baseline=http://HOST:PORT --endpoint candidate=http://HOST:PORT"
    why = f"quantmint starts no {dialect.title}, and asks servers that run already ({works})"
    refuse([loaded.fault(("serve", "runtime"), f"{fault}: {why}")])


def _require_vllm_packages(setting: Setting) -> None:
    """Raise `UserError` where vLLM's environment lacks packages that it needs for the candidate's scheme."""
    if setting.vllm is None:
        return
    quantization = setting.recipe.quantization
    named = needs(setting.recipe.target.hardware, quantization.schemes, quantization.kv_cache, quantization.format)
    distributions = {_EMULATION.get(name, name): name for name in named}
    absent = [distributions[module] for module in _absent_in(setting.vllm.python, distributions)]
    if absent:
        install = f"{setting.vllm.python} -m pip install {' '.join(absent)}"
        raise UserError(f"vLLM's environment lacks {', '.join(absent)}, which this run needs there.", hint=install)


def _absent_in(python: Path, modules: Collection[str]) -> list[str]:
    """Return the ``modules`` that the interpreter ``python`` cannot find; empty where it gives no answer."""
    if not modules:
        return []
    command = [str(python), "-P", "-c", _ABSENT, *modules]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
        return [str(name) for name in json.loads(answer.stdout)]
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        return []


def faults(scan: LogScan) -> list[str]:
    """Return the log lines that void a server's measurements, each after its explanation."""
    return [f"{finding.why}: {finding.line}" for finding in scan.invalid]


def model_key(side: Side) -> str:
    """Return the key of the stage whose entry holds a side's model."""
    return "quantize" if side == "candidate" else "source"


def image_settings(setting: Setting) -> dict[str, str]:
    """Return the container image as part of a fingerprint's settings; empty without one."""
    return {} if setting.image is None else {"image": setting.image}


def launch_plan(setting: Setting, side: Side, model: Path) -> LaunchPlan:
    """Return the plan of a side's launch of ``model``, on vLLM or the reference runtime.

    Both sides have the layout that the 16-bit side needs and the same knobs, and differ by the type of the KV cache. A
    draft is in 16 bit for the baseline and quantized for the candidate; ``Path("MODEL")`` stands for the checkpoint in
    what is recorded, and "DRAFT" then for the draft. Of several independent servers one is planned for and measured.
    Raises `UserError` where the model cannot be served.
    """
    recipe = setting.recipe
    arguments: dict[str, Any] = {
        "served_model_name": "model",
        "max_model_len": recipe.target.max_model_len,
        "kv_cache_dtype": "auto" if side == "baseline" else recipe.quantization.kv_cache,
        "trust_remote_code": recipe.trust_remote_code,
    }
    if recipe.evaluation.runtime == "reference":
        mx_scales = recipe.mx_scales if has_mx_activations(recipe.quantization.schemes) else "even"
        return reference_plan(model, **arguments, mx_scales=mx_scales)
    if dialect_of(recipe.serve.runtime) is SGLANG:
        return sglang_plan(model, **arguments)
    tunableop = setting.loaded.tunableop
    source = facts_of_config(setting.config)
    request = replace(
        serving_request(
            recipe,
            setting.workload,
            parse_target(f"{recipe.target.hardware}:{recipe.target.gpus}"),
            model=model,
            facts=source,
            vllm_version=NEWEST_READ if setting.vllm is None else setting.vllm.version,
        ),
        purpose="measure",
        kv_cache_dtype="auto",
        cpu_threads=os.cpu_count() or 1,
        tunableop=None if tunableop is None else str(tunableop),
    )
    if recipe.draft is not None and request.speculative is not None:
        place = draft_model(setting, side) if model != _PLACEHOLDER else Path("DRAFT")
        request = replace(request, speculative=request.speculative.model_copy(update={"model": str(place)}))
    baseline = plan_serving(request)
    if side == "baseline":
        return baseline
    candidate = replace(
        request,
        facts=facts_made(source, recipe.quantization),
        kv_cache_dtype=recipe.quantization.kv_cache,
        layout=baseline.layout,
    )
    return plan_serving(candidate)


def single_plan(setting: Setting, model: Path) -> LaunchPlan:
    """Return the plan of the candidate on a single accelerator. Raises `UserError` where it does not fit there."""
    recipe = setting.recipe
    if recipe.evaluation.runtime == "reference":
        return launch_plan(setting, "candidate", model)
    request = serving_request(
        recipe,
        setting.workload,
        parse_target(f"{recipe.target.hardware}:1"),
        model=model,
        facts=facts_made(facts_of_config(setting.config), recipe.quantization),
        vllm_version=NEWEST_READ if setting.vllm is None else setting.vllm.version,
    )
    knobs = {name: value for name, value in request.overrides.items() if name not in LAYOUT}
    return plan_serving(
        replace(
            request,
            purpose="measure",
            kv_cache_dtype=recipe.quantization.kv_cache,
            cpu_threads=os.cpu_count() or 1,
            layout=ParallelLayout(),
            overrides=knobs,
            servers_per_gpu=1,
        )
    )


def serving_request(
    recipe: Recipe,
    workload: Workload,
    target: ServingTarget,
    *,
    model: str | Path,
    facts: ModelFacts,
    vllm_version: str,
) -> ServingRequest:
    """Return the request to plan a launch of ``model`` on ``target`` with the recipe's serving settings."""
    return ServingRequest(
        model=model,
        facts=facts,
        target=target,
        profile=profile(
            recipe.serve.profile or workload.profile,
            concurrency=max(recipe.evaluation.concurrency, workload.in_flight),
            max_model_len=recipe.target.max_model_len,
        ),
        overrides=recipe.serve.overrides,
        speculative=recipe.serve.speculative,
        trust_remote_code=recipe.trust_remote_code,
        servers_per_gpu=recipe.serve.pack,
        arguments=recipe.serve.arguments,
        vllm_version=vllm_version,
    )


def facts_made(source: ModelFacts, section: Quantization) -> ModelFacts:
    """Return the facts of the checkpoint that a quantization section will make of the model ``source``."""
    scheme_of = partial(assigned, section)
    return as_quantized(
        source, scheme=section.scheme, kv_cache=section.kv_cache, format=section.format, assigned=scheme_of
    )


def runtime_tools(setting: Setting) -> dict[str, str]:
    """Return the versions that answers depend on: of the server, or of the reference runtime's transformers and torch.

    Without endpoints the version of another server than vLLM is "absent".
    """
    if setting.recipe.evaluation.runtime == "reference":
        return versions("transformers", "torch")
    if dialect_of(setting.recipe.serve.runtime) is VLLM:
        return vllm_version(setting)
    return {setting.recipe.serve.runtime: "absent" if setting.endpoints is None else setting.endpoints.version}


def vllm_version(setting: Setting) -> dict[str, str]:
    """Return the version of the serving environment under "vllm", "absent" without one."""
    return {"vllm": "absent" if setting.vllm is None else setting.vllm.version}


_ELSEWHERE = Device("unknown", "a machine that its endpoint does not name")
_LOGGED_DEVICE = re.compile(r"\bdevice_config=(\w+)")


def runtime_of(server: RunningServer, scan: LogScan, log: Path) -> dict[str, Any]:
    """Return facts about a running server: "runtime", "version", "device" and "kv_cache_dtype".

    ``runtime`` is the text that a verdict names, ``version`` must be the same for both sides, ``kv_cache_dtype`` is
    that of the running cache ("auto", "fp8", ...) or None where the log does not say. ``log`` is the copy of the
    server's log; a server at an endpoint tells the same over HTTP. Raises `ServingError` where it does not answer.
    """
    if isinstance(server, ReferenceServer):
        return dict(server.ask("facts"))
    if server.log_path is None:
        dialect, version = server.dialect, f"{server.dialect.runtime} {server.version()}"
        device = asdict(local_device(dialect.device(server)) if is_local(server.base_url) else _ELSEWHERE)
        return {
            "runtime": version,
            "version": version,
            "device": device,
            "kv_cache_dtype": dialect.kv_cache_dtype(server),
        }
    version, device = f"vllm {server.version()}", asdict(vllm_device(log))
    return {"runtime": version, "version": version, "device": device, "kv_cache_dtype": scan.kv_cache_dtype}


def vllm_device(log: Path) -> Device:
    """Return the device that a local vLLM runs on, by its ``log``; a machine with GPUs may run its CPU build."""
    logged = _LOGGED_DEVICE.search(log.read_text(encoding="utf-8", errors="replace"))
    return local_device(logged[1] if logged else "cuda")
