"""One checkpoint without a recipe's file: an anonymous recipe, run up to its inspection, then moved into a folder.

The runner, the stages and the store are those of every recipe; the store lies in ``OUT/.quantmint``. When all is made
and found sound, the files move up one by one, ``config.json`` last: before that no program takes the folder for a
model. What was made from what stays with the checkpoint, in ``OUT/quantmint``.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from quantmint.calibration.durable import fsync
from quantmint.pipeline.base.canonical import ABSENT, difference, fingerprint
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import process_age
from quantmint.pipeline.base.progress import Reporter
from quantmint.pipeline.quantize.engines.stream.plan import ShardPlan
from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, read_json
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.faults import option_of, refuse
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.recipe.quantization import AUTO
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.preflight import require_means
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.search import as_written, measured, stand_in
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.checks import check
from quantmint.pipeline.stages.inspect import INSPECTION
from quantmint.pipeline.stages.quantize import CHECKPOINT, ERRORS, OVERRIDES, checkpoint_files
from quantmint.pipeline.stages.setting import Setting
from quantmint.pipeline.stages.sizes import Prediction, model_for, planned_shards, predict
from quantmint.pipeline.stages.source import config_folder, fetch, repository
from quantmint.pipeline.stages.stage import Planned
from quantmint.pipeline.store.disk import disk_errors, write_atomic
from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store

_WORK: Final = ".quantmint"
_EVIDENCE: Final = "quantmint"
_JOB: Final = "job.json"
_LAST: Final = "config.json"


@dataclass(frozen=True, slots=True)
class QuantizationJob:
    """A checkpoint to make without a recipe file: its setting, its planned stages, and the folder to write.

    Nothing is written before `make_checkpoint`.
    """

    setting: Setting
    plan: tuple[Planned, ...]
    out: Path

    @property
    def payload(self) -> dict[str, Any]:
        """Return what determines the checkpoint's bytes, by stage key, for its fingerprint; the inspection is left out.

        With `scheme: auto` it is what the schemes are chosen by, so that it is the same before and after the
        measurement.
        """
        written = self.setting if self.setting.chosen is None else as_written(self.setting)
        plan = self.plan if written is self.setting else build_plan(written)
        budget = written.recipe.quantization.model_dump(mode="json")
        return {
            **{
                planned.key: {name: value for name, value in planned.payload.items() if name not in ("stage", "inputs")}
                for planned in plan
                if planned.key != "inspect"
            },
            **({"quantize": {"settings": budget}} if written.recipe.quantization.scheme == AUTO else {}),
        }

    @property
    def record(self) -> dict[str, Any]:
        """The content of the finished checkpoint's job.json."""
        return read_json(self.out / _EVIDENCE / _JOB)

    @property
    def begun(self) -> bool:
        """Whether an earlier call began to make the checkpoint."""
        return (self.out / _WORK).is_dir()

    @property
    def moving(self) -> bool:
        """Whether all files are complete, and only their renames into the folder are missing."""
        return (self.out / _WORK / "final").is_dir()

    @property
    def finished(self) -> bool:
        """Whether the folder holds the finished checkpoint of this job.

        Raises `UserError` for a folder with anything else: another job's checkpoint, changed files, or foreign files.
        """
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"OUT: found the file {self.out}, expected a folder.")
        if (self.out / _EVIDENCE / _JOB).is_file() and ((self.out / _LAST).is_file() or self.moving):
            self._require_same()
            return not self.moving
        foreign = sorted(path.name for path in self.out.glob("*") if not path.name.startswith(_WORK))
        if foreign and not self.begun:
            raise UserError(
                f"OUT: found {foreign[0]} in {self.out}, expected an empty folder or none.",
                hint="What is there is never overwritten: choose another folder, or empty this one.",
            )
        return False

    def _require_same(self) -> None:
        """Raise `UserError` for a folder that another job filled, or whose files are not those that it wrote."""
        record, payload = self.record, self.payload
        if record["fingerprint"] != fingerprint(payload):
            changes = difference(record["payload"], json.loads(json.dumps(payload)))
            lines = [f"{change.path.removeprefix('$.')}: {_shown(change.old)} there, {_shown(change.new)} now"
                    for change in changes]  # fmt: skip
            raise UserError(
                f"OUT: found the checkpoint of another job in {self.out}:\n    " + "\n    ".join(lines[:6]),
                hint="Two jobs are never mixed: choose another folder, or remove this one.",
            )
        for name, fact in record["files"].items():
            copies = [path for path in (self.out / name, self.out / _WORK / "final" / name) if path.is_file()]
            if not copies or copies[0].stat().st_size != fact["size"]:
                raise UserError(
                    f"OUT: {self.out / name} is not what this job wrote, which had {fact['size']:,} bytes.",
                    hint="Remove the folder to make it again.",
                )


def _shown(side: object) -> str:
    return "nothing" if side is ABSENT else json.dumps(side)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The checkpoint that a job will make, by the model's headers; ``schemes`` counts modules by scheme.

    ``plans`` are the layouts of its files, none for an engine that lays them out itself.
    """

    source: Checkpoint
    structure: Structure
    schemes: Mapping[str, int]
    prediction: Prediction
    plans: tuple[ShardPlan, ...]


def source_section(text: str) -> dict[str, str]:
    """Return the recipe's source section for MODEL: a local folder, else ``org/name[@revision]`` of the Hub.

    Raises `UserError` for any other text.
    """
    if text and Path(text).is_dir():
        return {"folder": text}
    section = repository(text)
    if section is None:
        raise UserError(
            f"MODEL: found {text!r}, expected a folder with a model, or organisation/name[@revision] of the Hub."
        )
    return {"repo": str(section.repo), "revision": str(section.revision)}


def open_job(
    loaded: LoadedRecipe, out: Path, *, device: str = "auto", inspect: bool = True, to_run: bool = True
) -> QuantizationJob:
    """Return the job for ``out``, with its source resolved. Without ``inspect`` the checkpoint is not inspected.

    ``to_run`` checks the recipe against this machine's CPU. Raises `UserError` for what small files show to be
    impossible.
    """
    try:
        (out / _WORK).exists()
    except OSError as error:  # a name that no file system takes
        raise UserError(f"OUT: {str(out)[:60]}... cannot be a folder: {error.strerror}") from None
    setting = stand_in(open_setting(loaded, store=Store(out / _WORK), device=device, to_run=to_run, proven=False))
    return QuantizationJob(setting, build_plan(setting, "inspect" if inspect else "quantize"), out)


def look_ahead(job: QuantizationJob) -> Outlook:
    """Return the schemes of the model's modules and the predicted sizes, from the model's headers.

    Raises `UserError` for names that match nothing, and for fused modules that have different schemes.
    """
    setting = job.setting
    source, structure = model_for(setting, config_folder(setting.source))
    refuse(check(setting.loaded, config=setting.config, linear={**structure.linear, **structure.head}, judged=False))
    try:
        choice = select(structure, setting.recipe.quantization)
    except UserError as error:
        field, _, message = error.message.partition(": ")
        raise UserError(f"{option_of(tuple(field.split('.')))}: {message}", hint=error.hint) from None
    schemes = dict(Counter(choice.schemes.values()).most_common())
    plans = planned_shards(source, structure, setting.recipe)
    return Outlook(source, structure, schemes, predict(source, structure, setting.recipe, plans), plans)


def _without_plans(expected: Outlook) -> Outlook:
    """Return the outlook without the layouts, whose memory a run needs for the engine's own."""
    return replace(expected, plans=())


def make_checkpoint(job: QuantizationJob, reporter: Reporter) -> bool:
    """Make the checkpoint or resume it; return False where an earlier call or another process had finished it.

    Recorded times begin with the start of the process. Raises `QuantmintError`; finished work stays, and the same call
    resumes there.
    """
    if job.finished:
        shutil.rmtree(job.out / _WORK, ignore_errors=True)
        return False
    if not job.moving:
        if job.setting.source.repo is not None:
            fetch(job.setting.source, with_code=job.setting.recipe.trust_remote_code, progress=reporter)
        reporter.say("reading the model's structure")
        expected = _without_plans(look_ahead(job))
        require_means(job.plan, job.setting, prediction=expected.prediction)
        start = process_age()
    with disk_errors(job.out):
        job.out.mkdir(parents=True, exist_ok=True)
        lock = Lock(job.out / f"{_WORK}.lock")
        lock.acquire(on_wait=lambda holder: reporter.say(f"waiting for {holder}"))
    try:
        if job.finished:  # by the process that we waited for
            return False
        if not job.moving:
            resumed = job.begun
            if job.setting.chosen is not None:
                setting = measured(as_written(job.setting), reporter)
                job = replace(job, setting=setting, plan=build_plan(setting, job.plan[-1].key))
                expected = _without_plans(look_ahead(job))
            _deliver(job, run_plan(job.plan, job.setting, reporter), expected, start=start, resumed=resumed)
        with disk_errors(job.out):
            _move(job.out)
        return True
    finally:
        lock.release()


def _deliver(job: QuantizationJob, outcome: RunOutcome, expected: Outlook, *, start: float, resumed: bool) -> None:
    """Write the evidence into the job's folder, and move the checkpoint out of the store, ready for `_move`.

    ``start`` is the process's age in seconds when the work began.
    """
    entries = {step.planned.key: step.entry for step in outcome.steps}
    quantized, inspected = entries["quantize"], entries.get("inspect")
    proofs = [entry.path / name for entry, name in ((inspected, INSPECTION), (quantized, ERRORS)) if entry is not None]
    evidence = {path.name: read_json(path) for path in proofs if path.is_file()}
    files = checkpoint_files(quantized)
    facts = {
        "source_bytes": expected.prediction.source,
        "bytes": sum(fact.size for name, fact in files.items() if name.endswith(".safetensors")),
        "schemes": expected.schemes,
        "kept": expected.prediction.kept,
        "seconds": _seconds({step.planned.key: step.entry for step in outcome.steps if not step.cached}, start),
        **({"auto": quantized.record.result["auto"]} if "auto" in quantized.record.result else {}),
        "engine_seconds": quantized.record.result.get("seconds"),
        "resumed": resumed,
        "inspection": None if inspected is None else evidence[INSPECTION]["verdict"],
        "worst": _worst(evidence),
        "exact": sum(sqnr is None for sqnr, _ in _errors(evidence)),
        "files": {name: {"size": fact.size, "sha256": fact.sha256} for name, fact in files.items()},
    }
    evidence[_JOB] = {"fingerprint": fingerprint(job.payload), "payload": job.payload, **facts}
    with disk_errors(job.out):
        (job.out / _EVIDENCE).mkdir(exist_ok=True)
        for name, value in evidence.items():
            path = job.out / _EVIDENCE / name
            data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
            write_atomic(path, data, temporary=path.with_name(f"{name}.partial"))
        if (quantized.path / OVERRIDES).is_file():
            shutil.copyfile(quantized.path / OVERRIDES, job.out / _EVIDENCE / OVERRIDES)
        (quantized.path / CHECKPOINT).rename(job.out / _WORK / "final")
        fsync(job.out / _WORK)


def _seconds(entries: Mapping[str, Entry], start: float) -> dict[str, float]:
    """Return seconds by part: "start", "sensitivity", "calibrate", "work", "flush" (waiting for the disk) and "proof".

    ``entries`` are those that this process made, by stage key; ``start`` is the seconds before its work began. Parts of
    zero seconds are left out.
    """
    durations = {key: entry.record.duration_s for key, entry in entries.items()}
    engine: Any = (entries["quantize"].record.result.get("seconds") if "quantize" in entries else None) or {}
    flush = engine.get("durable", 0.0) - engine.get("written", 0.0)
    parts = {
        "start": start,
        "sensitivity": durations.get("sensitivity", 0.0),
        "calibrate": durations.get("calibrate", 0.0),
        "work": durations.get("quantize", 0.0) - flush,
        "flush": flush,
        "proof": durations.get("inspect", 0.0),
    }
    return {name: round(value, 2) for name, value in parts.items() if value}


def _move(out: Path) -> None:
    """Rename the finished files into ``out``, ``config.json`` last; a later call finishes an interrupted one."""
    for path in sorted((out / _WORK / "final").iterdir(), key=lambda path: (path.name == _LAST, path.name)):
        if path.name == _LAST:
            fsync(out)
        path.rename(out / path.name)
    fsync(out)
    shutil.rmtree(out / _WORK)


def _errors(evidence: Mapping[str, Any]) -> list[tuple[float | None, str]]:
    """Return (SQNR in dB, module) of each module, None for a module without an error.

    ``evidence`` are JSON files by name: the inspection's figures count, which compare whole weights, else the engine's.
    """
    if INSPECTION in evidence:
        return [(layer["sqnr_db"], layer["module"]) for layer in evidence[INSPECTION]["layers"]]
    return [(error["sqnr_db"], module) for module, error in evidence.get(ERRORS, {}).items()]


def _worst(evidence: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return "module" and "sqnr_db" of the module with the least SQNR; None where no module has an error."""
    known_errors = [(sqnr, module) for sqnr, module in _errors(evidence) if sqnr is not None]
    return {"module": min(known_errors)[1], "sqnr_db": min(known_errors)[0]} if known_errors else None
