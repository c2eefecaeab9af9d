"""Whether the recipe is the manifest's and the checkpoint sound, whether the verdict follows from the numbers, and
whether the report and the card show those: data against the evidence, tables against the record.

The page of the report is drawn from its data by whoever made the release: its bytes are in the manifest, and it is
never opened here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import ValidationError

from eval.gate import GateReport, changes
from eval.measurements import Launch, Measurements
from eval.report.model import DATA
from eval.report.numbers import level
from eval.verdict import Verdict
from pipeline import __version__
from pipeline.base.canonical import difference, plain
from pipeline.base.errors import UserError
from pipeline.publish.allowed import SCORES
from pipeline.publish.release import CARD, EVIDENCE, RECIPE
from pipeline.publish.verify import limits
from pipeline.publish.verify.subject import Check, Subject, fails, first, judged, not_checked
from pipeline.quantize.formats.checkpoint import open_checkpoint
from pipeline.quantize.formats.layout import layout_of
from pipeline.quantize.inspection.inspect import inspect_checkpoint
from pipeline.quantize.model.builder import meta_model
from pipeline.quantize.model.structure import read_structure
from pipeline.recipe.json_schema import faults_of
from pipeline.recipe.schema import Quantization, Recipe
from pipeline.recipe.yaml_positions import parse


def check_recipe(subject: Subject) -> Check:
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
            return fails("recipe", *reasons, *faults)
        return not_checked("recipe", f"quantmint {subject.manifest.quantmint} wrote it, and here {reasons[0]}")
    asked = recipe.quantization
    faults += [*_given(subject), *_declared(subject, asked)]
    return judged(
        "recipe", faults, f"{asked.scheme}, KV cache {asked.kv_cache}, {asked.format}: what quantmint.json says"
    )


def _given(subject: Subject) -> Iterator[str]:
    """Settings of the recipe's section that are not those which the manifest says the stage quantize was given."""
    settings: Any = subject.manifest.stages["quantize"].payload["settings"]
    section: Any = subject.manifest.recipe["quantization"]
    if "scheme" not in settings:
        yield "quantmint.json does not say in which scheme the stage quantize worked"
    for name in sorted(section.keys() & settings.keys()):
        if difference(section[name], settings[name]):
            yield f"quantization.{name} is {section[name]!r}, the stage quantize was given {settings[name]!r:.60}"


def _declared(subject: Subject, asked: Quantization) -> Iterator[str]:
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


def check_structure(subject: Subject) -> Check:
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
    return judged("structure", faults, f"{layout_of(checkpoint.config).name}: {inspection.summary()}")


def check_gate(subject: Subject) -> Check:
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
    holding = limits.held_by_recipe(subject, measurements, recorded)
    faults += holding.faults
    unknown += holding.unknown
    if unknown and not faults:
        return not_checked("gate", *unknown)
    items = sum(len(candidate.samples) for _, candidate in measurements.samples.values())
    said = f"PASS again, from {items:,} items of {len(measurements.samples)} tasks"
    launches = f" and {len(measurements.launches)} launches" if measurements.launches else ""
    return judged("gate", faults, f"{said}{launches}, for this checkpoint")


_LARGEST = 1 << 27  # bytes of report.json, which quotes answers, and models that reason write long ones
_ESCAPED = re.compile(r"\\(.)")


def check_report(subject: Subject) -> Check:
    """Compare, number by number."""
    measurements, gate, _ = subject.record
    data = subject.object(f"{EVIDENCE}/{DATA}", largest=_LARGEST)
    return judged("report", list(_data(subject, data, measurements, gate)), "its figures are the gate's")


def check_card(subject: Subject) -> Check:
    """Hold every row about a task, the metadata, and the scores for the Hub against the evidence."""
    _, gate, _ = subject.record
    text = subject.text(CARD)
    faults = [*_tables(text, gate), *_metadata(subject), *_scores(subject, gate)]
    manifest = subject.manifest
    for what, wanted in (("checkpoint", manifest.artefact), ("commit of the base", manifest.base.commit)):
        if wanted is not None and wanted not in text:
            faults.append(f"{CARD} does not name the {what}, {wanted[:16]}…")
    return judged("card", faults, f"its figures are the gate's, for {len(gate.accuracy)} tasks")


def _data(subject: Subject, data: Mapping[str, Any], measurements: Measurements, gate: GateReport) -> Iterator[str]:
    """Where report.json says otherwise than what it was made from."""
    # By way of the same readers: a number that JSON writes as 0 or 0.0 is one number.
    yield from _other("the gate's report", gate.to_json(), GateReport.from_json(data["gate"]).to_json())
    launches = [Launch.from_json(launch).to_json() for launch in data["launches"]]
    yield from _other("the launches", [launch.to_json() for launch in measurements.launches], launches)
    if data["recipe"] != subject.text(RECIPE):
        yield f"{DATA} shows another recipe than {RECIPE}"
    for side, count in zip(("baseline", "candidate"), measurements.weights, strict=True):
        if data["size"][f"{side}_bytes"] != count:
            yield f"{DATA} says that the {side} takes {data['size'][f'{side}_bytes']} bytes, gate.json says {count}"


def _other(what: str, expected: object, found: object) -> Iterator[str]:
    other = [
        f"{DATA}: {what}: {change.path[2:]} is {change.new!r:.60}, the evidence says {change.old!r:.60}"
        for change in difference(plain(expected), plain(found))
    ]
    yield from first(other, f"differences of {what}")


def _tables(text: str, gate: GateReport) -> Iterator[str]:
    """Tasks whose scores the card does not give, or gives otherwise in any row of any table."""
    rows = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    if f"**{gate.verdict.value}**" not in text:
        yield f"{CARD} does not show the verdict {gate.verdict.value}"
    for result in gate.accuracy:
        name = _plain(f"{result.task} ({result.metric})")
        about = [row for row in rows if row and row[0] == name]
        wanted = [_plain(level(result, value)) for value in (result.baseline, result.candidate)]
        if not about:
            yield f"{CARD}: the card has no scores of {result.task}, which the gate judged"
        for row in about:
            if row[1:3] != wanted:
                found, expected = " and ".join(row[1:3]), " and ".join(wanted)
                yield f"{CARD}: the card's numbers are not the gate's: {result.task} {found}, the gate says {expected}"


def _cells(line: str) -> list[str]:
    parts = re.split(r"(?<!\\)\|", line.strip())
    return [_plain(_ESCAPED.sub(r"\1", cell)) for cell in parts[1:-1]]


def _plain(text: str) -> str:
    """Text whose blanks are all the same: a figure keeps its unit by one that does not break."""
    return " ".join(text.split())


def _metadata(subject: Subject) -> Iterator[str]:
    found = re.match(r"---\n(.*?\n)---\n", subject.text(CARD), re.DOTALL)
    data = parse(found[1], CARD).data if found else {}
    repo = subject.manifest.base.repo
    base = data.get("base_model")
    if ([base] if isinstance(base, str) else base) != ([repo] if repo else None):
        yield f"{CARD}: base_model is {base}, quantmint.json says {repo}"
    if repo and data.get("base_model_relation") != "quantized":
        yield f"{CARD}: base_model_relation is {data.get('base_model_relation')}, expected quantized"


def _scores(subject: Subject, gate: GateReport) -> Iterator[str]:
    known = {result.task: result for result in gate.accuracy}
    for name in subject.listing.files:
        if not name.startswith(f"{SCORES}/"):
            continue
        task = name.removeprefix(f"{SCORES}/").rpartition(".")[0]
        if task not in known:
            yield f"{name} is about a task that the gate did not judge"
            continue
        entries: Any = yaml.safe_load(subject.text(name))
        expected = round(100 * known[task].candidate, 2)
        for entry in entries if isinstance(entries, list) else [entries]:
            value = entry.get("value") if isinstance(entry, dict) else None
            if value != expected:
                yield f"{name}: the value is {value}, the gate says {expected}"
