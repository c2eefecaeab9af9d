"""quantmint run, explain, runs, gc: what the store of finished stages is filled, asked and emptied by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantmint.eval.report.numbers import duration, size
from quantmint.pipeline.base.canonical import ABSENT, JsonDifference
from quantmint.pipeline.base.errors import shown_path
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import (
    device_option,
    emit,
    json_option,
    on_option,
    remote_option,
    store_option,
    vllm_option,
)
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.pipeline.api import RunResult
    from quantmint.pipeline.runs.forecast import RunForecast
    from quantmint.pipeline.stages.advice import Advice
    from quantmint.pipeline.store.entries import Entry

_DIGEST = re.compile("[0-9a-f]{64}")


@click.command(name="run")
@click.argument("recipe")
@click.option("--until", metavar="STAGE", help="Stop after this stage, such as quantize or inspect.")
@click.option("--redo", metavar="STAGE", multiple=True, help="Run this stage again although it is cached.")
@click.option(
    "--launcher",
    type=click.Choice(["local", "endpoint"]),
    default="local",
    show_default=True,
    help="endpoint: ask servers that run already.",
)
@click.option(
    "--endpoint",
    "endpoints",
    metavar="SIDE=URL",
    multiple=True,
    help="baseline=URL and candidate=URL, for --launcher endpoint.",
)
@device_option
@on_option
@vllm_option
@store_option
@remote_option
@json_option
def run(recipe: str, store_path: Path, remote: str | None, as_json: bool, launcher: str, **options: Any) -> int:
    """Quantize, prove and, after a PASS, publish what RECIPE (a name or a YAML file) says.

    Finished stages are taken from the store; the same command goes on with an interrupted run.

    Example: quantmint run llama70b-fp8kv --until inspect
    """
    from quantmint.pipeline import api

    if (launcher == "endpoint") != bool(options["endpoints"]):
        raise click.UsageError("expected --launcher endpoint together with --endpoint baseline=URL and candidate=URL")
    reporter = reporter_for(json=as_json)
    result = api.run(recipe, store=store_path, remote_store=remote, reporter=reporter, **options)
    ending = _ending(result, reporter.warn)
    if as_json:
        emit(_answer(ending))
    else:
        _print(ending)
    return result.outcome.exit_code


@dataclass(frozen=True, slots=True)
class _Ending:
    """The result of a run and what is printed about it.

    ``reasons`` are those of the verdict, or of the stage that stopped the run. ``following`` is the forecast of a run
    with the advice's block, ``measured`` are runtime, hardware and device of the figures, ``tracked`` is MLflow's run
    id.
    """

    result: RunResult
    reasons: Sequence[str]
    advice: Advice
    following: RunForecast | None
    measured: Mapping[str, str] | None
    tracked: str | None


def _ending(result: RunResult, warn: Callable[[str], None]) -> _Ending:
    from quantmint.pipeline.runs.forecast import forecast_with
    from quantmint.pipeline.runs.search import known_groups
    from quantmint.pipeline.runs.tracking import log_run
    from quantmint.pipeline.stages.advice import advise

    outcome, setting = result.outcome, result.setting
    report = outcome.entry("report")
    tracked = None if report is None else log_run(setting, report, warn)
    judged = outcome.entry("gate") or (None if outcome.stopped is None else outcome.entry(outcome.stopped))
    reasons: object = [] if judged is None else judged.record.result["reasons"]
    groups = known_groups(setting) if outcome.exit_code else None
    advice = advise(setting, groups, verdict=outcome.verdict, stopped=outcome.stopped)
    return _Ending(
        result=result,
        reasons=list(map(str, reasons)) if isinstance(reasons, list) else [],
        advice=advice,
        following=forecast_with(setting, advice.paste) if advice.paste else None,
        measured=_measured(outcome.entry("gate")),
        tracked=tracked,
    )


def _answer(ending: _Ending) -> dict[str, Any]:
    """Return the run's result as the object that ``--json`` prints."""
    from quantmint.pipeline.publish.addresses import published_folder

    result, advice, following = ending.result, ending.advice, ending.following
    outcome, setting, page = result.outcome, result.setting, result.report
    checkpoint = published_folder(setting.recipe, setting.home) if result.published else None
    return {
        "recipe": setting.recipe.name,
        "verdict": None if outcome.verdict is None else outcome.verdict.value,
        "reasons": ending.reasons,
        **({"advice": advice.lines} if advice.lines else {}),
        **({"paste": advice.paste} if advice.paste else {}),
        **({"paste_seconds": following.seconds_of_all_tries} if following is not None else {}),
        "measured": ending.measured,
        "stopped": outcome.stopped,
        **({"auto": {"tries": result.tries}} if result.tries else {}),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "published": [asdict(publication) for publication in result.published],
        "report": None if page is None else str(page.absolute()),
        "tracked": ending.tracked,
        "stages": [
            {
                "stage": step.planned.key,
                "fingerprint": step.planned.fingerprint,
                "cached": step.cached,
                "seconds": round(step.seconds, 3),
                "path": str(step.entry.path.resolve()),
            }
            for step in outcome.steps
        ],
    }


def _print(ending: _Ending) -> None:
    """Print the verdict with its reasons, the advice, and where the results are."""
    from quantmint.pipeline.commands.publish import show_published

    result, measured = ending.result, ending.measured
    outcome, setting, page = result.outcome, result.setting, result.report
    if outcome.verdict is not None:
        from quantmint.pipeline.commands.tables import paragraph, terminal

        click.echo(f"\n{outcome.verdict.value}  {setting.recipe.name}")
        console = terminal()
        for reason in [*ending.reasons, *ending.advice.lines]:
            click.echo(paragraph(console, "  ", reason))
        if ending.advice.paste:
            click.echo(f"\n{ending.advice.paste}")
            if ending.following is not None:
                from quantmint.pipeline.commands.plan import total

                click.echo(f"a run with this takes {total(ending.following)}")
    if measured is not None:
        click.echo(f"measured    by {measured['runtime']} on {measured['device'] or measured['hardware']}")
    show_published(result.published, setting)
    if page is not None:
        click.echo(f"report      {shown_path(page.absolute())}")
    if ending.tracked is not None:
        click.echo(f"mlflow      run {ending.tracked} of {setting.recipe.tracking.experiment}")


def _measured(gate: Entry | None) -> dict[str, str] | None:
    """Return the runtime, hardware and device of the measurements, for which the verdict holds.

    None without a gate's record.
    """
    from quantmint.pipeline.stages.gate import GATE

    if gate is None or GATE not in gate.record.files:
        return None
    record = json.loads(gate.file(GATE).read_text(encoding="utf-8"))
    return {name: str(record[name]) for name in ("runtime", "hardware", "device")}


@click.command(name="explain")
@click.argument("recipe")
@vllm_option
@store_option
@json_option
def explain_command(recipe: str, vllm: str | None, store_path: Path, as_json: bool) -> None:
    """Explain which input of which stage changed since RECIPE was last run.

    Example: quantmint explain llama70b-fp8kv
    """
    from quantmint.pipeline.runs.planner import build_plan, explain, foreseen
    from quantmint.pipeline.runs.search import stand_in
    from quantmint.pipeline.runs.session import open_setting

    setting = stand_in(open_setting(recipe, store=Store(store_path), vllm=vllm))
    explained = explain(foreseen(build_plan(setting), setting), setting)
    if as_json:
        emit([{"stage": e.key, "state": e.state, "changes": [_change(c) for c in e.changes]} for e in explained])
        return
    for entry in explained:
        click.echo(f"{entry.key:<20} {entry.state}")
        for line in (line for change in entry.changes for line in _change_lines(change)):
            click.echo(f"{'':<20}   {line}")


def _change_lines(change: JsonDifference) -> Iterator[str]:
    """Yield a change in lines: of texts of several lines, such as a recipe's, those that differ."""
    path = change.path.removeprefix("$.")
    if not (isinstance(change.old, str) and isinstance(change.new, str) and "\n" in f"{change.old}{change.new}"):
        yield f"{path}: {_short(change.old)} -> {_short(change.new)}"
        return
    yield f"{path}:"
    compared = unified_diff(change.old.splitlines(), change.new.splitlines(), lineterm="", n=0)
    yield from (f"  {line}" for line in compared if not line.startswith(("---", "+++", "@@")))


def _short(side: object) -> str:
    return side[:12] + "…" if isinstance(side, str) and _DIGEST.fullmatch(side) else repr(side)


def _change(change: JsonDifference) -> dict[str, object]:
    sides = {"old": change.old, "new": change.new}
    return {"path": change.path, **{side: value for side, value in sides.items() if value is not ABSENT}}


@click.command(name="runs")
@click.option("--recipe", help="Only runs of this recipe.")
@store_option
@json_option
def runs(recipe: str | None, store_path: Path, as_json: bool) -> None:
    """List past runs, the newest first, with how each ended.

    Example: quantmint runs --recipe llama70b-fp8kv
    """
    from quantmint.pipeline.store.gc import list_runs

    listed = [run for run in list_runs(store_path) if recipe in (None, run.recipe)]
    if as_json:
        names = ("recipe", "started", "finished", "verdict", "exit_code", "facts")
        emit([{name: getattr(run, name) for name in names} for run in listed])
        return
    width = max((len(run.recipe) for run in listed), default=0)
    for run in listed:
        ended, elapsed = run.verdict or f"exit {run.exit_code}", ""
        if run.finished is None:
            ended = "killed" if run.killed else "running"
        else:
            began, end = (datetime.fromisoformat(moment) for moment in (run.started, run.finished))
            elapsed = duration((end - began).total_seconds())
        click.echo(f"{run.started[:16].replace('T', ' ')} UTC  {run.recipe:<{width}}  {ended:<12}  {elapsed}".rstrip())
    if not listed:
        click.echo(f"no runs in {store_path}", err=True)


@click.command(name="gc")
@click.option("--keep", type=click.IntRange(min=0), default=3, show_default=True, help="Runs of each recipe to keep.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@store_option
@json_option
def gc(keep: int, dry_run: bool, store_path: Path, as_json: bool) -> None:
    """Remove store entries that none of the newest runs of any recipe uses. Published releases are not touched.

    Example: quantmint gc --keep 3 --dry-run
    """
    from quantmint.pipeline.store.gc import apply, plan_gc

    plan = plan_gc(Store(store_path), keep=keep)
    freed = plan.freed_bytes if dry_run else apply(plan)
    if as_json:
        items = [{"path": str(item.path), "bytes": item.bytes, "why": item.why} for item in plan.remove]
        emit({"removed": items, "freed_bytes": freed, "dry_run": dry_run})
        return
    for item in plan.remove:
        click.echo(f"{size(item.bytes):>10}  {item.path}  {item.why}")
    click.echo(f"{'would free' if dry_run else 'freed'} {size(freed)}")
    if plan.young_bytes:
        click.echo(f"{size(plan.young_bytes)} more are needed by no run, and go once they have lain for an hour")
