"""publish: a checkpoint that passed, with the evidence, to where others find it."""

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
    """Send a release to its destinations: the only stage with an effect outside the store."""

    family = "publish"
    version = 2
    needs = ("quantize",)
    releases = True

    def reads(self, stage: Stage) -> bool:
        """Return whether the stage's files are part of the release."""
        return stage.evidence or stage.releases

    def checks(self, setting: Setting) -> Sequence[Check]:
        """Return the check of the right to publish."""
        return (require_admission,)

    def disk(self, setting: Setting, size: Prediction, begun: int) -> Mapping[str, int]:
        """Return the bytes of a copy in a folder."""
        return {} if setting.recipe.publish.folder is None else {"published copy": size.checkpoint}

    def seconds(self, estimate: Estimate) -> float:
        """Return the time of writing a copy; an upload is not forecast."""
        return float(1.0 + estimate.size.checkpoint / estimate.rates.sync)

    def settings(self, setting: Setting) -> Mapping[str, object]:
        """The places. Who signs is a matter of the signature's own stage."""
        section = setting.recipe.publish.model_dump(mode="json", exclude={"sign", "licence", "folder"})
        folder = published_folder(setting.recipe, setting.home)
        return {**section, "folder": None if folder is None else str(folder.parent), "name": setting.recipe.name}

    def run(self, job: Job) -> Output:
        """Judge once more from the record, ask every place whether it can, publish to one after the other."""
        section, progress = job.setting.recipe.publish, job.progress
        require_proof(job.inputs["quantize"], job.inputs["gate"])
        release = package.release(job.inputs)
        places = recipe_destinations(job.setting.recipe, job.setting.home)
        for place in places:
            place.preflight(release)
        published: list[Publication] = []
        for place in places:
            progress.say(f"{shown_path(place.address)}: {release.tag}")
            published.append(place.publish(release, candidate=section.to == "candidate", progress=progress))
        for place, one in zip(places, published, strict=True):
            where = shown_path(place.address)
            if section.keep is not None:
                _retain(place, section.keep, progress)
            if section.to == "release" and not one.current:
                progress.warn(
                    f"{where}: {release.tag} is there, but readers get another release, which stays so; "
                    f"`quantmint release rollback {where} {release.tag}` gives them this one"
                )
        return Output(
            result={"tag": release.tag, "identity": release.identity, "targets": [asdict(one) for one in published]},
            summary=f"{release.tag} in {', '.join(shown_path(place.address) for place in places)}",
        )

    def intact(self, entry: Entry, setting: Setting) -> bool:
        """Whether the folder still holds this release; what lies elsewhere is not asked, for a run needs no network.

        Another release may be the current one: somebody went back to it. But one must be, unless this is a candidate.
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
    """Where a finished publication put its release, as it was then."""
    recorded: Any = entry.record.result["targets"]
    return [Publication(**one) for one in recorded]


def require_proof(quantize: Entry, gate: Entry) -> None:
    """The verdict must be PASS when judged again from the record, over exactly these bytes; raises `StageError`."""
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
    """Ask before hours of work what the publication asks again: rights and terms, as far as they are known by then.

    Raise `UserError` where a place of the recipe takes nothing, or the source's licence lets nothing go there.
    """
    for place in recipe_destinations(setting.recipe, setting.home):
        place.preflight(None)
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
    found = terms(metadata, texts, setting.recipe.publish.licence)
    for name in public:
        refused = refusal(found, name)
        if refused is not None:
            raise UserError(f"{name} could not be published: {refused}")


def _names(source: SourceIdentity) -> list[str] | None:
    """Names at the top of the source; None where the Hub cannot be asked."""
    if source.folder is not None:
        return [path.name for path in source.folder.iterdir()]
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(str(source.repo), revision=source.digest))
    except hub_errors():
        return None


def _retain(place: Destination, keep: int, progress: Progress) -> None:
    """Remove what is beyond the newest releases; the new one is out, and a failure here must not hide that."""
    try:
        for one in place.prune(keep=keep, dry_run=False, progress=progress):
            progress.say(f"{shown_path(place.address)}: {one.verb} {one.what}")
    except QuantmintError as error:
        progress.warn(
            f"{shown_path(place.address)}: published, but older releases were not removed: {error.message}; "
            f"`quantmint release prune {shown_path(place.address)} --keep {keep}` tries again"
        )
