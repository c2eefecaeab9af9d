"""Whether the report and the card show the gate's numbers: data against the evidence, tables against the record.

The page of the report is drawn from its data by whoever made the release: its bytes are in the manifest, and it is
never opened here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from eval.gate import GateReport
from eval.measurements import Launch, Measurements
from eval.report.flips import flips
from eval.report.model import DATA
from eval.report.numbers import level
from pipeline.base.canonical import difference, plain
from pipeline.publish.allowed import SCORES
from pipeline.publish.release import CARD, EVIDENCE, RECIPE
from pipeline.publish.verify.subject import Check, Subject, first, judged
from pipeline.quantize.inspection.findings import INSPECTION
from pipeline.quantize.inspection.inspect import layer_errors

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
    manifest = subject.known
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
    found = {entry["task"]: [_place(flip) for flip in entry["flips"]] for entry in data["flips"]}
    for task, (baseline, candidate) in measurements.samples.items():
        changed = [_place(flip) for flip in flips(baseline, candidate, {}, {})["flips"]]
        if task in found and found[task] != changed:
            yield f"{DATA} lists other changed answers of {task} than the samples have"
    layers = subject.object(f"{EVIDENCE}/{INSPECTION}")
    if layers.get("verdict") != "PASS":
        yield f"{INSPECTION} says {layers.get('verdict')!r}, only a sound checkpoint is published"
    yield from _other("the error of the layers", layer_errors(layers["layers"]), data["layers"])
    if subject.manifest is not None:
        made = {made.fingerprint for made in subject.manifest.stages.values()}
        for stage in data["stages"]:
            if stage["fingerprint"] not in made:
                yield f"{DATA} shows a stage {stage['name']} that quantmint.json does not list"
        if data["name"] != subject.manifest.name:
            yield f"{DATA} is about {data['name']!r}, quantmint.json about {subject.manifest.name!r}"


def _other(what: str, expected: object, found: object) -> Iterator[str]:
    """The places where two trees differ; the first few, each with both values."""
    other = [
        f"{DATA}: {what}: {change.path[2:]} is {change.new!r:.60}, the evidence says {change.old!r:.60}"
        for change in difference(plain(expected), plain(found))
    ]
    yield from first(other, f"differences of {what}")


def _place(flip: Mapping[str, Any]) -> tuple[object, ...]:
    return flip["task"], flip["doc_id"], flip["direction"], tuple(flip["scores"])


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
    """The cells of a row, as they are read."""
    parts = re.split(r"(?<!\\)\|", line.strip())
    return [_plain(_ESCAPED.sub(r"\1", cell)) for cell in parts[1:-1]]


def _plain(text: str) -> str:
    """Text whose blanks are all the same: a figure keeps its unit by one that does not break."""
    return " ".join(text.split())


def _metadata(subject: Subject) -> Iterator[str]:
    data = subject.front_matter
    repo = subject.known.base.repo
    found = data.get("base_model")
    if ([found] if isinstance(found, str) else found) != ([repo] if repo else None):
        yield f"{CARD}: base_model is {found}, quantmint.json says {repo}"
    if repo and data.get("base_model_relation") != "quantized":
        yield f"{CARD}: base_model_relation is {data.get('base_model_relation')}, expected quantized"


def _scores(subject: Subject, gate: GateReport) -> Iterator[str]:
    """Files of scores that are not the gate's."""
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
