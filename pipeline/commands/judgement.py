"""A judgement as it is printed: the verdict and why, then the figures that it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from eval.accuracy import Accuracy
from eval.gate import Finding, GateReport, Headline
from eval.throughput import Throughput
from eval.verdict import Verdict
from pipeline.commands.tables import paragraph, table, terminal

_COLOURS = {
    Verdict.PASS: "green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.FAIL: "red",
    Verdict.INVALID: "magenta",
}


def print_judgement(
    report: GateReport, recorded: GateReport, path: Path, *, own: bool, differences: Sequence[str]
) -> None:
    """The first screen of a report, in text; `own` says that the limits are not the recorded ones."""
    word = click.style(report.verdict.value, fg=_COLOURS[report.verdict], bold=True)
    click.echo(f"{word}  checkpoint {report.artefact}")
    click.echo(f"measured with {report.runtime} on {report.device or 'unknown device'} ({report.hardware})")
    if own:
        click.echo(f"judged by your policy; by its own, {path} says {recorded.verdict.value}")
    elif differences:
        click.echo(click.style(f"{path} does not follow from its own numbers:", fg="red", bold=True))
        for difference in differences:
            click.echo(f"  {difference}")
    else:
        click.echo(f"judged by its own policy; {path} says the same")
    click.echo()
    console = terminal()
    for finding in _worst_first(report.findings):
        label = f" {finding.label}" if finding.label else ""
        click.echo(paragraph(console, f"  {finding.verdict.value + label:<12} ", f"{finding.kind}: {finding.reason}"))
    if report.accuracy:
        _print_accuracy(console, report.accuracy)
    if report.throughput:
        _print_throughput(console, report.throughput)
    if report.headlines:
        _print_headlines(console, report.headlines)


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    order = list(Verdict)
    return sorted(findings, key=lambda finding: -order.index(finding.verdict))


def _print_accuracy(console: Console, results: Sequence[Accuracy]) -> None:
    interval = f"{results[0].confidence:.0%} interval"
    numbers = ("items", "baseline", "candidate", "change", interval, "recovery")
    rows = table("task", *numbers, right=numbers)
    for result in results:
        level = "{:.4g}" if result.kind == "perplexity" else "{:.2%}"
        rows.add_row(
            escape(result.task),
            f"{result.items:,}",
            level.format(result.baseline),
            level.format(result.candidate),
            f"{100 * result.difference:+.2f}",
            f"{100 * result.interval_low:+.2f}…{100 * result.interval_high:+.2f}",
            "-" if result.recovery is None else f"{result.recovery:.1%}",
        )
    console.print(rows)


def _print_throughput(console: Console, cells: Sequence[Throughput]) -> None:
    numbers = ("launches", "baseline tok/s", "candidate", "ratio", "interval")
    rows = table("cell", *numbers, right=numbers)
    for cell in cells:
        before, after = cell.launches
        rows.add_row(
            escape(cell.cell),
            f"{before}" if before == after else f"{before}, {after}",
            f"{cell.baseline:,.0f}",
            f"{cell.candidate:,.0f}",
            f"{cell.ratio:.3f}",
            f"{cell.ratio_low:.3f}…{cell.ratio_high:.3f}" if cell.repeated else "-",
        )
    console.print(rows)


def _print_headlines(console: Console, headlines: Sequence[Headline]) -> None:
    rows = table("the guides say", "factor", "here", "source", right=("factor", "here"))
    for headline in headlines:
        rows.add_row(
            escape(headline.title),
            f"{'up to ' if headline.upto else ''}{headline.promised:g}",
            "not measured" if headline.measured is None else f"{headline.measured:.2f}",
            escape(headline.source),
        )
    console.print(rows)
