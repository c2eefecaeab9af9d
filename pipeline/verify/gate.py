"""Whether the verdict follows from the published numbers, and is about the files that lie here."""

from __future__ import annotations

from eval.errors import MeasurementError
from eval.gate import GateReport
from eval.gate.changes import changes
from eval.verdict import Verdict
from pipeline.canonical import difference, plain
from pipeline.verify.artefact import artefact_of
from pipeline.verify.check import Check, fails, judged
from pipeline.verify.subject import Subject

NAME = "gate"


def check(subject: Subject) -> Check:
    """Judge again from the samples and launches; nothing of the recorded verdict is used."""
    try:
        measurements, recorded, found = subject.record
    except MeasurementError as error:
        return fails(NAME, str(error).replace(f"{subject.folder}/", ""))
    faults = []
    if found.verdict is not Verdict.PASS:
        faults.append(f"the numbers lead to {found.verdict.value}, only a PASS is published: {found.reasons[0]}")
    faults += [f"gate.json does not follow from its own numbers: {sentence}" for sentence in changes(recorded, found)]
    manifest = subject.manifest
    if manifest is not None and manifest.artefact != recorded.artefact:
        faults.append(f"gate.json judged {recorded.artefact[:16]}…, quantmint.json says {manifest.artefact[:16]}…")
    artefact = artefact_of(subject)
    if artefact != recorded.artefact:
        faults.append(f"gate.json judged {recorded.artefact[:16]}…, the checkpoint here is {artefact[:16]}…")
    faults += _promises(subject, recorded)
    items = sum(len(candidate.samples) for _, candidate in measurements.samples.values())
    said = f"PASS again, from {items:,} items of {len(measurements.samples)} tasks"
    launches = f" and {len(measurements.launches)} launches" if measurements.launches else ""
    return judged(NAME, faults, f"{said}{launches}, for this checkpoint")


def _promises(subject: Subject, recorded: GateReport) -> list[str]:
    """A record that was judged by other limits than the stage was given: its policy is part of the fingerprint."""
    made = None if subject.manifest is None else subject.manifest.stages.get("gate")
    settings = made.payload.get("settings") if made else None
    policy = settings.get("policy") if isinstance(settings, dict) else None
    if policy is None:
        return []
    # By way of the same reader: a number that JSON writes as 0 or 0.0 is one number.
    other = difference(policy, plain(recorded.policy.to_json()))
    return [
        f"gate.json was judged by other limits than the recipe's: {change.path[2:]} is {change.new}, not {change.old}"
        for change in other
    ]
