"""Whether the recipe is the manifest's and the checkpoint sound, whether the verdict follows from the numbers, and
whether the report and the card show those: data against the evidence, tables against the record.

The page of the report is drawn from its data by whoever made the release: its bytes are in the manifest, and it is
never opened here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from quantmint.eval.gate import changes
from quantmint.eval.report.history import history_notes
from quantmint.eval.report.numbers import NO_BREAK
from quantmint.eval.verdict import Verdict
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import difference
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.publish.release import RECIPE
from quantmint.pipeline.publish.verify import limits
from quantmint.pipeline.publish.verify.subject import CheckResult, ReleaseUnderTest, conclude, failure, not_checked
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.formats.layout import layout_of
from quantmint.pipeline.quantize.inspection.inspect import inspect_checkpoint
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.structure import read_structure
from quantmint.pipeline.recipe.json_schema import faults_of
from quantmint.pipeline.recipe.schema import Quantization, Recipe
from quantmint.pipeline.recipe.yaml_positions import parse


def check_recipe(subject: ReleaseUnderTest) -> CheckResult:
    """Read the recipe as a run would, and compare it with the manifest, the stage quantize and config.json."""
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
    asked = recipe.quantization
    faults += [*_given(subject), *_declared(subject, asked)]
    return conclude(
        "recipe", faults, f"{asked.scheme}, KV cache {asked.kv_cache}, {asked.format}: what quantmint.json says"
    )


def _given(subject: ReleaseUnderTest) -> Iterator[str]:
    """Settings of the recipe's section that are not those which the manifest says the stage quantize was given."""
    settings: Any = subject.manifest.stages["quantize"].payload["settings"]
    section: Any = subject.manifest.recipe["quantization"]
    if "scheme" not in settings:
        yield "quantmint.json does not say in which scheme the stage quantize worked"
    for name in sorted(section.keys() & settings.keys()):
        if difference(section[name], settings[name]):
            yield f"quantization.{name} is {section[name]!r}, the stage quantize was given {settings[name]!r:.60}"


def _declared(subject: ReleaseUnderTest, asked: Quantization) -> Iterator[str]:
    """Promises of the checkpoint's own config.json that are not the recipe's."""
    subject.object("config.json")
    checkpoint = open_checkpoint(subject.folder)
    layout = layout_of(checkpoint.config)
    if layout.name != asked.format:
        yield f"the recipe asks for the layout {asked.format}, config.json has {layout.name}"
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors if name.endswith((".weight_scale", "_packed"))}
    claims = layout.claims(checkpoint.config["quantization_config"], sorted(modules))
    schemes = {scheme for scheme in claims.schemes.values() if scheme is not None}
    for scheme in sorted(schemes - asked.schemes):
        yield f"the recipe asks for {', '.join(sorted(asked.schemes))}, config.json declares {scheme}"
    if claims.kv_cache != (asked.kv_cache == "fp8"):
        declared = "an FP8 KV cache" if claims.kv_cache else "a KV cache in 16 bit"
        yield f"the recipe asks for the KV cache {asked.kv_cache}, config.json declares {declared}"


def check_structure(subject: ReleaseUnderTest) -> CheckResult:
    """Inspect the checkpoint as `quantmint inspect` does; code of the repository is never run."""
    subject.object("config.json")
    checkpoint = open_checkpoint(subject.folder)
    try:
        structure = read_structure(subject.folder, checkpoint.tensors)
    except UserError:
        try:
            meta_model(subject.folder)
        except UserError as error:  # nothing is said of the checkpoint where the model cannot be built here
            return not_checked("structure", error.message)
        raise
    with subject.progress.bar(checkpoint.nbytes, "B") as advance:
        inspection = inspect_checkpoint(checkpoint, structure, advance=advance)
    faults = [f"{finding.rule}: {finding.where}: {finding.message}" for finding in inspection.findings]
    return conclude("structure", faults, f"{layout_of(checkpoint.config).name}: {inspection.summary()}")


def check_gate(subject: ReleaseUnderTest) -> CheckResult:
    """Judge again from the samples and launches, by limits that are the recipe's in every version of quantmint.

    Verdict, limits and figures are compared, never sentences. Where the record is of another version of the judgement
    and this one's comes to something else, the check is NOT CHECKED.
    """
    measurements, recorded, found = subject.record
    edited = changes(recorded, found)
    faults: list[str] = []
    unknown: list[str] = []
    if recorded.verdict is not Verdict.PASS:
        faults.append(f"gate.json says {recorded.verdict.value}, only a PASS is published")
    if recorded.judgement == found.judgement:
        if found.verdict is not Verdict.PASS:
            reason = found.reasons[0]
            faults.append(f"the numbers lead to {found.verdict.value}, only a PASS is published: {reason}")
        faults += [f"gate.json does not follow from its own numbers: {sentence}" for sentence in edited]
    elif edited:
        unknown.append(
            f"version {recorded.judgement} of the judgement made this record, and version {found.judgement} here "
            f"comes to something else: {edited[0]}"
        )
    for who, artefact in (
        ("quantmint.json says", subject.manifest.artefact),
        ("the checkpoint here is", subject.artefact),
    ):
        if artefact != recorded.artefact:
            faults.append(f"gate.json judged {recorded.artefact[:16]}…, {who} {artefact[:16]}…")
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
    said = f"PASS again, from {items:,} items of {len(measurements.samples)} tasks"
    launches = f" and {len(measurements.launches)} launches" if measurements.launches else ""
    check = conclude("gate", faults, f"{said}{launches}, for this checkpoint")
    return (
        check if faults else replace(check, details=tuple(note.replace(NO_BREAK, " ") for note in history_notes(found)))
    )
