"""quantmint report, compare, site, track: what runs came to, alone, side by side, all of them, and in a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from quantmint.eval.report.numbers import count, percent, ratio, size, unit_of
from quantmint.pipeline.base.errors import UserError, shown_path
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import FILE, FOLDER, emit, json_option, store_option
from quantmint.pipeline.commands.tables import plain, table, terminal
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.eval.comparison.model import ComparedGroup, Comparison

FORMATS = ("html", "markdown", "junit", "json")


@click.command(name="report")
@click.argument("subject", metavar="RESULT")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="html", show_default=True,
    help="The page, the section of a model card, test results for a CI system, or the data.",
)  # fmt: skip
@click.option("--output", type=FILE, help="Copy it there.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
@store_option
@json_option
def report(subject: str, form: str, output: Path | None, opened: bool, store_path: Path, as_json: bool) -> None:
    """Print where the report of RESULT is, open it, or print it in another form.

    RESULT is a recipe that was run, a published folder or an entry of the store. The page is named by its path; the
    other forms are printed, unless --output says where they go.

    Example: quantmint report llama70b-fp8kv --open
    """
    from quantmint.pipeline.runs.reports import find
    from quantmint.pipeline.stages.report import FILES

    folder = find(subject, Store(store_path)).parent
    file = (folder / FILES[form]).absolute()  # as it was named: a link to the newest release stays one
    if not file.is_file():
        raise UserError(
            f"{folder} has no {FILES[form]}: it was made by an earlier version.",
            hint="Make it again: quantmint run RECIPE --redo report",
        )
    if output is not None:
        _write(output, file.read_bytes())
        file = output.absolute()
    if opened:
        import webbrowser

        if form != "html":
            raise UserError(f"--open: found --format {form}, expected the page (html)")
        if not webbrowser.open(file.as_uri()):
            raise UserError(f"--open: no browser was found on this machine; the page is {shown_path(file)}")
    if as_json:
        data = (folder / FILES["json"]).absolute()
        emit({"report": str(file), "format": form, "data": str(data)})
    elif form == "html" or output is not None:
        click.echo(shown_path(file))
    else:
        click.echo(file.read_text(encoding="utf-8"), nl=False)


def _write(output: Path, content: bytes) -> None:
    from quantmint.pipeline.store.disk import write_atomic

    try:
        write_atomic(output, content, temporary=output.with_name(f".{output.name}.partial"))
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written: {error.strerror}.") from None


@click.command(name="compare")
@click.argument("finished", nargs=-1, required=True, metavar="RESULT...")
@click.option("--output", type=FILE, metavar="FILE.html", help="Write the page there.")
@store_option
@json_option
def compare(finished: tuple[str, ...], output: Path | None, store_path: Path, as_json: bool) -> None:
    """Compare checkpoints side by side: accuracy, size and throughput.

    Each RESULT is a recipe that was run, a published folder, a report.json, or a report in the store.

    Example: quantmint compare llama70b-fp8kv llama70b-mxfp4 --output both.html
    """
    from quantmint.eval.comparison.model import read, side_by_side, to_json
    from quantmint.eval.comparison.page import render
    from quantmint.eval.errors import MeasurementError
    from quantmint.pipeline.runs.reports import find, gate_of

    if len(finished) < 2:
        raise UserError(f"found one checkpoint, {finished[0]}, expected at least two to compare")
    store = Store(store_path)
    reports = [find(name, store) for name in finished]
    try:
        comparison = side_by_side([read(report, gate_of(report, store)) for report in reports])
    except MeasurementError as error:
        raise UserError(str(error), hint="`quantmint run` makes a report of this version") from None
    if output is not None:
        _write(output, render(comparison).encode())
    if as_json:
        emit({**to_json(comparison), "page": None if output is None else str(output.resolve())})
        return
    _show(comparison)
    if output is not None:
        click.echo(f"page  {shown_path(output.resolve())}")


def _show(comparison: Comparison) -> None:
    console = terminal()
    for warning in comparison.warnings:
        console.print(f"[yellow]note:[/] {plain(warning)}")
    for group in comparison.groups:
        console.print(f"\n[bold]{plain(group.model)}[/]  16 bit: {plain(group.baseline[:12])}")
        _print_marks(console, group)
        _print_tasks(console, group)
        _print_direct(console, group)
        for note in group.notes:
            console.print(f"[yellow]note:[/] {plain(note)}")


def _print_marks(console: Console, group: ComparedGroup) -> None:
    who = table("", "checkpoint", "weights", "reported", "verdict", "measured on")
    figures = ("size", "of 16 bit", "recovery", "flips", "speed", "KV tokens", "canary")
    figures_table = table("", *figures, right=figures)
    for mark in group.marks:
        contender = mark.contender
        canary = contender.gate.canary
        letter = f"{mark.letter}{'*' if mark.on_front else ''}"
        place = f"{contender.gate.hardware}, {contender.gate.runtime}"
        reported = contender.created[:16].replace("T", " ")
        who.add_row(
            letter,
            plain(contender.name),
            contender.gate.artefact[:8],
            reported,
            contender.gate.verdict.value,
            plain(place),
        )
        figures_table.add_row(
            letter,
            size(contender.size.candidate_bytes),
            ratio(contender.size_ratio),
            "-" if mark.worst is None else percent(mark.worst.recovery),
            "-" if mark.worst is None or mark.worst.kind != "binary" else percent(mark.worst.flip_rate),
            "-" if mark.slowest is None else ratio(mark.slowest.ratio),
            count(contender.kv_tokens["candidate"]) if "candidate" in contender.kv_tokens else "-",
            "-" if canary is None else percent(canary.agreement),
        )
    console.print(who)
    console.print(figures_table)
    console.print("recovery and flips in the worst shared task, speed in the load of the least gain")
    if any(mark.on_front for mark in group.marks):
        console.print("* nothing here beats it in recovery of the worst shared task, size and speed together")


def _print_tasks(console: Console, group: ComparedGroup) -> None:
    if not group.tasks:
        return
    numbers = ("change", "interval", "items")
    rows = table("task", "", "verdict", *numbers, right=numbers)
    for task, metric in group.tasks:
        for number, mark in enumerate(group.marks):
            name = plain(f"{task}, {metric}") if number == 0 else ""
            if (result := mark.contender.accuracy(task, metric)) is None:
                rows.add_row(name, mark.letter, "not asked")
                continue
            verdict, unit = mark.contender.gate.verdict_of("accuracy", task), unit_of(result.kind)
            rows.add_row(
                name,
                mark.letter,
                "shown only" if verdict is None else verdict.value,
                unit.words(result.difference),
                unit.interval(result.interval_low, result.interval_high),
                f"{result.items:,}",
            )
    console.print(rows)


def _print_direct(console: Console, group: ComparedGroup) -> None:
    from quantmint.eval.accuracy import better

    if not group.direct:
        return
    console.print("the same items, answered by both")
    numbers = ("difference", "interval", "items")
    rows = table("", "task", *numbers, "", right=numbers)
    for direct in group.direct:
        pair = f"{group.marks[direct.second].letter} vs {group.marks[direct.first].letter}"
        for result in direct.results:
            unit = unit_of(result.kind)
            interval = unit.interval(result.interval_low, result.interval_high)
            change = unit.words(result.difference)
            rows.add_row(pair, plain(result.task), change, interval, f"{result.items:,}", better(result))
        for reason in direct.unknown:
            rows.add_row(pair, "", "", "", "", plain(reason))
    console.print(rows)


@click.command(name="site")
@click.option(
    "--output",
    type=FOLDER,
    default=Path("site"),
    show_default=True,
    help="Folder of the site; what is there is brought up to date.",
)
@store_option
@json_option
def site(output: Path, store_path: Path, as_json: bool) -> None:
    """Render an index of all runs with their reports, as plain files for a web server or to open from the disk.

    Runs that the store has forgotten stay in the index; delete the folder to begin anew.

    Example: quantmint site --output /srv/quantmint
    """
    from quantmint.pipeline.runs.site import INDEX, build

    reporter = reporter_for(json=as_json)
    rows, copied = build(output, Store(store_path, on_warning=reporter.warn))
    page = (output / INDEX).resolve()
    if as_json:
        emit({"page": str(page), "copied": copied, "runs": [row.to_json() for row in rows]})
        return
    click.echo(f"{len(rows)} runs, {copied} new reports")
    click.echo(f"page  {shown_path(page)}")


@click.command(name="track")
@click.argument("finished", metavar="RESULT")
@click.option("--mlflow", "uri", required=True, metavar="URI", help="MLflow's tracking server: http://host:5000.")
@click.option("--experiment", default="quantmint", show_default=True, help="Experiment that the run is put into.")
@store_option
@json_option
def track(finished: str, uri: str, experiment: str, store_path: Path, as_json: bool) -> None:
    """Log a finished run to MLflow: its recipe, figures, verdict and report. A run that was logged before stays as it
    is.

    RESULT is a recipe that was run, a published folder, a report.json, or a report in the store. A key is read from
    MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.

    Example: quantmint track llama70b-fp8kv --mlflow http://localhost:5000
    """
    from quantmint.pipeline.runs.reports import find
    from quantmint.pipeline.runs.tracking import content_of, log

    store = Store(store_path)
    content = content_of(find(finished, store), store)
    run, new = log(content, uri, experiment)
    if as_json:
        emit({"run_id": run, "experiment": experiment, "new": new, "fingerprint": content.fingerprint})
    else:
        click.echo(f"{'logged' if new else 'was logged before:'} {content.name}, run {run}")
