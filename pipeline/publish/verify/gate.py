"""Whether the verdict follows from the published numbers, and is about the files that lie here."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from eval import suites
from eval.errors import DefinitionError, MeasurementError
from eval.gate import GateReport, Policy, changes
from eval.verdict import Verdict
from pipeline import __version__
from pipeline.base.canonical import Change, difference, plain
from pipeline.publish.verify.check import Check, fails, judged
from pipeline.publish.verify.subject import Subject
from pipeline.recipe.schema import Recipe


def check_gate(subject: Subject) -> Check:
    """Judge again from the samples and launches; nothing of the recorded verdict is used."""
    try:
        measurements, recorded, found = subject.record
    except MeasurementError as error:
        return fails("gate", str(error).replace(f"{subject.folder}/", ""))
    faults = []
    if found.verdict is not Verdict.PASS:
        faults.append(f"the numbers lead to {found.verdict.value}, only a PASS is published: {found.reasons[0]}")
    faults += [f"gate.json does not follow from its own numbers: {sentence}" for sentence in changes(recorded, found)]
    manifest = subject.manifest
    if manifest is not None and manifest.artefact != recorded.artefact:
        faults.append(f"gate.json judged {recorded.artefact[:16]}…, quantmint.json says {manifest.artefact[:16]}…")
    artefact = subject.artefact
    if artefact != recorded.artefact:
        faults.append(f"gate.json judged {recorded.artefact[:16]}…, the checkpoint here is {artefact[:16]}…")
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
