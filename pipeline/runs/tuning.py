"""Run one `quantmint tune`: find the subject, hold the store's lock during its sweep, write its report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantmint.eval import workloads
from quantmint.eval.errors import DefinitionError
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import Host, cores
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.quantize.digest import file_digests, folder_digest
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.serving import Serve
from quantmint.pipeline.runs.search import run_search
from quantmint.pipeline.runs.serving import ServedModel, fetched, find_model, profile_for, target_for, vllm_for
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import Profile, ServingTarget
from quantmint.pipeline.serving.tuning.aiter import Gemms, tune_gemms
from quantmint.pipeline.serving.tuning.report import TuningReport, report, write
from quantmint.pipeline.serving.tuning.runner import run_sweep
from quantmint.pipeline.serving.tuning.space import BASE, TUNABLEOP, Axis, SweepTrial, default_axes
from quantmint.pipeline.serving.tuning.subject import STAGE, TUNED_FILE, TuningSubject, machine_facts, planner
from quantmint.pipeline.serving.tuning.sweep import KnobSweep, screening_trials
from quantmint.pipeline.serving.tuning.trials import Budget, OutOfTimeError
from quantmint.pipeline.serving.tuning.tunableop import FOLDER, search_kernels
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.store.gc import RunLog
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store

LOCK = "tuning.lock"


@dataclass(frozen=True, slots=True)
class KernelTuning:
    """Matrix kernels to tune before a sweep: all by TunableOp, and ``products`` by AITER's tuner (None: none)."""

    tunableop: bool = False
    products: Gemms | None = None


def tune(
    sweep: KnobSweep,
    store: Store,
    seconds: float | None,
    reporter: Reporter,
    out: Path,
    *,
    existing: Mapping[str, Any],
    kernels: KernelTuning,
    redo: bool,
) -> tuple[TuningReport, Path]:
    """Run a sweep to its end or for ``seconds``; write `tuning.json` and `tuning.html` to ``out``.

    Returns the report and the page's path. ``existing`` is the recipe's own serve section; ``redo`` measures again what
    the store has. One sweep at a time works with a store: a second one waits, and then reads what the first one
    measured.
    """
    with disk_errors(store.root):
        store.root.mkdir(parents=True, exist_ok=True)
    lock = Lock(store.root / LOCK)
    lock.acquire(on_wait=lambda who: reporter.warn(f"another sweep is measuring, this one waits for it: {who}"))
    try:
        budget = Budget(seconds)  # what came before, such as waiting for another sweep, was not measuring
        if kernels.tunableop:
            _tuned_first(sweep, store, budget, reporter, out, redo=redo)
        if kernels.products is not None:
            with suppress(OutOfTimeError):  # the sweep says what it has no time for
                axis = tune_gemms(kernels.products, sweep.subject, store, budget, reporter, out, redo=redo)
                sweep.design = replace(sweep.design, axes=(axis, *sweep.design.axes))
        # The collector of garbage spares what the newest runs name: these trials too.
        log = RunLog.start(
            store.root, f"tune {sweep.subject.name}", sweep.id, _entries(sweep, screening_trials(sweep.design))
        )
        code = 5
        try:
            run_sweep(sweep, store, budget, reporter, redo=redo)
            tuned = report(
                sweep,
                budget,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                existing=dict(existing),
                tunableop=os.fspath((out / FOLDER / TUNED_FILE).absolute()) if kernels.tunableop else None,
            )
            with disk_errors(out):
                page = write(out, tuned)
            code = 0 if tuned["best"] is not None else 1
        finally:
            everything = dict.fromkeys([*screening_trials(sweep.design), *sweep.results])
            log.run = replace(log.run, plan=tuple(_entries(sweep, everything)))
            log.finish(None, code)
    finally:
        lock.release()
    return tuned, page


def _tuned_first(sweep: KnobSweep, store: Store, budget: Budget, reporter: Reporter, out: Path, *, redo: bool) -> None:
    """Tune matrix kernels by TunableOp and set them in the sweep.

    If the budget ends first, warn and drop TunableOp's axis.
    """
    try:
        tuned = search_kernels(sweep.subject, store, budget, reporter, out, redo=redo)
        sweep.subject = replace(sweep.subject, tuned=tuned)
    except OutOfTimeError:
        reporter.warn("the budget ended during the TunableOp pass, which does not count")
        axes = tuple(axis for axis in sweep.design.axes if axis.knob != TUNABLEOP)
        sweep.design = replace(sweep.design, axes=axes)
        sweep.not_tried.append(((TUNABLEOP, "1"),))


def _entries(sweep: KnobSweep, trials: Iterable[SweepTrial]) -> list[tuple[str, str]]:
    entries = []
    for trial in trials:
        with suppress(UserError):
            entries.append((STAGE, sweep.subject.fingerprint(trial)))
    return entries


_UNKNOWN = "0" * 64


@dataclass(frozen=True, slots=True)
class OpenedSubject:
    """A tuning subject, with the model facts that decide which knobs apply, and the recipe's own serve section."""

    subject: TuningSubject
    facts: ModelFacts
    arch: str
    existing: Mapping[str, Any]

    def default_axes(self) -> tuple[Axis, ...]:
        """Return the knobs that are swept by default, with their values."""
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
            cores=cores(),
            concurrency=max(cell.in_flight for cell in self.subject.cells),
        )


@dataclass(frozen=True, slots=True)
class SubjectRequest:
    """The model to tune as named on the command line (``text``), and the options of the command.

    Without ``measuring`` nothing is made, and the target may be another machine and the vLLM another version than those
    here. With ``tunableop`` the base plan leaves out the kernels that an earlier sweep tuned.
    """

    text: str
    target: str | None = None
    workload: str | None = None
    vllm: str | None = None
    vllm_version: str | None = None
    measuring: bool = True
    tunableop: bool = False


def open_subject(request: SubjectRequest, store: Store, reporter: Reporter) -> OpenedSubject:
    """Return the model to tune, ready to serve if it is measured: a recipe's missing checkpoint is made and inspected.

    Raises `UserError` for an unknown model or workload, and for a target of several nodes.
    """
    version, environment = vllm_for(request.vllm, request.vllm_version, elsewhere=not request.measuring)
    executable = request.vllm if environment is not None else None
    served = find_model(request.text, store=store.root, vllm=executable)
    served.require_launcher("local")
    if request.measuring:
        served = _present(served, request.text, request.vllm, store, reporter)
    recipe = served.recipe
    place = target_for(request.target, recipe)
    if place.nodes > 1:
        raise UserError(
            f"{place}: a sweep starts its servers on this machine, the target has {place.nodes}",
            hint="tune one node: what it finds of batches, graphs and kernels holds for each",
        )
    load, load_profile = _workload(request.workload, recipe, place)
    serve = Serve() if recipe is None else recipe.serve
    kernels = None if request.tunableop else served.tunableop
    model = Path(served.model)
    serving = ServingRequest(
        model=model,
        facts=served.facts,
        target=place,
        profile=replace(load_profile, longest=load.longest),
        vllm_version=version,
        purpose="tune",  # what `serve` starts but for prefix caching: cells of one length get the same prompts
        speculative=served.speculative(serve),
        overrides=serve.overrides,
        servers_per_gpu=serve.pack,
        arguments=serve.arguments,
        tunableop=None if kernels is None else str(kernels),
        trust_remote_code=recipe is not None and recipe.trust_remote_code,
        cpu_threads=cores(),
    )
    machine = machine_facts(place, Host()) if request.measuring else {"target": str(place)}
    subject = TuningSubject(
        name=served.name,
        model=model,
        digest=folder_digest(file_digests(model, store.root)) if request.measuring else _UNKNOWN,
        target=str(place),
        kind=place.accelerator.kind,
        workload=load,
        vllm=environment or VllmEnvironment(Path("vllm"), version),
        machine=MappingProxyType(machine),
        planner=planner(serving),
    )
    existing = serve.model_dump(mode="json", exclude_defaults=True)
    return OpenedSubject(subject, served.facts, place.accelerator.arch or "", MappingProxyType(existing))


def _workload(name: str | None, recipe: Recipe | None, place: ServingTarget) -> tuple[workloads.Workload, Profile]:
    """Return the workload ``name``, else the recipe's or the usual one of the target, and its load profile.

    Raises `UserError` for an unknown workload.
    """
    usual = "tiny" if place.accelerator.kind == "cpu" else "throughput"
    try:
        load = workloads.load(name or (usual if recipe is None else recipe.target.workload))
    except DefinitionError as error:
        raise UserError(str(error)) from error
    return load, profile_for(name if recipe else name or usual, recipe, concurrency=None, max_model_len=None)


def _present(served: ServedModel, text: str, vllm: str | None, store: Store, reporter: Reporter) -> ServedModel:
    """Return the model with its weights on this machine: downloaded, or made by the recipe's stages up to `inspect`."""
    if served.recipe is not None and served.missing is not None:
        setting = open_setting(text, store=store, vllm=vllm, to_run=True)
        run_search(setting, reporter, until="inspect")
        served = find_model(text, store=store.root, vllm=vllm)
    with_code = served.recipe is not None and served.recipe.trust_remote_code
    return fetched(served, with_code=with_code, progress=reporter)
