"""quantmint requantize [RECIPES...]"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import (
    device_option,
    devices_option,
    emit,
    jobs_address,
    jobs_option,
    json_option,
    remote_option,
    store_option,
    vllm_option,
)

if TYPE_CHECKING:
    from pipeline.upkeep.fleet.events import Ended, Summary
    from pipeline.upkeep.fleet.forecast import Foreseen
    from pipeline.upkeep.fleet.jobs import Options


@click.command(name="requantize")
@click.argument("recipes", nargs=-1)
@click.option(
    "--due/--all",
    "only_due",
    default=True,
    show_default=True,
    help="Only what is due; or all, what was judged before and what failed lately too.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder whose recipes are meant where none is named (default: ./recipes).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Recipes at a time (default: one for each device, one without any; --on: all).",
)
@devices_option
@jobs_option
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How often a recipe is tried again after a fault of a network or a server.",
)
@click.option("--max-hours", type=click.FloatRange(min=0, min_open=True), help="Hours that all may take together.")
@click.option(
    "--max-disk",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="By how much the store may grow before nothing more is begun.",
)
@click.option(
    "--redo", metavar="STAGE", multiple=True, help="Make this stage again, of recipes that are not due too (as --all)."
)
@click.option("--wait/--no-wait", default=True, help="Wait for a recipe that another process works on, or leave it.")
@click.option("--dry-run", is_flag=True, help="Only say what would run, in which order, on which devices, and why.")
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep metrics for Prometheus in this file, for the node exporter's textfile collector.",
)
@device_option
@vllm_option
@store_option
@remote_option
@json_option
def command(
    recipes: tuple[str, ...],
    only_due: bool,
    folder: Path | None,
    jobs: int | None,
    devices: tuple[int, ...] | None,
    on: str | None,
    retries: int,
    max_hours: float | None,
    max_disk: float | None,
    redo: tuple[str, ...],
    wait: bool,
    dry_run: bool,
    metrics_file: Path | None,
    device: str,
    vllm: str | None,
    store_path: Path,
    remote: str | None,
    as_json: bool,
) -> int:
    """Make, prove and publish RECIPES (names or YAML files) that are due, beside each other; all of ./recipes if none.

    Each runs as `quantmint run` does, on devices that nobody else has, by priority and then by name. One that fails
    does not hold up the others; faults of networks and servers are tried again. Stopped at any moment, the same command
    goes on. Ends with the worst of the recipes' exit codes: 5, 2, 4, 1, 3, 0.
    """
    from pipeline.upkeep.due.due import all_recipes
    from pipeline.upkeep.fleet.jobs import Options

    named = tuple(dict.fromkeys(recipes)) or all_recipes(folder)
    options = Options(
        store=store_path,
        jobs=jobs,
        devices=devices,
        retries=retries,
        max_hours=max_hours,
        max_disk=None if max_disk is None else int(max_disk * 1e9),
        everything=not only_due,
        on=jobs_address(on, devices),
        redo=redo,
        wait=wait,
        vllm=vllm,
        remote=remote,
        device=device,
    )
    if dry_run:
        return _foresee(named, options, as_json)
    summary = _run(named, options, metrics_file)
    if as_json:
        emit(summary.to_json())
    else:
        _print(summary)
    return summary.exit_code


def _run(named: Sequence[str], options: Options, metrics_file: Path | None) -> Summary:
    from pipeline.upkeep.fleet.events import Event, line_of
    from pipeline.upkeep.fleet.jobs import Request
    from pipeline.upkeep.fleet.rounds import Fleet, stopping
    from pipeline.upkeep.notices import outlets

    def say(line: str) -> None:
        with suppress(OSError):  # a log on a full disk, or who read it is gone: the recipes are not
            click.echo(line, err=True)

    def warn(message: str) -> None:
        say(f"warning: {message}")

    with outlets(options.store, warn=warn, metrics_file=metrics_file) as told:

        def hear(event: Event) -> None:
            say(line_of(event))
            told.hear(event)

        fleet = Fleet(options, on_event=hear, warn=warn)
        fleet.add(Request(recipe) for recipe in named)
        fleet.close()
        with stopping(fleet):
            return fleet.run()


def _foresee(named: Sequence[str], options: Options, as_json: bool) -> int:
    from pipeline.base.progress import reporter_for
    from pipeline.upkeep.fleet.events import worst
    from pipeline.upkeep.fleet.forecast import foresee

    runs, left = foresee(named, options, reporter_for(json=as_json).warn)
    if as_json:
        keys = ("recipe", "state", "exit_code", "reason")
        others = [{key: getattr(ended, key) for key in keys} for ended in left]
        emit({"runs": [run.to_json() for run in runs], "others": others})
    else:
        _print_forecast(runs, left)
    return worst(ended.exit_code for ended in left if ended.state in {"broken", "damaged", "failed"})


def _print_forecast(runs: Sequence[Foreseen], left: Sequence[Ended]) -> None:
    from rich.markup import escape

    from pipeline.base.durations import duration
    from pipeline.commands.tables import table, terminal

    made = table("", "recipe", "priority", "devices", "last took", "why", right=("", "priority", "last took"))
    for number, run in enumerate(runs, start=1):
        if run.devices is None:
            has = f"{run.needs}, when they are free" if run.needs else "when there is room"
        else:
            has = ",".join(map(str, run.devices)) or (f"{run.needs} of the cluster" if run.needs else "none")
        took = "-" if run.expected_s is None else duration(run.expected_s)
        made.add_row(str(number), run.recipe, str(run.priority), has, took, escape(run.reason))
    if runs:
        terminal().print(made)
    else:
        click.echo("nothing would run")
    for ended in left:
        click.echo(f"{ended.recipe}: {ended.state}: {ended.reason}")


def _print(summary: Summary) -> None:
    from rich.markup import escape

    from pipeline.base.durations import duration
    from pipeline.commands.tables import size, table, terminal

    console = terminal()
    if summary.ended:
        made = table("recipe", "verdict", "exit", "time", "release", "what had changed", right=("exit", "time"))
        for ended in summary.ended:
            took = duration(ended.duration_s) if ended.attempts else "-"
            word = ended.verdict if ended.state == "ran" and ended.verdict else ended.state
            changed = "; ".join(ended.changes) or "-"
            made.add_row(ended.recipe, word, str(ended.exit_code), took, ended.tag or "-", escape(changed))
        console.print(made)
    for ended in summary.ended:
        if ended.reason and ended.state not in {"current", "held"}:
            click.echo(f"{ended.recipe}: {ended.reason}" + (f"\n  log: {ended.log}" if ended.log else ""))
    if summary.grown_bytes is not None:
        click.echo(f"disk        {size(max(0, summary.grown_bytes))} more than before")
