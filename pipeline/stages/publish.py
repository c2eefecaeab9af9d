"""publish: send a checkpoint that passed, with its evidence, to its destinations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantmint.calibration.batches import hub_errors
from quantmint.eval import record
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import changes
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import QuantmintError, StageError, UserError, shown_path
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish.addresses import public_names, published_folder, recipe_destinations
from quantmint.pipeline.publish.destination import Destination, Publication
from quantmint.pipeline.publish.licences import TEXTS, refusal, terms
from quantmint.pipeline.publish.release import MANIFEST
from quantmint.pipeline.recipe.destinations import RELEASES
from quantmint.pipeline.stages import package
from quantmint.pipeline.stages.card import base_metadata
from quantmint.pipeline.stages.estimate import Estimate
from quantmint.pipeline.stages.gate import GATE, checkpoint_digest
from quantmint.pipeline.stages.setting import Setting, SourceIdentity
from quantmint.pipeline.stages.sizes import Prediction
from quantmint.pipeline.stages.stage import Check, Job, Output, Stage
from quantmint.pipeline.store.disk import sha256_of
from quantmint.pipeline.store.entries import Entry


class PublishStage(Stage):
    """Send a release to its destinations; no other stage has an effect outside the store."""

    family = "publish"
    version = 2
    needs = ("quantize",)
    releases = True

    def reads(self, stage: Stage) -> bool:
        """Return whether the stage's result is published with the release: evidence, the package or the signature."""
        return stage.evidence or stage.releases

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return `require_admission`."""
        return (require_admission,)

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes of the copy in the recipe's publish folder; empty without such a folder."""
        return {} if setting.recipe.publish.folder is None else {"published copy": size.checkpoint}

    def seconds(self, estimate: Estimate) -> float:
        """Return the seconds of writing a copy of the checkpoint; an upload is not forecast."""
        return float(1.0 + estimate.size.checkpoint / estimate.rates.sync)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """Return the recipe's destinations and name; signer and licence belong to other stages."""
        section = setting.recipe.publish.model_dump(mode="json", exclude={"sign", "licence", "folder"})
        folder = published_folder(setting.recipe, setting.home)
        return {**section, "folder": None if folder is None else str(folder.parent), "name": setting.recipe.name}

    def run(self, job: Job) -> Output:
        """Judge the record again, let every destination check the release, then publish to each.

        Older releases beyond the recipe's `keep` are removed. Raises `StageError` where the verdict is not PASS.
        """
        section, progress = job.setting.recipe.publish, job.progress
        require_proof(job.inputs["quantize"], job.inputs["gate"])
        release = package.release(job.inputs)
        destinations = recipe_destinations(job.setting.recipe, job.setting.home)
        for destination in destinations:
            destination.preflight(release)
        published: list[Publication] = []
        for destination in destinations:
            progress.say(f"{shown_path(destination.address)}: {release.tag}")
            published.append(destination.publish(release, candidate=section.to == "candidate", progress=progress))
        for destination, publication in zip(destinations, published, strict=True):
            where = shown_path(destination.address)
            if section.keep is not None:
                _retain(destination, section.keep, progress)
            if section.to == "release" and not publication.current:
                progress.warn(
                    f"{where}: {release.tag} is there, but readers get another release, which stays so; "
                    f"`quantmint release rollback {where} {release.tag}` gives them this one"
                )
        return Output(
            result={
                "tag": release.tag,
                "identity": release.identity,
                "targets": [asdict(publication) for publication in published],
            },
            summary=f"{release.tag} in {', '.join(shown_path(destination.address) for destination in destinations)}",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Return whether the publish folder still holds this release; other destinations would need a network.

        The current release may be another one, but there must be one, unless the recipe publishes candidates.
        """
        link = published_folder(setting.recipe, setting.home)
        if link is None:
            return True
        result = entry.record.result
        release = link.parent / RELEASES / link.name / str(result["tag"])
        shown = setting.recipe.publish.to == "candidate" or link.is_symlink()
        try:
            if not shown or sha256_of(release / MANIFEST) != result["identity"]:
                return False
            listed = json.loads((release / MANIFEST).read_bytes())["files"]
            return all((release / name).stat().st_size == file["size"] for name, file in listed.items())
        except OSError:
            return False


def published_in(entry: Entry) -> Sequence[Publication]:
    """Return the publications that a publish entry recorded, one for each destination."""
    recorded: Any = entry.record.result["targets"]
    return [Publication(**target) for target in recorded]


def require_proof(quantize: Entry, gate: Entry) -> None:
    """Raise `StageError` unless the gate's record, judged again, is a PASS on exactly this checkpoint.

    A record whose verdicts differ from those of its numbers is refused too.
    """
    try:
        recorded = record.read(gate.file(GATE))[1]
        report = record.rejudge(gate.file(GATE))
    except MeasurementError as error:
        raise StageError(f"the gate's record cannot be judged again: {error}") from error
    if report.verdict is not Verdict.PASS:
        raise StageError(f"the gate's record says {report.verdict.value}, only a PASS is published.")
    if report.artefact != checkpoint_digest(quantize):
        raise StageError("the gate judged another checkpoint than the one that would be published.")
    edited = changes(recorded, report)
    if edited:
        raise StageError(
            f"the gate's record is not what its numbers say. {edited[0]}",
            hint="`quantmint run --redo gate` judges them again.",
        )


def require_admission(setting: Setting) -> None:
    """Raise `UserError` where a destination would refuse the release, or the source's licence forbids publishing.

    It runs before hours of work, with what is known then; publication checks again. A licence that cannot be read is
    not refused.
    """
    for destination in recipe_destinations(setting.recipe, setting.home):
        destination.preflight(None)
    public = public_names(setting.recipe)
    if not public:
        return
    # A card that cannot be had now may be had later; without it, nothing is known and nothing is refused.
    unknown: list[str] = []
    metadata = base_metadata(setting.source, setting.source.folder or Path(), warn=unknown.append)
    names = _names(setting.source)
    if unknown or names is None:
        return
    texts = [name for name in names if any(fnmatchcase(name, pattern) for pattern in TEXTS)]
    known_terms = terms(metadata, texts, setting.recipe.publish.licence)
    for name in public:
        refused = refusal(known_terms, name)
        if refused is not None:
            raise UserError(f"{name} could not be published: {refused}")


def _names(source: SourceIdentity) -> list[str] | None:
    """Return the names at the top of a source folder, or of all files of a repository.

    None where the Hub cannot be asked.
    """
    if source.folder is not None:
        return [path.name for path in source.folder.iterdir()]
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(str(source.repo), revision=source.digest))
    except hub_errors():
        return None


def _retain(destination: Destination, keep: int, progress: Progress) -> None:
    """Remove releases beyond the newest ``keep``; a failure is only a warning, because the new release is published."""
    try:
        for operation in destination.prune(keep=keep, dry_run=False, progress=progress):
            progress.say(f"{shown_path(destination.address)}: {operation.verb} {operation.what}")
    except QuantmintError as error:
        progress.warn(
            f"{shown_path(destination.address)}: published, but older releases were not removed: {error.message}; "
            f"`quantmint release prune {shown_path(destination.address)} --keep {keep}` tries again"
        )
