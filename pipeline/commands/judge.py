"""quantmint gate, verify: a verdict from its recorded numbers, a release from what was published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from quantmint.eval import record
from quantmint.eval.accuracy import Accuracy
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import Finding, GateReport, changes, judge
from quantmint.eval.report.history import history_notes
from quantmint.eval.report.numbers import figure, level, percent, ratio, unit_of
from quantmint.eval.report.summary import worst_first
from quantmint.eval.throughput import Throughput
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import MODEL_FOLDER, PATH, emit, json_option, store_option
from quantmint.pipeline.commands.tables import paragraph, printable, table, terminal
from quantmint.pipeline.publish.verify.subject import UNSIGNED, CheckOutcome
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.pipeline.api import Verification

_SHOWN = 8  # details of a check that are printed


@click.command(name="gate")
@click.argument("subject", metavar="RESULT")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Judge by this margin on every gated task; 0.01 is one point.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, max_open=True),
    help="Judge at this confidence, of accuracy and of throughput.",
)
@click.option(
    "--min-ratio",
    type=click.FloatRange(0, min_open=True),
    help="Judge by this ratio to the baseline's output tokens/s.",
)
@store_option
@json_option
def gate(
    subject: str,
    margin: float | None,
    confidence: float | None,
    min_ratio: float | None,
    store_path: Path,
    as_json: bool,
) -> int:
    """Judge the recorded measurements of RESULT again, by the recorded limits or by your own.

    RESULT is a recipe that was run, a published folder, a gate.json or its folder, a report in the store, or a release
    elsewhere (org/name[@TAG], s3://bucket/prefix/name[@TAG]), of which only the evidence is fetched. The recorded
    verdict is compared and not used. Where a quantmint.json lists other files than those that are judged, the verdict
    is INVALID. Ends with the verdict's exit code.

    Example: quantmint gate published/llama70b-fp8kv --margin 0.01
    """
    file = _record_of(subject, Store(store_path), as_json=as_json)
    try:
        measurements, recorded = record.read(file)
    except MeasurementError as error:
        hint = "A record is a gate.json with the samples/ that were written beside it."
        raise UserError(str(error), hint=hint) from None
    policy = recorded.policy
    if margin is not None:
        policy = replace(policy, margins=dict.fromkeys(policy.margins, margin))
    if confidence is not None:
        policy = replace(policy, confidence=confidence, throughput_confidence=confidence)
    if min_ratio is not None:
        policy = replace(policy, min_ratio=min_ratio)
    replaced = policy != recorded.policy
    report = judge(measurements, policy)
    differences = () if replaced else changes(recorded, report)
    unlisted = [Finding.invalid("release", fault) for fault in _unlisted(file, recorded.artefact)]
    if unlisted:
        report = replace(report, verdict=Verdict.INVALID, findings=(*unlisted, *report.findings))
    if as_json:
        facts = {
            "path": str(file),
            "judged_by": "your policy" if replaced else "the recorded policy",
            "recorded": recorded.verdict.value,
            "differences": list(differences),
        }
        emit({**facts, **report.to_json()})
    else:
        print_judgement(report, recorded, file, replaced=replaced, differences=differences)
    return report.verdict.exit_code


def _record_of(subject: str, store: Store, *, as_json: bool) -> Path:
    from quantmint.eval.report.model import DATA
    from quantmint.pipeline.publish.release import EVIDENCE
    from quantmint.pipeline.publish.verify.run import fetch_evidence
    from quantmint.pipeline.runs import reports
    from quantmint.pipeline.stages.gate import GATE

    path = fetch_evidence(subject, reporter_for(json=as_json)) or Path(subject)
    if path.is_file() and path.name != DATA and path.suffix != ".yaml":
        return path
    places = [path / GATE, path / EVIDENCE / GATE]
    file = next((place for place in places if place.is_file()), None)
    if file is None and not (path.is_dir() and not (path / DATA).is_file()):
        file = reports.gate_of(reports.find(subject, store), store)
    if file is None:
        hint = "quantmint writes one into stage gate's entry of the store, and beside what it publishes."
        raise UserError(f"{subject}: found no {GATE}, neither there nor in {EVIDENCE}/.", hint=hint)
    return file


def _unlisted(file: Path, artefact: str) -> Iterator[str]:
    """Yield how a record, or a file beside it, contradicts the manifest of its release; none without a manifest.

    ``file`` is the record, ``artefact`` the digest of the checkpoint that it judged. A release that has lost the
    manifest that it was signed with is reported too.
    """
    from quantmint.pipeline.publish import manifest as manifests
    from quantmint.pipeline.publish.release import EVIDENCE, MANIFEST, SIGNATURE
    from quantmint.pipeline.store.disk import sha256_of

    root = file.parent.parent if file.parent.name == EVIDENCE else file.parent
    if not (root / MANIFEST).is_file():
        if (root / SIGNATURE).is_file():
            yield f"{root} is signed, but has no {MANIFEST} that lists what was"
        return
    try:
        manifest = manifests.read(root / MANIFEST)
    except manifests.ManifestError as error:
        yield str(error)
        return
    name = file.relative_to(root).as_posix()
    listed = manifest.files.get(name)
    if listed is None or listed.sha256 != sha256_of(file):
        what = "does not list it" if listed is None else f"lists it with the SHA-256 {listed.sha256[:12]}..."
        yield f"{name} is not the release's record: {MANIFEST} {what}"
    if manifest.artefact != artefact:
        yield f"{MANIFEST} is about checkpoint {manifest.artefact}, the record about {artefact}"
    for path, digest in manifest.files.items():
        # `quantmint release verify` hashes bytes; where the evidence alone was fetched, most files are elsewhere.
        size = (root / path).stat().st_size if (root / path).is_file() and path != name else digest.size
        if size != digest.size:
            yield f"{path} has {size:,} bytes, {MANIFEST} lists {digest.size:,}: something else was judged"


_COLOURS = {
    Verdict.PASS: "green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.FAIL: "red",
    Verdict.INVALID: "magenta",
}


def print_judgement(
    report: GateReport, recorded: GateReport, path: Path, *, replaced: bool, differences: Sequence[str]
) -> None:
    """Print the first screen of ``report``, with its ``differences`` from the ``recorded`` one in ``path``.

    ``replaced`` says that other limits than the recorded ones were used.
    """
    word = click.style(report.verdict.value, fg=_COLOURS[report.verdict], bold=True)
    click.echo(f"{word}  checkpoint {report.artefact}")
    click.echo(f"measured with {report.runtime} on {report.device or 'unknown device'} ({report.hardware})")
    if replaced:
        click.echo(f"judged by your policy; by its own, {path} says {recorded.verdict.value}")
    elif differences:
        click.echo(click.style(f"{path} does not follow from its own numbers:", fg="red", bold=True))
        for difference in differences:
            click.echo(f"  {difference}")
    else:
        click.echo(f"judged by its own policy; {path} says the same")
    click.echo()
    console = terminal()
    for finding in worst_first(report.findings):
        label = f" {finding.label}" if finding.label else ""
        click.echo(paragraph(console, f"  {finding.verdict.value + label:<12} ", f"{finding.kind}: {finding.reason}"))
    if report.accuracy:
        _print_accuracy(console, report.accuracy)
    if report.throughput:
        _print_throughput(console, report.throughput)
    if report.unmeasured_speed is not None:
        click.echo(report.unmeasured_speed)
    for note in history_notes(report):
        click.echo(paragraph(console, "", note))


def _print_accuracy(console: Console, results: Sequence[Accuracy]) -> None:
    rows = [
        (
            escape(result.task),
            f"{result.items:,}",
            level(result, result.baseline),
            level(result, result.candidate),
            unit_of(result.kind).words(result.difference),
            unit_of(result.kind).interval(result.interval_low, result.interval_high),
            "-" if result.recovery is None else percent(result.recovery),
        )
        for result in results
    ]
    numbers = ("items", "baseline", "candidate", "change", f"{results[0].confidence:.0%} interval", "recovery")
    console.print(table("task", *numbers, right=numbers, rows=rows))


def _print_throughput(console: Console, cells: Sequence[Throughput]) -> None:
    rows = [
        (
            escape(cell.cell),
            ", ".join(map(str, dict.fromkeys(cell.launches))),
            figure(cell.baseline),
            figure(cell.candidate),
            ratio(cell.ratio),
            f"{ratio(cell.ratio_low)} … {ratio(cell.ratio_high)}" if cell.repeated else "-",
        )
        for cell in cells
    ]
    numbers = ("launches", "baseline tok/s", "candidate", "ratio", "interval")
    console.print(table("cell", *numbers, right=numbers, rows=rows))


@click.command(name="verify")
@click.argument("subject", metavar="RELEASE")
@click.option("--key", type=PATH, help="PEM file with the public key of whom you trust to publish it.")
@click.option("--identity", help="Whom you trust, where it was signed without a key: an address or a workflow's URL.")
@click.option("--issuer", help="Who vouches for that identity: the OpenID provider's URL.")
@click.option("--unsigned", is_flag=True, help="Accept a release without a signature; none by a stranger is accepted.")
@click.option("--name", help="Name of the release that you expect, where the place's own name does not say it.")
@click.option("--source", type=MODEL_FOLDER, help="Folder of the model that it was made from, to compare with.")
@json_option
def verify_release(
    subject: str,
    key: Path | None,
    identity: str | None,
    issuer: str | None,
    unsigned: bool,
    name: str | None,
    source: Path | None,
    as_json: bool,
) -> int:
    """Check everything that can be checked of a release, with nothing but what was published.

    RELEASE is a folder, a repository (org/name), or a bucket (s3://bucket/prefix/name); @TAG behind it names
    another release than the current one. Every file is hashed, the signature and the provenance are followed, the
    checkpoint is inspected and the gate judges again, by the recipe's limits. Report and card are rendered again where
    this version of quantmint made them. VERIFIED says that a signer whom you name vouches for all of it; a release
    without a signature is CONSISTENT, UNSIGNED at best. With --source the weights, the configuration, the chat template
    and the tokenizer are compared with those of the 16-bit model.

    Example: quantmint release verify my-org/NAME --key signing.pub

    Ends with 0 when everything holds, with 1 when something does not, with 3 when nothing fails but something could
    not be checked (a release without a signature, or no key to check one with), with 2 when there is no release.
    """
    from quantmint.pipeline.api import verify

    reporter = reporter_for(json=as_json)
    verification = verify(
        subject,
        key=key,
        identity=identity,
        issuer=issuer,
        unsigned=unsigned,
        name=name,
        source=source,
        reporter=reporter,
    )
    if as_json:
        facts = {"place": subject, "exit_code": verification.exit_code, "conclusion": verification.conclusion}
        emit({**facts, "checks": [check.to_json() for check in verification.checks]})
    else:
        _print_checks(subject, verification)
    return verification.exit_code


def _print_checks(place: str, verification: Verification) -> None:
    marks = {
        CheckOutcome.OK: ("✓", "green"),
        CheckOutcome.FAILS: ("✗", "red"),
        CheckOutcome.NOT_CHECKED: ("?", "yellow"),
    }
    colours = {0: "green", 1: "red", 3: "yellow"}
    console = terminal()
    word, checks = verification.conclusion, verification.checks
    colour = "yellow" if word == UNSIGNED else colours[verification.exit_code]
    click.echo(f"{click.style(word, fg=colour, bold=True)}  {printable(place)}")
    click.echo()
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark, colour = marks[check.outcome]
        outcome = "" if check.outcome is CheckOutcome.OK else f"{check.outcome.value}: "
        # The escape sequences of a colour take no room: the mark is coloured after the lines were broken.
        text = paragraph(console, f"  {mark} {check.name:<{width}}  ", outcome + printable(check.reason))
        click.echo(text.replace(mark, click.style(mark, fg=colour), 1))
        for detail in check.details[:_SHOWN]:
            click.echo(paragraph(console, " " * (width + 6), printable(detail)))
        if len(check.details) > _SHOWN:
            click.echo(f"{' ' * (width + 6)}{len(check.details) - _SHOWN} more; --json has all")
