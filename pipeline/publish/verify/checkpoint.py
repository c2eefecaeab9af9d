"""Checks of the recipe against the manifest, of the checkpoint's structure, and of the verdict against the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quantmint.eval.gate import changes
from quantmint.eval.report.history import history_notes
from quantmint.eval.report.numbers import NO_BREAK
from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import difference
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.release import DRAFT, RECIPE
from quantmint.pipeline.publish.verify import limits
from quantmint.pipeline.publish.verify.subject import ReleaseCheck, ReleaseUnderTest, conclude, failure, not_checked
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.layout import layout_of
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.draft import read_draft
from quantmint.pipeline.quantize.model.outcomes import SOURCE_SCHEMES
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.recipe.json_schema import faults_of
from quantmint.pipeline.recipe.quantization import Quantization
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.yaml_positions import parse


def check_recipe(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Check that the recipe loads, and that it agrees with the manifest, the stage quantize and config.json."""
    document = parse(subject.text(RECIPE), RECIPE)
    faults = [
        f"{RECIPE}: {change.path[2:]} is {change.new!r}, quantmint.json says {change.old!r}"
        for change in difference(subject.manifest.recipe, document.data)
    ]
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        reasons = [str(fault) for fault in faults_of(error, document)]
        if faults or subject.manifest.quantmint == __version__:
            return failure("recipe", *reasons, *faults)
        return not_checked("recipe", f"quantmint {subject.manifest.quantmint} wrote it, and here {reasons[0]}")
    section = recipe.quantization
    faults += [*_other_settings(subject), *_declared(subject, section)]
    return conclude(
        "recipe", faults, f"{section.scheme}, KV cache {section.kv_cache}, {section.format}: what quantmint.json says"
    )


def _other_settings(subject: ReleaseUnderTest) -> Iterator[str]:
    """Yield a sentence for each setting of the recipe that the stage quantize recorded with another value."""
    settings: Any = subject.manifest.stages["quantize"].payload["settings"]
    section: Any = subject.manifest.recipe["quantization"]
    if "scheme" not in settings:
        yield "quantmint.json does not say in which scheme the stage quantize worked"
    for name in sorted(section.keys() & settings.keys()):
        if difference(section[name], settings[name]):
            yield f"quantization.{name} is {section[name]!r}, the stage quantize was given {settings[name]!r:.60}"


def _declared(subject: ReleaseUnderTest, section: Quantization) -> Iterator[str]:
    """Yield a sentence for each declaration in the checkpoint's config.json that differs from the recipe."""
    subject.object("config.json")
    checkpoint = open_checkpoint(subject.folder)
    layout = layout_of(checkpoint.config)
    if layout.name != section.format:
        yield f"the recipe asks for the layout {section.format}, config.json has {layout.name}"
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors if name.endswith((".weight_scale", "_packed"))}
    claims = layout.claims(checkpoint.config["quantization_config"], sorted(modules))
    schemes = {scheme for scheme in claims.schemes.values() if scheme is not None}
    stored = SOURCE_SCHEMES if "source" in (section.mtp, section.keep) else frozenset()
    for scheme in sorted(schemes - section.schemes - stored - {section.predictor_scheme}):
        yield f"the recipe asks for {', '.join(sorted(section.schemes))}, config.json declares {scheme}"
    if claims.kv_cache != (section.kv_cache == "fp8"):
        declared = "an FP8 KV cache" if claims.kv_cache else "a KV cache in 16 bit"
        yield f"the recipe asks for the KV cache {section.kv_cache}, config.json declares {declared}"


def check_structure(subject: ReleaseUnderTest, source: Path | None = None) -> ReleaseCheck:
    """Check the checkpoint as `quantmint inspect` does, against the model ``source`` where it is known.

    The release's own code is never run. With a source the error of every weight is measured, and configuration,
    template and tokenizer must be the source's.
    """
    subject.object("config.json")
    checkpoint = open_checkpoint(subject.folder)
    try:
        structure = read_structure(subject.folder, checkpoint.tensors)
    except UserError:
        try:
            meta_model(subject.folder)
        except UserError as error:  # a model that cannot be built here proves nothing about the checkpoint
            return not_checked("structure", error.message)
        raise
    with subject.progress.bar(checkpoint.nbytes, "B") as advance:
        original = None if source is None else open_checkpoint(source)
        inspection = inspect_checkpoint(
            checkpoint,
            structure,
            source=original,
            source_structure=None if original is None else read_structure(original.folder, original.tensors),
            advance=advance,
        )
    faults = [f"{finding.rule}: {finding.where}: {finding.message}" for finding in inspection.findings]
    faults += _draft_faults(subject)
    return conclude("structure", faults, f"{layout_of(checkpoint.config).name}: {inspection.summary()}")


def _draft_faults(subject: ReleaseUnderTest) -> Iterator[str]:
    """Yield a sentence for each finding of an inspection of the draft; one that the recipe names must be there."""
    if subject.manifest.recipe.get("draft") is None:
        return
    if f"{DRAFT}/config.json" not in subject.listing.files:
        yield f"the recipe has a draft, and there is no {DRAFT}/config.json"
        return
    checkpoint, structure = read_draft(subject.folder / DRAFT)
    for finding in inspect_checkpoint(checkpoint, structure).findings:
        yield f"{DRAFT}/{finding.where}: {finding.rule}: {finding.message}"


def check_gate(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Judge again from the samples and launches, and compare with the record and with the recipe's limits.

    Verdict, limits and figures are compared, never sentences. If another version of the judgement made the record and
    this version's judgement differs, the result is NOT CHECKED.
    """
    measurements, recorded, judged = subject.record
    edited = changes(recorded, judged)
    faults: list[str] = []
    unknown: list[str] = []
    if recorded.verdict is not Verdict.PASS:
        faults.append(f"gate.json says {recorded.verdict.value}, only a PASS is published")
    if recorded.judgement == judged.judgement:
        if judged.verdict is not Verdict.PASS:
            reason = judged.reasons[0]
            faults.append(f"the numbers lead to {judged.verdict.value}, only a PASS is published: {reason}")
        faults += [f"gate.json does not follow from its own numbers: {sentence}" for sentence in edited]
    elif edited:
        unknown.append(
            f"version {recorded.judgement} of the judgement made this record, and version {judged.judgement} here "
            f"comes to something else: {edited[0]}"
        )
    for source, artefact in (
        ("quantmint.json says", subject.manifest.artefact),
        ("the checkpoint here is", subject.artefact),
    ):
        if artefact != recorded.artefact:
            faults.append(f"gate.json judged {recorded.artefact[:16]}…, {source} {artefact[:16]}…")
    faults += [
        f"gate.json has the headline {row.name}, which nothing claims of this checkpoint"
        for row in recorded.headlines
        if measurements.claims.get(row.name) != row.promised
    ]
    holding = limits.compare_with_recipe(subject, measurements, recorded)
    faults += holding.faults
    unknown += holding.unknown
    if unknown and not faults:
        return not_checked("gate", *unknown)
    items = sum(len(candidate.samples) for _, candidate in measurements.samples.values())
    count = len(measurements.samples)
    summary = f"PASS again, from {items:,} items of {count} {'task' if count == 1 else 'tasks'}"
    launches = f" and {len(measurements.launches)} launches" if measurements.launches else ""
    check = conclude("gate", faults, f"{summary}{launches}, for this checkpoint")
    return (
        check
        if faults
        else replace(check, details=tuple(note.replace(NO_BREAK, " ") for note in history_notes(judged)))
    )
