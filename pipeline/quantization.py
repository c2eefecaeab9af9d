"""One checkpoint without a recipe: the stages up to the inspection, in a store that lies in the result's own folder.

    job = open_job(recipe_of(options), "meta-llama/Llama-3.1-8B@main", Path("llama-fp8"))
    make(job, reporter)

The stages are those of a recipe, so the bytes are a recipe's; what is left out is everything that needs a server.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import suites, workloads
from pipeline.destination import Destination, State
from pipeline.device import resolve_devices
from pipeline.errors import UserError
from pipeline.formats.checkpoint import Checkpoint, read_json
from pipeline.formats.layout import Choice
from pipeline.locks import Lock
from pipeline.model.select import select
from pipeline.model.structure import Structure
from pipeline.planning import plan_stages, stages_of
from pipeline.prediction import Prediction, predict
from pipeline.preflight import model_for, require_memory
from pipeline.progress import Reporter
from pipeline.recipe.checks import check, check_run
from pipeline.recipe.load import LoadedRecipe
from pipeline.recipe.options import option_of, refuse_options
from pipeline.runner import Outcome, run_plan
from pipeline.stage import Planned, Setting, SourceIdentity, Stage
from pipeline.stages.calibrate import pinned_set
from pipeline.stages.inspect import INSPECTION
from pipeline.stages.located import LocatedSource
from pipeline.stages.quantize import CHECKPOINT, ERRORS
from pipeline.stages.source import config_folder, fetch, identify
from pipeline.store.disk import disk_errors, free_bytes
from pipeline.store.tree import Store

_REPO = re.compile(r"(?P<repo>[^/@\s]+/[^/@\s]+)(@(?P<revision>\S+))?")


@dataclass(frozen=True, slots=True)
class QuantizationJob:
    """What is to be made, from what, and where: nothing is written before `make`."""

    setting: Setting
    source: LocatedSource
    destination: Destination
    plan: tuple[Planned, ...]

    @property
    def calibrated(self) -> bool:
        """Whether ranges are measured."""
        return any(planned.key == "calibrate" for planned in self.plan)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a job will make, from the model's headers; ``schemes`` counts modules."""

    source: Checkpoint
    structure: Structure
    choice: Choice
    schemes: Mapping[str, int]
    prediction: Prediction


def source_section(text: str) -> dict[str, str]:
    """What SRC names: a folder that is here, else ``org/name[@revision]`` of the Hub."""
    if text and Path(text).is_dir():
        return {"folder": text}
    found = _REPO.fullmatch(text)
    if found is None or text.startswith((".", "~")):
        raise UserError(
            f"SRC: found {text!r}, expected a folder with a model, or organisation/name[@revision] of the Hub."
        )
    return {"repo": found["repo"], "revision": found["revision"] or "main"}


def open_job(
    loaded: LoadedRecipe, out: Path, *, device: str = "auto", inspect: bool = True, to_run: bool = True
) -> QuantizationJob:
    """Resolve the source and refuse what can be refused from small files.

    ``to_run`` fetches a repository whole; a plan is content with its config.json. Raises `UserError`.
    """
    refuse_options([*check(loaded), *(check_run(loaded) if to_run else [])])
    source = loaded.recipe.source
    if loaded.source_folder is not None:
        folder = loaded.source_folder
        identity = SourceIdentity(folder, "by its marks")
    else:
        identity = identify(source, None, out)
        folder = config_folder(identity)
    config = read_json(folder / "config.json")
    refuse_options(check(loaded, config=config))
    setting = Setting(
        loaded=loaded,
        store=Store(Destination(out, {}).work),
        source=identity,
        config=config,
        suite=suites.load(loaded.recipe.evaluation.suite),
        workload=workloads.load(loaded.recipe.target.workload),
        vllm=None,
        device=device,
        home=Path.cwd(),
    )
    located = LocatedSource(folder)
    plan = plan_stages(_stages(located, setting, inspect=inspect), setting)
    return QuantizationJob(setting, located, Destination(out, _payload(plan)), plan)


def _stages(source: LocatedSource, setting: Setting, *, inspect: bool) -> Sequence[Stage]:
    wanted = {"calibrate", "quantize", *(("inspect",) if inspect else ())}
    return source, *(stage for stage in stages_of(setting) if stage.key in wanted)


def _payload(plan: Sequence[Planned]) -> dict[str, Any]:
    """What shapes the checkpoint's bytes, by stage; the inspection only looks at them."""
    return {
        planned.key: {name: value for name, value in planned.payload.items() if name not in ("stage", "inputs")}
        for planned in plan
        if planned.key != "inspect"
    }


def look_ahead(job: QuantizationJob) -> Outlook:
    """Ask the model what its modules are, and what becomes of each.

    Raises `UserError` for names that match nothing, and for modules that vLLM fuses and that do not agree.
    """
    setting = job.setting
    source, structure = model_for(setting, job.source.folder)
    refuse_options(check(setting.loaded, config=setting.config, linear=structure.linear))
    try:
        choice = select(structure, setting.recipe.quantization)
    except UserError as error:
        field, _, message = error.message.partition(": ")
        raise UserError(f"{option_of(tuple(field.split('.')))}: {message}", hint=error.hint) from None
    schemes = Counter(choice.schemes.values())
    prediction = predict(source, structure, setting.recipe)
    return Outlook(source, structure, choice, dict(schemes.most_common()), prediction)


def make(job: QuantizationJob, reporter: Reporter) -> bool:
    """Make the checkpoint, or go on with it; False where it was finished before.

    Raises `QuantmintError`: what is done stays, and the same call goes on from there.
    """
    destination = job.destination
    state = destination.state()
    if state is State.FINISHED:
        destination.tidy()
        return False
    expected = None if destination.moving else _require_means(job, reporter, fresh=state is State.FRESH)
    made_here = not destination.folder.exists()
    with disk_errors(destination.folder):
        destination.folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(destination.lock)
    with disk_errors(destination.folder):
        lock.acquire(on_wait=lambda holder: reporter.say(f"waiting for {holder}"))
    try:
        if destination.state() is State.FINISHED:  # by the process that we waited for
            return False
        if expected is not None and not destination.moving:
            destination.begin()
            outcome = run_plan(job.plan, job.setting, reporter)
            _deliver(job, outcome, expected, resumed=state is State.UNFINISHED)
        destination.move()
        return True
    finally:
        lock.release()
        if made_here and not any(destination.folder.iterdir()):
            destination.folder.rmdir()


def _require_means(job: QuantizationJob, reporter: Reporter, *, fresh: bool) -> Outlook:
    """Refuse what could not come to its end, before the first byte is written."""
    if job.setting.spread is None:
        resolve_devices(job.setting.device)
    if job.calibrated and job.setting.recipe.calibration is not None:
        pinned_set(job.setting.recipe.calibration)
    if job.setting.source.repo is not None:
        fetch(job.setting.source, with_code=job.setting.recipe.trust_remote_code, progress=reporter)
    reporter.say("holding the options against the model")
    expected = look_ahead(job)
    needed, free = expected.prediction.checkpoint, free_bytes(job.destination.folder)
    if fresh and needed > free:  # later, the stage knows what of it is there already
        raise UserError(
            f"{job.destination.folder}: {needed / 1e9:,.2f} GB are needed, {free / 1e9:,.2f} GB are free.",
            hint="Free space, or choose a folder on another disk.",
        )
    if fresh and job.calibrated and job.setting.spread is None:
        require_memory(expected.prediction, job.setting)
    return expected


def _deliver(job: QuantizationJob, outcome: Outcome, expected: Outlook, *, resumed: bool) -> None:
    entries = {step.planned.key: step.entry for step in outcome.steps}
    proofs = {INSPECTION: entries.get("inspect"), ERRORS: entries["quantize"]}
    evidence = {name: entry.path / name for name, entry in proofs.items() if entry and name in entry.record.files}
    files = {
        name.removeprefix(f"{CHECKPOINT}/"): fact
        for name, fact in entries["quantize"].record.files.items()
        if name.startswith(f"{CHECKPOINT}/")
    }
    facts = {
        "source_bytes": expected.prediction.source,
        "bytes": sum(fact.size for name, fact in files.items() if name.endswith(".safetensors")),
        "schemes": dict(expected.schemes),
        "kept": len(expected.choice.kept),
        "seconds": {key: entry.record.duration_s for key, entry in entries.items()},
        "engine_seconds": entries["quantize"].record.result.get("seconds"),
        "resumed": resumed,
        "inspection": _verdict(evidence.get(INSPECTION)),
        "worst": _worst(evidence),
        "files": {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in files.items()},
    }
    job.destination.deliver(entries["quantize"].path / CHECKPOINT, facts, evidence)


def _verdict(inspection: Path | None) -> str | None:
    """What the inspection said; None where there was none."""
    return None if inspection is None else str(json.loads(inspection.read_text(encoding="utf-8"))["verdict"])


def _worst(evidence: Mapping[str, Path]) -> dict[str, Any] | None:
    """The layer that lost most: by the inspection, which compares whole weights, else by the engine's own count."""
    found: list[tuple[float, str]] = []
    if INSPECTION in evidence:
        layers = json.loads(evidence[INSPECTION].read_text(encoding="utf-8"))["layers"]
        found = [(layer["sqnr_db"], layer["module"]) for layer in layers if layer["sqnr_db"] is not None]
    elif ERRORS in evidence:
        errors = json.loads(evidence[ERRORS].read_text(encoding="utf-8"))
        found = [(error["sqnr_db"], module) for module, error in errors.items() if error["sqnr_db"] is not None]
    return {"module": min(found)[1], "sqnr_db": min(found)[0]} if found else None
