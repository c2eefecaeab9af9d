"""From what a person typed to what is tuned: the checkpoint made or found, the target, the load, the base plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eval import workloads
from eval.errors import DefinitionError
from pipeline.digest import file_digests, folder_digest
from pipeline.errors import UserError
from pipeline.launching.model import ServedModel, fetched, find_model
from pipeline.launching.request import target_for
from pipeline.progress import Reporter
from pipeline.recipe.schema import Recipe
from pipeline.serving.environment import find_vllm
from pipeline.serving.host.machine import Machine
from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.planning.profiles import profile
from pipeline.serving.planning.target import Target
from pipeline.store.tree import Store
from pipeline.tuning.axes import default_axes
from pipeline.tuning.base_plan import planner
from pipeline.tuning.machine import machine_facts
from pipeline.tuning.space import BASE, Axis
from pipeline.tuning.subject import Subject

_UNKNOWN = "0" * 64


@dataclass(frozen=True, slots=True)
class Opened:
    """A subject, with the facts that say which knobs apply, and the recipe's own serve section."""

    subject: Subject
    facts: ModelFacts
    arch: str
    existing: Mapping[str, Any]

    def default_axes(self) -> tuple[Axis, ...]:
        """What is swept where nobody names knobs."""
        layout = self.subject.plan(BASE).layout
        return default_axes(
            self.subject.kind,
            facts={
                "attention": self.facts.attention,
                "family": self.facts.family,
                "shared_experts": "yes" if self.facts.shared_experts else "no",
                "quantization": self.facts.quantization,
                "arch": self.arch,
                "tp": str(layout.tensor),
            },
            version=self.subject.vllm.version,
            cores=len(os.sched_getaffinity(0)),
            concurrency=max(cell.in_flight for cell in self.subject.cells),
        )


def _room(load: workloads.Workload, facts: ModelFacts) -> int:
    """Tokens that a request may have, where no recipe says it: the workload's, with a sixteenth to spare.

    Random prompts are text again before they are sent, and the server may count some tokens more than were drawn.
    """
    return max(load.longest, min(load.longest + max(16, load.longest // 16), facts.context))


def open_subject(
    text: str,
    *,
    target: str | None,
    workload: str | None,
    vllm: str | None,
    store: Store,
    reporter: Reporter,
    measuring: bool = True,
    tunableop: bool = False,
) -> Opened:
    """Find or make what is tuned. A recipe's checkpoint is made, through `inspect`, where there is none.

    Without ``measuring`` nothing is made, and this machine need not be the target. With ``tunableop`` the base plan
    does without the kernels that an earlier sweep left. Raises UserError for what is not there.
    """
    environment = find_vllm(vllm)
    found = find_model(text, store=store.root, vllm=vllm)
    if measuring:
        found = _present(found, text, vllm, store, reporter)
    recipe = found.recipe
    place = _one_node(target_for(target, recipe))
    load = _workload(workload, recipe, place)
    if recipe is not None and recipe.target.max_model_len < load.longest:
        raise UserError(
            f"the longest request of workload {load.name} has {load.longest} tokens, the recipe's max_model_len is "
            f"{recipe.target.max_model_len}",
            hint="name a smaller workload with --workload",
        )
    serve = None if recipe is None else recipe.serve
    kernels = None if tunableop else found.tunableop
    model = Path(found.model)
    subject = Subject(
        name=found.name,
        model=model,
        digest=folder_digest(file_digests(model, store.root)) if measuring else _UNKNOWN,
        target=str(place),
        kind=place.accelerator.kind,
        workload=load,
        vllm=environment,
        machine=MappingProxyType(machine_facts(place, Machine()) if measuring else {"target": str(place)}),
        planner=planner(
            model,
            found.facts,
            target=place,
            profile=profile(
                load.profile if serve is None or serve.profile is None else serve.profile,
                concurrency=load.in_flight,
                max_model_len=_room(load, found.facts) if recipe is None else recipe.target.max_model_len,
            ),
            vllm_version=environment.version,
            overrides={} if serve is None else serve.overrides,
            speculative=None if serve is None else serve.speculative,
            packed=1 if serve is None else serve.pack,
            arguments=() if serve is None else serve.arguments,
            tunableop=None if kernels is None else str(kernels),
            trust_remote_code=recipe is not None and recipe.trust_remote_code,
        ),
    )
    existing = {} if serve is None else serve.model_dump(mode="json", exclude_defaults=True)
    return Opened(subject, found.facts, place.accelerator.arch or "", MappingProxyType(existing))


def _present(found: ServedModel, text: str, vllm: str | None, store: Store, reporter: Reporter) -> ServedModel:
    """The same with its weights here: fetched, or made by the recipe's own stages."""
    if found.recipe is not None and found.missing is not None:
        from pipeline.planning import build_plan, cut
        from pipeline.runner import run_plan
        from pipeline.session import open_setting

        setting = open_setting(text, store=store, vllm=vllm, to_run=True)
        run_plan(cut(build_plan(setting), "inspect"), setting, reporter)
        found = find_model(text, store=store.root, vllm=vllm)
    with_code = found.recipe is not None and found.recipe.trust_remote_code
    return fetched(found, with_code=with_code, progress=reporter)


def _one_node(target: Target) -> Target:
    if target.nodes > 1:
        raise UserError(
            f"{target}: a sweep starts its servers on this machine, the target has {target.nodes}",
            hint="tune one node: what it finds of batches, graphs and kernels holds for each",
        )
    return target


def _workload(name: str | None, recipe: Recipe | None, target: Target) -> workloads.Workload:
    usual = "tiny" if target.accelerator.kind == "cpu" else "throughput"
    try:
        return workloads.load(name or (recipe.target.workload if recipe is not None else usual))
    except DefinitionError as error:
        raise UserError(str(error)) from error
