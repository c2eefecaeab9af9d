"""Whether the report shows the gate's numbers: its data against the evidence, its pages against its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

from eval.errors import MeasurementError
from eval.gate import GateReport
from eval.measurements import Measurements
from eval.report import flips, junit, markdown, page
from eval.report.model import CARD, DATA, JUNIT, PAGE
from eval.report.numbers import level
from pipeline import __version__
from pipeline.canonical import difference, plain
from pipeline.publish.release import RECIPE
from pipeline.reporting.contents import layer_errors
from pipeline.stages.inspect import INSPECTION
from pipeline.verify.check import Check, fails, reworded
from pipeline.verify.reading import UnreadableError
from pipeline.verify.subject import Subject

NAME = "report"
_DRAWN = (("<svg", "</svg>"), ("<style>", "</style>"))
_SHOWN = 3
_LONGEST = 1 << 18  # characters up to the end of a tag; beyond that the time of taking one apart grows with its square
_LARGEST = 1 << 27  # bytes of report.json, which quotes answers, and models that reason write long ones
_LIVE = ("script", "iframe", "frame", "object", "embed", "base", "form", "applet", "audio", "video")
_LOADED = ("src", "href", "srcset", "action")


def check(subject: Subject) -> Check:
    """Compare, number by number; the page is never shown, only taken apart as text."""
    try:
        measurements, gate, _ = subject.record
    except MeasurementError as error:
        return fails(NAME, f"there is no record of the gate to hold it against: {error}")
    data = subject.object(subject.evidence(DATA), largest=_LARGEST)
    faults = list(_data(subject, data, measurements, gate))
    if not faults:
        faults += _figures(subject.text(subject.evidence(PAGE)), gate)
    same = data["versions"].get("quantmint") == __version__
    other = [] if faults or not same else list(_pages(subject, data))
    return reworded(NAME, faults, "its figures are the gate's, in the data and on the page", other, same=same)


def _data(subject: Subject, data: Mapping[str, Any], measurements: Measurements, gate: GateReport) -> Iterator[str]:
    """Where report.json says otherwise than what it was made from."""
    yield from _other("the gate's report", gate.to_json(), data["gate"])
    yield from _other("the launches", [launch.to_json() for launch in measurements.launches], data["launches"])
    if data["recipe"] != subject.text(RECIPE):
        yield f"{DATA} shows another recipe than {RECIPE}"
    for side, count in zip(("baseline", "candidate"), measurements.weights, strict=True):
        if data["size"][f"{side}_bytes"] != count:
            yield f"{DATA} says that the {side} takes {data['size'][f'{side}_bytes']} bytes, gate.json says {count}"
    found = {entry["task"]: [_place(flip) for flip in entry["flips"]] for entry in data["flips"]}
    for task, (baseline, candidate) in measurements.samples.items():
        changed = [_place(flip) for flip in flips.flips(baseline, candidate, {}, {})["flips"]]
        if task in found and found[task] != changed:
            yield f"{DATA} lists other changed answers of {task} than the samples have"
    layers = subject.object(subject.evidence(INSPECTION))
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
    other = difference(plain(expected), plain(found))
    for change in other[:_SHOWN]:
        yield f"{DATA}: {what}: {change.path[2:]} is {_short(change.new)}, the evidence says {_short(change.old)}"
    if len(other) > _SHOWN:
        yield f"{DATA}: {what}: {len(other) - _SHOWN} more differences"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _place(flip: Mapping[str, Any]) -> tuple[object, ...]:
    return flip["task"], flip["doc_id"], flip["direction"], tuple(flip["scores"])


def _figures(text: str, gate: GateReport) -> Iterator[str]:
    """Tasks whose row on the page does not have the gate's scores, and a verdict that is not the gate's."""
    if any(len(piece) > _LONGEST for piece in text.split(">")):
        raise UnreadableError(f"{PAGE} has more than {_LONGEST:,} characters without the end of a tag")
    cells = _Cells()
    cells.feed(text)
    yield from dict.fromkeys(f"{PAGE} holds {what}, and a report runs nothing and loads nothing" for what in cells.live)
    if gate.verdict.value not in cells.stamps:
        yield f"{PAGE} does not show the verdict {gate.verdict.value}"
    for result in gate.accuracy:
        wanted = {level(result, result.baseline), level(result, result.candidate)}
        rows = [row for row in cells.rows if row and row[0].startswith(result.task)]
        if not any(wanted <= set(row) for row in rows):
            yield f"{PAGE} does not show the gate's scores of {result.task}: {', '.join(sorted(wanted))}"


class _Cells(HTMLParser):
    """The text of every table's cells by row, of what is stamped as the verdict, and whatever would run or load."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[list[list[str]]] = []
        self._stamps: list[list[str]] = []
        self.live: list[str] = []
        self._into: list[str] | None = None

    @property
    def rows(self) -> list[list[str]]:
        """The text of each cell."""
        return [["".join(cell) for cell in row] for row in self._rows]

    @property
    def stamps(self) -> list[str]:
        """What is stamped."""
        return ["".join(stamp) for stamp in self._stamps]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a row, a cell or the stamp; note what a browser would act on."""
        if tag in _LIVE or (tag == "meta" and ("http-equiv", "refresh") in attrs):
            self.live.append(f"<{tag}>")
        for name, value in attrs:
            harmless = ("#", "data:image/", "data:,", *(("https://", "http://") if tag == "a" else ()))
            if name.startswith("on") or (name.endswith(_LOADED) and not (value or "").startswith(harmless)):
                self.live.append(f"{name}={_short(value)}")
        if tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._into = [] if self._rows else None
            if self._into is not None:
                self._rows[-1].append(self._into)
        elif tag == "p" and ("class", "stamp") in attrs:
            self._into = []
            self._stamps.append(self._into)

    def handle_endtag(self, tag: str) -> None:
        """End a cell or the stamp."""
        if tag in ("td", "th", "p"):
            self._into = None

    def handle_data(self, data: str) -> None:
        """Collect the text."""
        if self._into is not None:
            self._into.append(data.strip())


def _pages(subject: Subject, data: Mapping[str, Any]) -> Iterator[str]:
    """Pages that are not what the data says, drawn again. Drawings are left out: their paths follow the library's
    version, and every figure in them stands in a table as well."""
    report: Any = data
    for name, render in ((CARD, markdown.render), (JUNIT, junit.render), (PAGE, page.render)):
        if name != PAGE and not subject.has(subject.evidence(name)):
            continue  # only the page and its data are of every release
        there, again = subject.text(subject.evidence(name)), render(report)
        if name == PAGE:
            there, again = _undrawn(there), _undrawn(again)
        if there != again:
            yield f"{name} is not what {DATA} is written as here{_first_difference(there, again)}"


def _undrawn(text: str) -> str:
    """A page without its drawings and styles; one that never ends is looked for once, and stays."""
    for begin, end in _DRAWN:
        kept, at = [], 0
        while (start := text.find(begin, at)) >= 0 and (stop := text.find(end, start)) >= 0:
            kept.append(text[at:start])
            at = stop + len(end)
        text = "".join([*kept, text[at:]])
    return text


def _first_difference(there: str, again: str) -> str:
    for found, expected in zip(there.splitlines(), again.splitlines(), strict=False):
        if found != expected:
            return f": found {_short(found.strip())}, expected {_short(expected.strip())}"
    return ""
