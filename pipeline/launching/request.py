"""What is to be served, where, for which load: everything that a launch plan is a function of.

request = Request(model, target, profile, version="0.33.0")
plan, processes = request.plan()
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval import workloads
from eval.errors import DefinitionError
from pipeline.errors import UserError
from pipeline.launching.model import ServedModel
from pipeline.recipe.faults import nearest
from pipeline.recipe.schema import Recipe, Speculative
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.planning.launch_request import KvDtype
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.processes import processes
from pipeline.serving.planning.target import Profile, Target, parse_target, profile, profiles


@dataclass(frozen=True, slots=True)
class Request:
    """One launch. ``version`` is of the vLLM that is planned for; ``hosts`` are addresses of the nodes, in order."""

    model: ServedModel
    target: Target
    profile: Profile
    version: str
    environment: VllmEnvironment | None = None
    overrides: Mapping[str, str | bool] = field(default_factory=dict)
    kv_cache_dtype: KvDtype | None = None
    speculative: Speculative | None = None
    tunableop: Path | None = None
    pack: int = 1
    arguments: Sequence[str] = ()
    served_model_name: str = "model"
    trust_remote_code: bool = False
    hosts: Sequence[str] = ()
    port: int = 8000

    def plan(self) -> tuple[LaunchPlan, tuple[Process, ...]]:
        """The plan with its processes. Raises `UserError` for what cannot be served there."""
        plan = plan_serving(
            self.model.model,
            self.model.facts,
            target=self.target,
            profile=self.profile,
            vllm_version=self.version,
            overrides=self.overrides,
            speculative=self.speculative,
            kv_cache_dtype=self.kv_cache_dtype,
            served_model_name=self.served_model_name,
            trust_remote_code=self.trust_remote_code,
            cpu_threads=os.cpu_count() or 1,
            packed=self.pack,
            tunableop=None if self.tunableop is None else str(self.tunableop),
            arguments=self.arguments,
        )
        if self.model.revision is not None:
            plan = replace(plan, argv=(*plan.argv, "--revision", self.model.revision))
        if self.model.missing is not None:
            plan = replace(plan, warnings=(f"only planned: {self.model.missing.message}", *plan.warnings))
        return plan, processes(plan, port=self.port, host_ips=self.hosts)


def target_for(text: str | None, recipe: Recipe | None) -> Target:
    """The target that is named, the recipe's, or (``auto``, and where nothing is said) this machine."""
    if text is None and recipe is not None:
        return parse_target(f"{recipe.target.hardware}:{recipe.target.gpus}")
    if text is None or text == "auto":
        from pipeline.machine import Machine
        from pipeline.serving.host.detect import detect

        return detect(Machine()).target
    return parse_target(text)


def profile_for(
    text: str | None, recipe: Recipe | None, *, concurrency: int | None, max_model_len: int | None
) -> Profile:
    """The profile that is named, directly or by a workload; else what the recipe is for, else throughput.

    A workload brings its largest concurrency, a recipe also its longest request. Numbers that are given go first.
    """
    if text is None and recipe is None:
        return profile("throughput", concurrency=concurrency, max_model_len=max_model_len)
    length = max_model_len if recipe is None else max_model_len or recipe.target.max_model_len
    if text in profiles():
        return profile(str(text), concurrency=concurrency, max_model_len=length)
    name = text if text is not None else recipe.target.workload if recipe is not None else ""
    if text is not None and text not in workloads.names() and not workloads.is_path(text):
        known = dict.fromkeys((*profiles(), *workloads.names()))
        near = nearest(text, known)
        raise UserError(
            f"--workload: found {text!r}, expected one of {', '.join(known)}"
            + (f" (did you mean {near!r}?)" if near else "")
        )
    try:
        load = workloads.load(name)
    except DefinitionError as error:
        raise UserError(str(error)) from error
    most = load.in_flight
    chosen = load.profile
    if recipe is not None and text is None:
        chosen = recipe.serve.profile or chosen
        most = max(most, recipe.evaluation.concurrency)
    return profile(chosen, concurrency=concurrency or most, max_model_len=length)
