"""Checks of the report and the card against the evidence: their figures, and their whole text rendered again.

Texts are compared only if the same versions of quantmint and its libraries rendered them; otherwise the figures are
compared and the rest is NOT CHECKED. A page that could run a script or load something fails in every version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, cast
from xml.etree import ElementTree

from quantmint.eval.gate import GateReport
from quantmint.eval.measurements import Launch as MeasuredLaunch
from quantmint.eval.measurements import Measurements
from quantmint.eval.report import junit, markdown, page
from quantmint.eval.report.model import CARD as REPORT_CARD
from quantmint.eval.report.model import DATA, JUNIT, PAGE, Report
from quantmint.eval.report.numbers import level
from quantmint.eval.report.summary import tiles
from quantmint.pipeline import __version__
from quantmint.pipeline.base.canonical import difference, plain
from quantmint.pipeline.base.machine import versions
from quantmint.pipeline.publish.card import CardFacts, ServingCommand, eval_results, notice_text, render
from quantmint.pipeline.publish.card_record import CardRecord, card_facts, decode
from quantmint.pipeline.publish.licences import TEXTS
from quantmint.pipeline.publish.release import CARD, CARD_FACTS, EVIDENCE, NOTICE, RECIPE
from quantmint.pipeline.publish.screening import SCORES
from quantmint.pipeline.publish.verify.subject import ReleaseCheck, ReleaseUnderTest, conclude, first_five, not_checked
from quantmint.pipeline.publish.verify.tables import cells_of, differences
from quantmint.pipeline.publish.verify.tables import plain as plain_text
from quantmint.pipeline.quantize.inspection.findings import INSPECTION
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.yaml_positions import parse, plain_value

Relaunch = Callable[[Path, Recipe, CardFacts], tuple[ServingCommand, ...]]
"""Plans the serving commands of a card, from the checkpoint's folder, its recipe and the card's other facts."""

_LARGEST: Final = 1 << 27  # bytes of a report, which quotes answers; reasoning models write long ones
_ESCAPED = re.compile(r"\\(.)")


def check_report(subject: ReleaseUnderTest) -> ReleaseCheck:
    """Check the report's data against the evidence, and its files against a new rendering of that data.

    The rendering is NOT CHECKED if other versions of quantmint or its libraries made it.
    """
    measurements, gate, _ = subject.record
    data = subject.object(f"{EVIDENCE}/{DATA}", largest=_LARGEST)
    texts = {name: subject.text(f"{EVIDENCE}/{name}", largest=_LARGEST) for name in (PAGE, REPORT_CARD, JUNIT)}
    faults = [*_data(subject, data, measurements, gate), *_harmless(texts[PAGE]), *_figures(texts, gate)]
    if not faults:
        tables = _expected(cast(Report, data), gate)
        shown = differences(f"{EVIDENCE}/{REPORT_CARD}", texts[REPORT_CARD], tables)
        faults += shown.faults
    if faults:
        return conclude("report", faults, "")
    recorded = dict(subject.manifest.stages["report"].tools)
    quantmint = recorded.pop("quantmint", subject.manifest.quantmint)
    if quantmint != __version__:
        return not_checked("report", _elsewhere("the report", quantmint), *shown.unknown)
    report = cast(Report, data)
    rendered = {PAGE: page.render(report), REPORT_CARD: markdown.render(report), JUNIT: junit.render(report)}
    differing = [name for name, text in rendered.items() if text != texts[name]]
    if differing and (changed := _changed(recorded)):
        return not_checked("report", f"{', '.join(differing)} cannot be compared: {changed}")
    faults = [f"{EVIDENCE}/{name} is not what {DATA} is rendered as" for name in differing]
    return conclude("report", faults, "its figures are the gate's, and its files are rendered from them")


def check_card(subject: ReleaseUnderTest, relaunch: Relaunch | None) -> ReleaseCheck:
    """Check the card's figures, metadata and scores against the evidence, and its text against a new rendering.

    The text is NOT CHECKED if other versions of quantmint or its libraries rendered it. ``relaunch`` plans the serving
    commands anew (None: they are not checked).
    """
    _, gate, _ = subject.record
    text = subject.text(CARD)
    faults = [*_tables(CARD, text, gate), *_metadata(subject), *_scores(subject, gate)]
    manifest = subject.manifest
    for what, digest in (("checkpoint", manifest.artefact), ("commit of the base", manifest.base.commit)):
        if digest is not None and digest not in text:
            faults.append(f"{CARD} does not name the {what}, {digest[:16]}…")
    report = cast(Report, subject.object(f"{EVIDENCE}/{DATA}", largest=_LARGEST))
    shown = differences(CARD, text, {**_expected(report, gate), "Measures": _measures(report, gate)})
    faults += shown.faults
    if faults:
        return conclude("card", faults, "")
    if CARD_FACTS not in subject.listing.files:
        return not_checked("card", f"{_SAME}; the rest cannot be rendered again without {CARD_FACTS}", *shown.unknown)
    record = decode(subject.text(CARD_FACTS).encode())
    if record.quantmint != __version__:
        return not_checked("card", _elsewhere("the card", record.quantmint), *shown.unknown)
    facts = _facts(subject, record)
    faults = list(_contradictions(subject, record, facts, relaunch))
    differing = [name for name, expected in _rendered(facts).items() if _text_of(subject, name) != expected]
    if differing and not faults and (changed := _changed(record.tools)):
        return not_checked("card", f"{', '.join(differing)} cannot be compared: {changed}")
    faults += [f"{name} is not what {CARD_FACTS} and the evidence are rendered as" for name in differing]
    return conclude(
        "card", faults, f"its figures are the gate's, for {len(gate.accuracy)} tasks, and all else its facts"
    )


_SAME: Final = "the figures in its tables are the gate's"


def _elsewhere(what: str, version: str) -> str:
    return f"{_SAME}; quantmint {version} rendered {what}, and this is {__version__}, so its text is not compared"


def _expected(report: Report, gate: GateReport) -> dict[str, str]:
    """Return the tables that a report and a card share, as this version writes them."""
    return {
        "Accuracy": markdown.accuracy(gate),
        "Throughput": markdown.throughput(report, gate),
        "Size": markdown.size(report),
    }


def _measures(report: Report, gate: GateReport) -> str:
    """Return the table at the top of a card."""
    return markdown.table(["Measure", "Value", "Detail"], tiles(report, gate))


def _changed(tools: Mapping[str, str]) -> str:
    """Return the libraries with other versions than at the rendering, as a sentence; "" if all are the same."""
    here = versions(*tools) if tools else {}
    return ", ".join(f"{name} was {tools[name]}, here {here[name]}" for name in tools if here[name] != tools[name])


def _facts(subject: ReleaseUnderTest, record: CardRecord) -> CardFacts:
    report = cast(Report, subject.object(f"{EVIDENCE}/{DATA}", largest=_LARGEST))
    inspection = subject.object(f"{EVIDENCE}/{INSPECTION}")
    return card_facts(record, subject.manifest, subject.object("config.json"), inspection, report)


def _rendered(facts: CardFacts) -> dict[str, str | None]:
    return {CARD: render(facts), NOTICE: notice_text(facts), **eval_results(facts)}


def _text_of(subject: ReleaseUnderTest, name: str) -> str | None:
    return subject.text(name) if name in subject.listing.files else None


def _contradictions(
    subject: ReleaseUnderTest, record: CardRecord, facts: CardFacts, relaunch: Relaunch | None
) -> Iterator[str]:
    """Yield a sentence for each fact of the card that contradicts the rest of the release."""
    manifest = subject.manifest
    recipe = Recipe.model_validate(dict(manifest.recipe))
    if manifest.base.repo is not None and record.base != manifest.base.repo:
        yield f"{CARD_FACTS}: the base is {record.base}, quantmint.json says {manifest.base.repo}"
    texts = {name for name in subject.listing.files if any(fnmatchcase(name, pattern) for pattern in TEXTS)}
    if texts != set(record.texts):
        yield f"{CARD_FACTS} names other licence texts than there are"
    calibrated = facts.quantization.calibration
    if calibrated is not None and recipe.calibration is not None:
        requested = (recipe.calibration.samples, recipe.calibration.sequence_length)
        if (calibrated.samples, calibrated.sequence_length) != requested:
            yield f"{CARD_FACTS}: calibrated on other samples than the recipe asks for"
    datasets = {(data.revision, data.sha256) for data in manifest.datasets if data.role == "calibration"}
    if calibrated is not None and datasets and (calibrated.revision, calibrated.sha256) not in datasets:
        yield f"{CARD_FACTS}: calibrated on other texts than quantmint.json says"
    settings: Any = manifest.stages["report"].payload["settings"]
    if record.repo is not None and settings.get("published", record.repo) != record.repo:
        yield f"{CARD_FACTS}: it goes to {record.repo}, the report says {settings['published']}"
    planned = None if relaunch is None else relaunch(subject.folder, recipe, facts)
    if planned is not None and planned != record.launches:
        yield f"{CARD_FACTS}: the commands to serve it are not those that quantmint plans for its recipe"


_ACTIVE: Final = frozenset(
    ("script", "iframe", "frame", "object", "embed", "applet", "link", "base", "form", "portal", "animate", "set")
)
"""Elements that run or load something, or change the targets of links."""
_ADDRESSES: Final = frozenset(("src", "srcset", "href", "xlink:href", "data", "action", "formaction", "poster"))


class _ActiveContent(HTMLParser):
    """A parser that collects the active content of a page: everything that could run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "link" and dict(attrs) == {"rel": "icon", "href": "data:,"}:
            return  # an empty icon keeps a browser from requesting one
        if tag in _ACTIVE:
            self.faults.append(f"{PAGE} has an element {tag}")
        for name, value in attrs:
            address = (value or "").strip().casefold()
            inside = address.startswith("#") or (
                name in ("src", "xlink:href", "href") and address.startswith("data:image/")
            )
            leads = tag == "a" and name == "href" and address.startswith("https://")
            if name.startswith("on") or (name == "http-equiv" and address == "refresh"):
                self.faults.append(f"{PAGE} has the attribute {name}")
            elif name in _ADDRESSES and not (inside or leads):
                self.faults.append(f"{PAGE} has an address in {name} of an element {tag}: {address[:40]}")

    handle_startendtag = handle_starttag


def _harmless(text: str) -> Iterator[str]:
    """Yield a fault for each piece of active content of a page: people open it because they trust this check."""
    parser = _ActiveContent()
    parser.feed(text)
    parser.close()
    yield from first_five(parser.faults, "such places")
    if re.search(r"url\(\s*[\"']?(?!#|data:image/)|@import|expression\(", text, re.IGNORECASE):
        yield f"{PAGE} has a style that loads something"


def _figures(texts: Mapping[str, str], gate: GateReport) -> Iterator[str]:
    """Yield a sentence for each figure of the gate that is absent from the report's files, in any version."""
    yield from _tables(f"{EVIDENCE}/{REPORT_CARD}", texts[REPORT_CARD], gate)
    for result in gate.accuracy:
        for value in (result.baseline, result.candidate):
            if escape(level(result, value)) not in texts[PAGE]:
                yield f"{EVIDENCE}/{PAGE} does not show that {result.task} has {plain_text(level(result, value))}"
    if gate.verdict.value not in texts[PAGE]:
        yield f"{EVIDENCE}/{PAGE} does not show the verdict {gate.verdict.value}"
    try:
        if "<!" in texts[JUNIT]:
            raise ElementTree.ParseError("found a declaration")
        cases = len(list(ElementTree.fromstring(texts[JUNIT]).iter("testcase")))  # noqa: S314 - no declarations
    except ElementTree.ParseError as error:
        yield f"{EVIDENCE}/{JUNIT} is not XML: {error}"
        return
    if cases != len(gate.findings):
        yield f"{EVIDENCE}/{JUNIT} has {cases} cases, the gate has {len(gate.findings)} findings"


def _data(
    subject: ReleaseUnderTest, data: Mapping[str, Any], measurements: Measurements, gate: GateReport
) -> Iterator[str]:
    """Yield a sentence for each difference of report.json from the evidence that it was made from."""
    # Both sides pass the same parser, so that 0 and 0.0 are equal.
    yield from _data_differences("the gate's report", gate.to_json(), GateReport.from_json(data["gate"]).to_json())
    launches = [MeasuredLaunch.from_json(launch).to_json() for launch in data["launches"]]
    yield from _data_differences("the launches", [launch.to_json() for launch in measurements.launches], launches)
    if data["recipe"] != subject.text(RECIPE):
        yield f"{DATA} shows another recipe than {RECIPE}"
    for side, count in zip(("baseline", "candidate"), measurements.weights, strict=True):
        if data["size"][f"{side}_bytes"] != count:
            yield f"{DATA} says that the {side} takes {data['size'][f'{side}_bytes']} bytes, gate.json says {count}"


def _data_differences(what: str, expected: object, actual: object) -> Iterator[str]:
    sentences = [
        f"{DATA}: {what}: {change.path[2:]} is {change.new!r:.60}, the evidence says {change.old!r:.60}"
        for change in difference(plain(expected), plain(actual))
    ]
    yield from first_five(sentences, f"differences of {what}")


def _tables(name_of_file: str, text: str, gate: GateReport) -> Iterator[str]:
    """Yield a sentence for each task whose scores are absent from a Markdown file, or different in any row."""
    rows = [cells_of(line) for line in text.splitlines() if line.startswith("|")]
    if f"**{gate.verdict.value}**" not in text:
        yield f"{name_of_file} does not show the verdict {gate.verdict.value}"
    for result in gate.accuracy:
        name = plain_text(f"{result.task} ({result.metric})")
        about = [row for row in rows if row and row[0] == name]
        levels = [plain_text(level(result, value)) for value in (result.baseline, result.candidate)]
        if not about:
            yield f"{name_of_file}: the card has no scores of {result.task}, which the gate judged"
        for row in about:
            if list(row[1:3]) != levels:
                shown, expected = " and ".join(row[1:3]), " and ".join(levels)
                wrong = f"{result.task} {shown}, the gate says {expected}"
                yield f"{name_of_file}: the card's numbers are not the gate's: {wrong}"


def _metadata(subject: ReleaseUnderTest) -> Iterator[str]:
    front_matter = re.match(r"---\n(.*?\n)---\n", subject.text(CARD), re.DOTALL)
    data = parse(front_matter[1], CARD).data if front_matter else {}
    repo = subject.manifest.base.repo
    base = data.get("base_model")
    if ([base] if isinstance(base, str) else base) != ([repo] if repo else None):
        yield f"{CARD}: base_model is {base}, quantmint.json says {repo}"
    if repo and data.get("base_model_relation") != "quantized":
        yield f"{CARD}: base_model_relation is {data.get('base_model_relation')}, expected quantized"


def _scores(subject: ReleaseUnderTest, gate: GateReport) -> Iterator[str]:
    results = {result.task: result for result in gate.accuracy}
    for name in subject.listing.files:
        if not name.startswith(f"{SCORES}/"):
            continue
        task = name.removeprefix(f"{SCORES}/").rpartition(".")[0]
        if task not in results:
            yield f"{name} is about a task that the gate did not judge"
            continue
        entries: Any = plain_value(subject.text(name), name)
        expected = round(100 * results[task].candidate, 2)
        for entry in entries if isinstance(entries, list) else [entries]:
            value = entry.get("value") if isinstance(entry, dict) else None
            if value != expected:
                yield f"{name}: the value is {value}, the gate says {expected}"
