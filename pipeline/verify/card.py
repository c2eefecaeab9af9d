"""Whether the card says what was measured: its tables and metadata against the gate's record and the manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from eval.accuracy import Accuracy
from eval.errors import MeasurementError
from eval.gate import GateReport
from eval.report import markdown
from eval.report.model import DATA
from eval.report.numbers import level
from eval.report.summary import tiles
from pipeline import __version__
from pipeline.publish.allowed import SCORES
from pipeline.publish.release import CARD
from pipeline.recipe.yaml_positions import parse
from pipeline.verify.check import Check, fails, reworded
from pipeline.verify.reading import UnreadableError
from pipeline.verify.subject import Subject

NAME = "card"
_FRONT = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)")
_SHORT = 1 << 16  # bytes of a file of scores


def check(subject: Subject) -> Check:
    """Hold every row about a task, the metadata, and the scores for the Hub against the evidence."""
    try:
        _, gate, _ = subject.record
    except MeasurementError as error:
        return fails(NAME, f"there is no record of the gate to hold it against: {error}")
    text = subject.text(CARD)
    faults = [*_tables(text, gate), *_metadata(subject, text), *_scores(subject, gate)]
    manifest = subject.known
    for what, wanted in (("checkpoint", manifest.artefact), ("commit of the base", manifest.base.commit)):
        if wanted is not None and wanted not in text:
            faults.append(f"{CARD} does not name the {what}, {wanted[:16]}…")
    same = manifest.quantmint == __version__
    other = [] if faults or not same else list(_sections(subject, text, gate))
    return reworded(NAME, faults, f"its figures are the gate's, for {len(gate.accuracy)} tasks", other, same=same)


def _tables(text: str, gate: GateReport) -> Iterator[str]:
    """Tasks whose scores the card does not give, or gives otherwise in any row of any table."""
    rows = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    verdict = f"**{gate.verdict.value}**"
    if verdict not in text:
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


def _metadata(subject: Subject, text: str) -> Iterator[str]:
    front = _FRONT.match(text)
    if front is None:
        yield f"{CARD} has no metadata"
        return
    data = parse(front[1], CARD).data
    repo = subject.known.base.repo
    wanted = [repo] if repo else None
    found = data.get("base_model")
    if ([found] if isinstance(found, str) else found) != wanted:
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
        if subject.listing.files[name] > _SHORT:
            raise UnreadableError(f"{name} is larger than {_SHORT:,} bytes")
        if task not in known:
            yield f"{name} is about a task that the gate did not judge"
            continue
        text = subject.text(name)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise UnreadableError(f"{name} has aliases, by which a short text becomes one without end")
        entries: Any = yaml.safe_load(text)
        yield from _entries(name, entries if isinstance(entries, list) else [entries], known[task])


def _entries(name: str, entries: list[Any], result: Accuracy) -> Iterator[str]:
    for entry in entries:
        value = entry.get("value") if isinstance(entry, dict) else None
        expected = round(100 * result.candidate, 2)
        if value != expected:
            yield f"{name}: the value is {value}, the gate says {expected}"


def _sections(subject: Subject, text: str, gate: GateReport) -> Iterator[str]:
    """Sections that are not what the evidence is written as, word by word."""
    data: Any = subject.object(subject.evidence(DATA), largest=1 << 27)
    for what, section in (
        ("accuracy", markdown.accuracy(gate)),
        ("throughput", markdown.throughput(data, gate)),
        ("memory", markdown.size(data)),
    ):
        if section not in text:
            yield f"{CARD}: the section on {what} is not what the evidence says"
    rows = {tuple(_cells(line)) for line in text.splitlines() if line.startswith("|")}
    for caption, figure, explanation in tiles(data, gate):
        if (_plain(caption), f"**{_plain(figure)}**", _plain(explanation)) not in rows:
            yield f"{CARD}: the first figures do not have {_plain(caption)}: {_plain(figure)}, {_plain(explanation)}"
