"""Whether tensors, config.json and recipe.yaml agree, and whether the verdict on them follows from the numbers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from eval import suites
from eval.errors import DefinitionError, MeasurementError
from eval.gate import GateReport, Policy, changes
from eval.verdict import Verdict
from pipeline import __version__
from pipeline.base.canonical import Change, difference, plain
from pipeline.publish.release import RECIPE
from pipeline.publish.verify.subject import Check, Subject, UnknownModelError, fails, first, judged, not_checked
from pipeline.quantize.formats.layout import layout_of
from pipeline.quantize.inspection.findings import Finding
from pipeline.quantize.inspection.findings import check_structure as structure_findings
from pipeline.quantize.inspection.inspect import inspect_checkpoint
from pipeline.quantize.model.structure import select
from pipeline.recipe.json_schema import faults_of
from pipeline.recipe.schema import Recipe
from pipeline.recipe.yaml_positions import parse


def check_recipe(subject: Subject) -> Check:
    """Read the recipe as a run would, and hold it against the manifest and the configuration."""
    try:
        document = parse(subject.text(RECIPE), RECIPE)
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        return fails("recipe", *(str(fault) for fault in faults_of(error, document)))
    faults = []
    if subject.manifest is not None:
        faults += [
            f"{RECIPE}: {change.path[2:]} is {change.new!r}, quantmint.json says {change.old!r}"
            for change in difference(subject.manifest.recipe, document.data)
        ]
    try:
        faults += _against_config(subject, recipe)
    except UnknownModelError as error:
        if not faults:
            return not_checked("recipe", f"what it asks for was not held against config.json: {error.message}")
    said = recipe.quantization
    return judged("recipe", faults, f"{said.scheme}, KV cache {said.kv_cache}, {said.format}: what config.json says")


def _against_config(subject: Subject, recipe: Recipe) -> list[str]:
    """Where the layout, the schemes of the modules or the KV cache are not what was asked for."""
    checkpoint, structure = subject.model
    form = layout_of(checkpoint.config)
    claims = form.claims(checkpoint.config["quantization_config"], [*structure.linear, *structure.kept])
    # What the wishes are applied to is the model that was quantized, which has the same modules.
    choice = select(replace(structure, quantized_by=None), recipe.quantization)
    faults = []
    if form.name != recipe.quantization.format:
        faults.append(f"{RECIPE} asks for the format {recipe.quantization.format}, config.json says {form.name}")
    if claims.kv_cache != choice.kv_cache:
        caches = ("an FP8 KV cache", "a 16-bit KV cache")
        asked, found = caches if choice.kv_cache else caches[::-1]
        faults.append(f"{RECIPE} asks for {asked}, config.json says {found}")
    other = [
        f"{RECIPE} gives {module} {choice.schemes.get(module) or '16 bit'}, config.json says "
        f"{claims.schemes.get(module) or claims.unknown.get(module) or '16 bit'}"
        for module in structure.linear
        if choice.schemes.get(module) != claims.schemes.get(module)
    ]
    return faults + first(other, "modules have another scheme")


def check_structure(subject: Subject) -> Check:
    """Inspect the checkpoint as `quantmint inspect` does; where only headers were fetched, those."""
    try:
        checkpoint, structure = subject.model
        form = layout_of(checkpoint.config)
        if subject.vouched:
            modules = [*structure.linear, *structure.kept]
            claims = form.claims(checkpoint.config["quantization_config"], modules)
            found = [_told(finding) for finding in structure_findings(checkpoint, structure, claims)]
            if found:
                return fails("structure", *found)
            reason = f"the headers of {len(checkpoint.tensors)} tensors are right; their numbers were not fetched"
            return not_checked("structure", reason, "without --remote they are fetched and checked")
        with subject.progress.bar(checkpoint.nbytes, "B") as advance:
            inspection = inspect_checkpoint(checkpoint, structure, advance=advance)
    except UnknownModelError as error:
        return not_checked("structure", error.message)
    return judged("structure", list(map(_told, inspection.findings)), f"{form.name}: {inspection.summary()}")


def _told(finding: Finding) -> str:
    return f"{finding.rule}: {finding.where}: {finding.message}"


def check_gate(subject: Subject) -> Check:
    """Judge again from the samples and launches; nothing of the recorded verdict is used."""
    measurements, recorded, found = subject.record
    faults = []
    if found.verdict is not Verdict.PASS:
        faults.append(f"the numbers lead to {found.verdict.value}, only a PASS is published: {found.reasons[0]}")
    faults += [f"gate.json does not follow from its own numbers: {sentence}" for sentence in changes(recorded, found)]
    said = subject.manifest.artefact if subject.manifest else recorded.artefact
    for who, artefact in (("quantmint.json says", said), ("the checkpoint here is", subject.artefact)):
        if artefact != recorded.artefact:
            faults.append(f"gate.json judged {recorded.artefact[:16]}…, {who} {artefact[:16]}…")
    faults += [
        f"gate.json was judged by other limits than the recipe's: {change.path[2:]} is {change.new}, not {change.old}"
        for change in _promises(subject, recorded)
    ]
    items = sum(len(candidate.samples) for _, candidate in measurements.samples.values())
    said = f"PASS again, from {items:,} items of {len(measurements.samples)} tasks"
    launches = f" and {len(measurements.launches)} launches" if measurements.launches else ""
    return judged("gate", faults, f"{said}{launches}, for this checkpoint")


def _promises(subject: Subject, recorded: GateReport) -> list[Change]:
    """Limits that are not those that the stage was given, or not those of the recipe, which readers are shown.

    Margins of tasks that only a suite has are known for the suites of this version: another one may have others.
    """
    manifest = subject.manifest
    if manifest is None:
        return []
    found: Any = plain(recorded.policy.to_json())
    made = manifest.stages.get("gate")
    settings = made.payload.get("settings") if made else None
    given: Any = settings.get("policy") if isinstance(settings, dict) else None
    # By way of the same reader: a number that JSON writes as 0 or 0.0 is one number.
    with suppress(MeasurementError):
        given = Policy.from_json(given).to_json()
    faults = difference(given, found)
    recipe = Recipe.model_validate(dict(manifest.recipe))
    same = manifest.quantmint == __version__
    try:
        suite = suites.load(recipe.evaluation.suite, suites.FOLDER).judged_by(recipe.gate.accuracy.margins)
    except DefinitionError:
        if same:
            raise
        return faults
    asked: Any = plain(Policy.from_json(recipe.gate.policy(suite, recipe.target.hardware).to_json()).to_json())
    if not same:
        own = {task: asked["margins"].get(task) for task in recipe.gate.accuracy.margins}
        asked["margins"] = found["margins"] | {task: margin for task, margin in own.items() if margin is not None}
        if recipe.gate.accuracy.expected_flip_rate is None:
            asked["expected_flip_rate"] = found["expected_flip_rate"]
    return faults + [change for change in difference(asked, found) if change not in faults]
