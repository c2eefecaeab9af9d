"""quantmint run, plan, explain, runs, gc: what the store of finished stages is filled, asked and emptied by."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantmint.eval.report.numbers import duration, size
from quantmint.pipeline.base.canonical import ABSENT, Change
from quantmint.pipeline.base.errors import shown_path
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import (
    MODEL_FOLDER,
    device_option,
    emit,
    json_option,
    on_option,
    remote_option,
    spread,
    store_option,
    vllm_option,
)
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.pipeline.recipe.schema import Recipe
    from quantmint.pipeline.store.entries import Entry

_DIGEST = re.compile("[0-9a-f]{64}")


@click.command(name="run")
@click.argument("recipe")
@click.option("--until", metavar="STAGE", help="Stop after this stage, such as quantize or inspect.")
@click.option("--redo", metavar="STAGE", multiple=True, help="Run this stage again although it is cached.")
@device_option
@on_option
@vllm_option
@store_option
@remote_option
@json_option
def run(
    recipe: str,
    until: str | None,
    redo: tuple[str, ...],
    device: str,
    on: str | None,
    vllm: str | None,
    store_path: Path,
    remote: str | None,
    as_json: bool,
) -> int:
    """Make what RECIPE says (a name or a YAML file), prove it, publish it if it passes.

    Finished stages are taken from the store; an interrupted run goes on with the same command.
    """
    from quantmint.pipeline.commands.publish import published_by, report_page, show_published
    from quantmint.pipeline.publish.places import published_folder
    from quantmint.pipeline.serving.host.detect import device_here
    from quantmint.pipeline.stages.advice import advise
    from quantmint.pipeline.stages.search import known_groups, run_search
    from quantmint.pipeline.stages.session import open_setting
    from quantmint.pipeline.stages.tracking import log_run
    from quantmint.pipeline.store.remote import open_tier

    reporter = reporter_for(json=as_json)
    setting = open_setting(
        recipe,
        store=Store(store_path, on_warning=reporter.warn),
        vllm=vllm,
        device=device,
        to_run=True,
        remote=None if remote is None else open_tier(remote, reporter.warn, device_here),
    )
    with spread(on, setting, reporter) as setting:
        outcome, setting, tries = run_search(setting, reporter, until=until, redo=redo)
    report, places = outcome.entry("report"), published_by(outcome)
    page = report_page(outcome, setting)
    checkpoint = published_folder(setting.recipe, setting.home) if places else None
    tracked = None if report is None else log_run(setting, report, reporter.warn)
    judged = outcome.entry("gate") or (None if outcome.stopped is None else outcome.entry(outcome.stopped))
    advised = advise(
        setting,
        known_groups(setting) if outcome.exit_code else None,
        verdict=outcome.verdict,
        stopped=outcome.stopped,
    )
    reasons: object = [] if judged is None else judged.record.result["reasons"]
    measured = _measured(outcome.entry("gate"))
    if as_json:
        emit(
            {
                "recipe": setting.recipe.name,
                "verdict": None if outcome.verdict is None else outcome.verdict.value,
                "reasons": reasons,
                **({"advice": advised.lines} if advised.lines else {}),
                **({"paste": advised.paste} if advised.paste else {}),
                "measured": measured,
                "stopped": outcome.stopped,
                **({"auto": {"tries": tries}} if tries else {}),
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "published": [asdict(one) for one in places],
                "report": None if page is None else str(page.absolute()),
                "tracked": tracked,
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
        )
        return outcome.exit_code
    if outcome.verdict is not None:
        from quantmint.pipeline.commands.tables import paragraph, terminal

        click.echo(f"\n{outcome.verdict.value}  {setting.recipe.name}")
        console = terminal()
        for reason in [*(reasons if isinstance(reasons, list) else []), *advised.lines]:
            click.echo(paragraph(console, "  ", str(reason)))
        if advised.paste:
            click.echo(f"\n{advised.paste}")
    if measured is not None:
        click.echo(f"measured    by {measured['runtime']} on {measured['device'] or measured['hardware']}")
    show_published(places, setting)
    if page is not None:
        click.echo(f"report      {shown_path(page.absolute())}")
    if tracked is not None:
        click.echo(f"mlflow      run {tracked} of {setting.recipe.tracking.experiment}")
    return outcome.exit_code


def _measured(gate: Entry | None) -> dict[str, str] | None:
    """What answered, and on what: a verdict is of that, and of nothing else."""
    from quantmint.pipeline.stages.gate import GATE

    if gate is None or GATE not in gate.record.files:
        return None
    told = json.loads(gate.file(GATE).read_text(encoding="utf-8"))
    return {name: str(told[name]) for name in ("runtime", "hardware", "device")}


@click.command(name="plan")
@click.argument("recipe")
@click.option(
    "--config",
    "config_folder",
    type=MODEL_FOLDER,
    help="Folder with the model's config.json, to plan without its weights and without a network.",
)
@vllm_option
@store_option
@json_option
def plan_command(recipe: str, config_folder: Path | None, vllm: str | None, store_path: Path, as_json: bool) -> None:
    """Show the stages of RECIPE, which of them are cached, and what it takes: time, memory, disk.

    Nothing is made. Ends with 2 where the disk is too small or the recipe asks for the impossible.
    """
    from quantmint.eval.gate.reach import reach
    from quantmint.pipeline.base.hardware import cautions
    from quantmint.pipeline.quantize.engines.algorithms import algorithm
    from quantmint.pipeline.serving.model.facts import schemes_of_experts
    from quantmint.pipeline.stages.ahead import ahead, reckoned, savings
    from quantmint.pipeline.stages.bench import outlook
    from quantmint.pipeline.stages.checks import as_asked
    from quantmint.pipeline.stages.cost import forecast
    from quantmint.pipeline.stages.gate import policy_of
    from quantmint.pipeline.stages.planning import build_plan, foreseen, missing_stages
    from quantmint.pipeline.stages.preflight import (
        disk_needed,
        model_for,
        predict,
        require_disk,
        require_room_to_publish,
        require_tokens,
    )
    from quantmint.pipeline.stages.search import stand_in
    from quantmint.pipeline.stages.session import open_setting
    from quantmint.pipeline.stages.source import config_folder as fetched
    from quantmint.pipeline.stages.source import require_tokenizer
    from quantmint.pipeline.store.disk import free_bytes

    setting = stand_in(open_setting(recipe, store=Store(store_path), vllm=vllm, config=config_folder))
    if setting.source.folder is not None:
        require_tokenizer(setting.source.folder)
    plan = foreseen(build_plan(setting), setting)
    missing = missing_stages(plan, setting)
    require_tokens(setting, missing)
    model = model_for(setting, config_folder or fetched(setting.source))
    prediction = predict(*model, setting.recipe)
    needed = disk_needed(prediction, missing, setting, plan)
    where = store_path.absolute()
    free = free_bytes(where)
    quantization, target, evaluation = setting.recipe.quantization, setting.recipe.target, setting.recipe.evaluation
    questions = as_asked(setting.suite, evaluation, setting.recipe.gate)
    chosen = setting.chosen
    auto: dict[str, Any] = {} if chosen is None else {"auto": {"said": chosen.line, **chosen.to_json()}}
    bench = outlook(setting) if any(planned.key == "bench" for planned in plan) else {}
    judged = reach(
        questions, policy_of(setting), evaluation.looks, noise=bench.get("noise"), seen=bench.get("ratio")
    ).to_json()
    costs = forecast(*model, setting.recipe, setting.device)
    asked = {name: task["expected"] for name, task in judged["tasks"].items()}
    times = ahead(plan, missing, setting, reckoned(setting, prediction, costs, asked, bench.get("seconds")))
    seconds = {key: spent for key, (spent, _) in times.items()}
    unknown = (None, None)  # of a library
    harm = algorithm(quantization.algorithm).caution(quantization.schemes)
    experts = schemes_of_experts(quantization, setting.config)
    served = cautions(
        target.hardware, quantization.scheme, quantization.kv_cache, quantization.format, expert_schemes=experts
    )
    told = {
        "recipe": setting.recipe.name,
        **auto,
        "source": setting.source.to_json(),
        "stages": [
            {
                "stage": p.key,
                "fingerprint": p.fingerprint,
                "cached": p.key not in missing,
                **dict(zip(("seconds", "by"), times.get(p.key, unknown), strict=True)),
            }
            for p in plan
        ],
        "seconds": sum(seconds.values()) + costs["rates"]["start"],
        "savings": [{"setting": what, "seconds": saved} for what, saved in savings(seconds, setting)],
        "predicted": asdict(prediction),
        "costs": costs,
        "disk": {"needed": needed, "free": free, "where": str(where)},
        "gate": judged,
        "bench": bench or None,
        "cautions": [*filter(None, (harm,)), *served],
    }
    if not as_json:
        _print_plan(setting.recipe, told)
    require_disk(needed, free, str(where))
    require_room_to_publish(setting, prediction, missing)
    if as_json:
        emit(told)  # last: standard output holds one object, the plan or why there is none


def _print_plan(recipe: Recipe, told: Mapping[str, Any]) -> None:
    from rich.markup import escape

    from quantmint.pipeline.commands.tables import print_outlook, table, terminal

    console = terminal()
    source = recipe.source.repo or recipe.source.folder
    console.print(f"[bold]{recipe.name}[/]  {escape(recipe.description)}")
    console.print(
        f"{escape(str(source))} -> {recipe.quantization.scheme}, KV cache {recipe.quantization.kv_cache}, "
        f"{recipe.quantization.format}, for {recipe.target.gpus} x {recipe.target.hardware}"
    )
    if "auto" in told:
        console.print(told["auto"]["said"])
    states = [
        (one["stage"], "cached" if one["cached"] else "to do", *_took(one), one["fingerprint"][:12])
        for one in told["stages"]
    ]
    console.print(table("stage", "state", "time", "", "fingerprint", right=("time",), rows=states))
    console.print(f"about {duration(told['seconds'])} in all, from here to the end")
    for saving in told["savings"]:
        console.print(f"  {saving['setting']} would save about {duration(saving['seconds'])}")
    predicted, disk = told["predicted"], told["disk"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in predicted["kept_because"].items())
    modules = f"{predicted['quantized']} modules quantized, {predicted['kept']} kept: {reasons}"
    ratio = predicted["source"] / predicted["checkpoint"]
    sizes = {
        "source": predicted["source"],
        f"checkpoint ({modules}, {ratio:.2f} x smaller)": predicted["checkpoint"],
        "weights on each device": predicted["weights_per_gpu"],
        "KV cache for one token, all layers": predicted["kv_bytes_per_token"],
        **{f"disk: {name}": count for name, count in disk["needed"].items()},
        "disk: free": disk["free"],
    }
    print_outlook(console, sizes, told["costs"])
    tasks = [
        (
            name,
            f"{task['items']:,}",
            "shown only" if task["margin"] is None else f"{task['margin']:.2%}",
            f"{task['detectable']:.2%}",
            f"{len(task['looks'])}",
            "-" if task["expected"] is None else f"{task['expected']:,}",
            "-" if task["passes"] is None else f"{task['passes']:.0%}",
        )
        for name, task in told["gate"]["tasks"].items()
    ]
    numbers = ("items", "margin", "detectable", "looks", "asked, about", "passes")
    console.print(table("task", *numbers, right=numbers, rows=tasks))
    console.print("detectable: the least margin that so many items can test; asked, passes: of a lossless candidate")
    console.print(
        f"all tasks: a lossless candidate passes with a chance of {told['gate']['passes']:.0%}; "
        f"one that loses all that the margins allow fails with one of {told['gate']['false_fails']:.0%} at most"
    )
    if told["bench"] is not None:
        console.print(_ahead(told["bench"], told["gate"]["speed"]))
    for caution in told["cautions"]:
        console.print(f"[yellow]caution:[/] {escape(caution)}")


def _took(stage: Mapping[str, Any]) -> tuple[str, str]:
    """A stage's time and where it is known from."""
    if stage["seconds"] is None:
        return "?", "a library's time is not predicted"
    return ("-", "") if stage["cached"] else (duration(stage["seconds"]), stage["by"].replace("seen", "as last time"))


def _ahead(bench: Mapping[str, Any], speed: Mapping[str, Any] | None) -> str:
    """What measuring the throughput takes, and what it can show."""
    assumed = "as assumed until some were seen" if bench["noise"] is None else "as last seen"
    said = [
        f"throughput: {bench['launches']} launches of {bench['prompts']:,} prompts, about "
        f"{duration(bench['seconds'])}, {assumed}"
    ]
    if speed is not None and speed["least"] is not None:
        said.append(
            f"  {speed['launches']} a side show {speed['min_ratio']:g} x of a checkpoint that really has "
            f"{speed['least']:.3f} x, where launches lie {speed['noise']:.1%} apart, {assumed}"
        )
    if speed is not None and speed["seen"] is not None:
        few = "more than a recipe can ask for" if speed["needed"] is None else f"{speed['needed']} a side"
        said.append(f"  for the {speed['seen']:.3f} x that was last seen it takes {few}")
    return "\n".join(said)


@click.command(name="explain")
@click.argument("recipe")
@vllm_option
@store_option
@json_option
def explain_command(recipe: str, vllm: str | None, store_path: Path, as_json: bool) -> None:
    """Say which input of which stage changed since RECIPE was last run."""
    from quantmint.pipeline.stages.planning import build_plan, explain, foreseen
    from quantmint.pipeline.stages.search import stand_in
    from quantmint.pipeline.stages.session import open_setting

    setting = stand_in(open_setting(recipe, store=Store(store_path), vllm=vllm))
    explained = explain(foreseen(build_plan(setting), setting), setting)
    if as_json:
        emit([{"stage": e.key, "state": e.state, "changes": [_change(c) for c in e.changes]} for e in explained])
        return
    for entry in explained:
        click.echo(f"{entry.key:<20} {entry.state}")
        for change in entry.changes:
            click.echo(f"{'':<20}   {change.path.removeprefix('$.')}: {_short(change.old)} -> {_short(change.new)}")


def _short(side: object) -> str:
    return side[:12] + "…" if isinstance(side, str) and _DIGEST.fullmatch(side) else repr(side)


def _change(change: Change) -> dict[str, object]:
    sides = {"old": change.old, "new": change.new}
    return {"path": change.path, **{side: value for side, value in sides.items() if value is not ABSENT}}


@click.command(name="runs")
@click.option("--recipe", help="Only runs of this recipe.")
@store_option
@json_option
def runs(recipe: str | None, store_path: Path, as_json: bool) -> None:
    """List past runs, the newest first, with how each ended."""
    from quantmint.pipeline.store.gc import list_runs

    found = [run for run in list_runs(store_path) if recipe in (None, run.recipe)]
    if as_json:
        names = ("recipe", "started", "finished", "verdict", "exit_code", "facts")
        emit([{name: getattr(run, name) for name in names} for run in found])
        return
    width = max((len(run.recipe) for run in found), default=0)
    for run in found:
        ended, took = run.verdict or f"exit {run.exit_code}", ""
        if run.finished is None:
            ended = "killed" if run.killed else "running"
        else:
            began, end = (datetime.fromisoformat(moment) for moment in (run.started, run.finished))
            took = duration((end - began).total_seconds())
        click.echo(f"{run.started[:16].replace('T', ' ')} UTC  {run.recipe:<{width}}  {ended:<12}  {took}".rstrip())
    if not found:
        click.echo(f"no runs in {store_path}", err=True)


@click.command(name="gc")
@click.option("--keep", type=click.IntRange(min=0), default=3, show_default=True, help="Runs of each recipe to keep.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@store_option
@json_option
def gc(keep: int, dry_run: bool, store_path: Path, as_json: bool) -> None:
    """Remove what none of the newest runs of any recipe uses. What was published is not touched."""
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
