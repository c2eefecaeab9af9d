"""quantmint due, requantize: which recipes would come out otherwise today, and making them so."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import click
from rich.markup import escape

from quantmint.eval.report.numbers import duration, size
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.cluster_options import dashboard_address, fleet_options
from quantmint.pipeline.commands.options import device_option, emit, json_option, store_option, vllm_option
from quantmint.pipeline.commands.tables import table, terminal
from quantmint.pipeline.store.tree import Store
from quantmint.pipeline.upkeep.due.due import Due, all_recipes, look
from quantmint.pipeline.upkeep.fleet.jobs import Options, devices_needed, foresee
from quantmint.pipeline.upkeep.fleet.records import RoundSummary, worst

SOMETHING_DUE: Final = 10
"""Exit code where at least one recipe is due: 1 to 5 are verdicts and errors."""
_SHOWN: Final = 3  # phrases of a line


@click.command(name="due")
@click.argument("recipes", nargs=-1)
@device_option
@vllm_option
@store_option
@json_option
def due(recipes: tuple[str, ...], device: str, vllm: str | None, store_path: Path, as_json: bool) -> int:
    """Say which RECIPES (names or YAML files) would come out otherwise than when they were last published, and why.

    Held against the newest release are the model's commit, the data sets', the recipe, the tools and what serves.
    Nothing is run and nothing large is fetched; what cannot be asked is told, and makes nothing due. --json lists every
    change. Without RECIPES all of ./recipes are looked at. Ends with 10 where something is due, else 5 where a release
    cannot be read, else 2 where a recipe is broken, else 0.

    Example: quantmint due
    """
    from quantmint.pipeline.serving.environment import serving_image

    serving_image()  # a wrong one is one error, and not one of each recipe
    reporter = reporter_for(json=as_json)
    store = Store(store_path, on_warning=reporter.warn)
    named = recipes or all_recipes()
    answers = look(tuple(dict.fromkeys(named)), store=store, vllm=vllm, device=device)
    for sentence in dict.fromkeys(sentence for answer in answers for sentence in answer.unknown):
        reporter.warn(sentence)
    if as_json:
        emit(
            {
                "due": sum(answer.state == "due" for answer in answers),
                "recipes": [answer.to_json() for answer in answers],
            }
        )
    else:
        _print_due(answers)
    codes = {"due": SOMETHING_DUE, "damaged": 5, "broken": 2}
    return max((codes.get(answer.state, 0) for answer in answers), default=0)


def _print_due(answers: Sequence[Due]) -> None:
    width = max((len(answer.name) for answer in answers), default=0)
    for answer in answers:
        phrases = (answer.reason.splitlines() or [""])[0].split("; ")
        ending = "; ..." if len(phrases) > _SHOWN or "\n" in answer.reason else ""
        tag = "-" if answer.release is None else answer.release.tag
        click.echo(f"{answer.name:<{width}}  {answer.state:<7}  {tag}  {'; '.join(phrases[:_SHOWN])}{ending}")
        if answer.stages and answer.state == "due":
            click.echo(f"  reruns: {_reruns(answer)}")


def _reruns(answer: Due) -> str:
    keys = [key for key, state in answer.stages if state == "rerun"]
    if keys and len(keys) == len(answer.stages):
        return "all stages"
    families = [key.removesuffix("-baseline").removesuffix("-candidate") for key in keys]
    return ", ".join(dict.fromkeys(families)) or "-"


@click.command(name="requantize")
@click.argument("recipes", nargs=-1)
@click.option(
    "--due/--all",
    "only_due",
    default=True,
    show_default=True,
    help="Only what is due; or all, what was judged before too.",
)
@click.option("--max-hours", type=click.FloatRange(min=0, min_open=True), help="Hours that all may take together.")
@click.option(
    "--max-disk",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="By how much the store may grow before nothing more is begun.",
)
@click.option("--wait/--no-wait", default=True, help="Wait for a recipe that another process works on, or leave it.")
@click.option("--dry-run", is_flag=True, help="Only say what would run, in which order, and why.")
@fleet_options
def requantize(
    recipes: tuple[str, ...],
    only_due: bool,
    on: str | None,
    max_disk: float | None,
    dry_run: bool,
    metrics_file: Path | None,
    store_path: Path,
    as_json: bool,
    **more_options: Any,
) -> int:
    """Make, prove and publish RECIPES (names or YAML files) that are due, beside each other; all of ./recipes if none.

    Each runs as `quantmint run` does, on devices that nobody else has, by priority and then by name. One that fails
    does not hold up the others; faults of networks and servers are tried again. Stopped at any moment, the same command
    goes on. Ends with the worst of the recipes' exit codes: 5, 2, 4, 1, 3, 0.

    Example: quantmint requantize --jobs 2
    """
    named = tuple(dict.fromkeys(recipes)) or all_recipes()
    options = Options(
        store=store_path,
        max_disk=None if max_disk is None else int(max_disk * 1e9),
        everything=not only_due,
        on=dashboard_address(on),
        **more_options,
    )
    if dry_run:
        return _foresee(named, options, as_json)
    summary = _run(named, options, metrics_file)
    if as_json:
        emit(summary.to_json())
    else:
        _print(summary)
    return summary.exit_code


def _run(named: Sequence[str], options: Options, metrics_file: Path | None) -> RoundSummary:
    from quantmint.pipeline.base.processes import stop_signals
    from quantmint.pipeline.upkeep.fleet.rounds import Fleet
    from quantmint.pipeline.upkeep.notices import Notices

    def write_line(line: str) -> None:
        with suppress(OSError):  # a log on a full disk, or who read it is gone: the recipes are not
            click.echo(line, err=True)

    def warn(message: str) -> None:
        write_line(f"warning: {message}")

    with closing(Notices(options.store, metrics_file, warn)) as notify:
        fleet = Fleet(options, write=write_line, warn=warn, on_end=notify)
        with stop_signals(fleet.stop):
            return fleet.run(named)


def _foresee(named: Sequence[str], options: Options, as_json: bool) -> int:
    jobs, others = foresee(named, options, reporter_for(json=as_json).warn)
    runs: list[dict[str, Any]] = [
        {
            "recipe": job.name,
            "reason": job.due.reason,
            "causes": job.due.causes,
            "priority": job.priority,
            "needs": devices_needed(job.due),
            "expected_s": job.state.last_duration_s,
            "reruns": [key for key, state in job.due.stages if state == "rerun"],
        }
        for job in jobs
    ]
    if as_json:
        keys = ("recipe", "state", "exit_code", "reason")
        emit({"runs": runs, "others": [{key: getattr(ended, key) for key in keys} for ended in others]})
    else:
        rows = table("", "recipe", "priority", "devices", "last took", "why", right=("", "priority", "last took"))
        for number, run in enumerate(runs, start=1):
            last_time = "-" if run["expected_s"] is None else duration(run["expected_s"])
            cells = (number, run["recipe"], run["priority"], run["needs"], last_time, escape(run["reason"]))
            rows.add_row(*map(str, cells))
        if runs:
            terminal().print(rows)
        else:
            click.echo("nothing would run")
        for ended in others:
            click.echo(f"{ended.recipe}: {ended.state}: {ended.reason}")
    return worst(ended.exit_code for ended in others if ended.state in {"broken", "damaged", "failed"})


def _print(summary: RoundSummary) -> None:
    rows = [
        (
            ended.recipe,
            ended.verdict if ended.state == "ran" and ended.verdict else ended.state,
            str(ended.exit_code),
            duration(ended.duration_s) if ended.attempts else "-",
            ended.tag or "-",
            escape("; ".join(ended.changes) or "-"),
        )
        for ended in summary.ended
    ]
    columns = ("recipe", "verdict", "exit", "time", "release", "what had changed")
    if rows:
        terminal().print(table(*columns, right=("exit", "time"), rows=rows))
    for ended in summary.ended:
        if ended.reason and ended.state not in {"current", "held"}:
            click.echo(f"{ended.recipe}: {ended.reason}" + (f"\n  log: {ended.log}" if ended.log else ""))
    if summary.grown_bytes is not None:
        click.echo(f"disk        {size(max(0, summary.grown_bytes))} more than before")
