"""quantmint knobs, tune: what a launch of vLLM can set, and which values serve a model best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.progress import reporter_for
from quantmint.pipeline.commands.options import (
    FOLDER,
    emit,
    json_option,
    store_option,
    vllm_option,
    vllm_version_option,
)
from quantmint.pipeline.store.tree import Store

if TYPE_CHECKING:
    from quantmint.pipeline.serving.tuning.aiter import Gemms
    from quantmint.pipeline.serving.tuning.report import TuningReport
    from quantmint.pipeline.serving.tuning.space import Axis
    from quantmint.pipeline.serving.tuning.sweep import KnobSweep

_LARGEST_GRID = 4096


@click.command(name="knobs", context_settings={"ignore_unknown_options": True})  # a knob may begin with dashes
@click.argument("name", required=False)
@click.option(
    "--vllm-version",
    "version",
    metavar="VERSION",
    help="List what this version of vLLM has; with NAME, whether it has it.",
)
@click.option("--markdown", is_flag=True, help="Print the documentation's page of knobs.")
@json_option
def knobs(name: str | None, version: str | None, markdown: bool, as_json: bool) -> None:
    """List vLLM's settings, or explain one NAME: the value for each case, with its reason and source.

    Example: quantmint knobs --gpu-memory-utilization
    """
    from quantmint.pipeline.serving.environment import parse_version
    from quantmint.pipeline.serving.knobs.page import (
        condition_words,
        knob_page,
        knob_section,
        range_words,
        version_words,
    )
    from quantmint.pipeline.serving.knobs.table import Knob, knob, table

    number = None if version is None else parse_version(version)

    def plain(item: Knob) -> dict[str, object]:
        names = "name kind topic about default replaces sweep guides disagreement never"
        rules = [
            {
                **{field: getattr(rule, field) for field in ("value", "why", "source")},
                "when": condition_words(rule),
                "versions": range_words(*rule.vllm),
            }
            for rule in item.rules
        ]
        existence = {} if number is None else {"known": item.exists_in(number)}
        facts = {field: getattr(item, field) for field in names.split()}
        return {**facts, "versions": version_words(item), "rules": rules, **existence}

    if markdown:
        click.echo(knob_page(), nl=False)
        return
    if name is not None:
        entry = table().get(f"--{name.lstrip('-').replace('_', '-')}") or knob(name)
        if as_json:
            emit(plain(entry))
            return
        click.echo(knob_section(entry))
        if number is not None and not entry.exists_in(number):
            click.echo(f"\nvLLM {version} does not have it.")
        return
    shown = [item for item in table().values() if number is None or item.exists_in(number)]
    if as_json:
        emit([plain(item) for item in shown])
        return
    from quantmint.pipeline.commands.tables import table as make
    from quantmint.pipeline.commands.tables import terminal

    rows = [(item.name, item.kind, version_words(item), item.about) for item in shown]
    terminal().print(make("knob", "kind", "vLLM", "what it does", rows=rows))


@click.command(name="tune")
@click.argument("model")
@click.option("--target", metavar="NAME:GPUS", help="Default: the recipe's, or this machine (auto).")
@click.option("--knob", "knobs", metavar="NAME=V1,V2", multiple=True, help="Try this instead of the usual knobs.")
@click.option("--mode", type=click.Choice(["one-at-a-time", "grid"]), default="one-at-a-time", show_default=True)
@click.option(
    "--budget", metavar="TIME", help="Wall clock of the whole sweep, starts included: 90m, 2h (default: none)."
)
@click.option("--workload", metavar="NAME", help="Default: the recipe's.")
@click.option(
    "--repeat", type=click.IntRange(1), default=1, show_default=True, help="Launches of each plan in the screening."
)
@click.option(
    "--launches",
    type=click.IntRange(3),
    metavar="N",
    help="Launches of each finalist and the base plan, by turns, that decide (default: as few as can prove a gain).",
)
@click.option("--objective", type=click.Choice(["throughput", "latency"]), default="throughput", show_default=True)
@click.option("--max-ttft", type=click.FloatRange(0, min_open=True), metavar="MS", help="Limit of TTFT p99.")
@click.option("--max-itl", type=click.FloatRange(0, min_open=True), metavar="MS", help="Limit of ITL p99.")
@click.option("--tunableop", is_flag=True, help="Tune matrix kernels first (ROCm); the CSV files are kept.")
@click.option("--aiter", is_flag=True, help="Have AITER tune its matrix kernels for this model first (ROCm).")
@click.option("--out", type=FOLDER, help="Folder of the result (default: tuning/NAME).")
@click.option("--redo", is_flag=True, help="Measure everything again.")
@click.option("--dry-run", is_flag=True, help="Show what would be tried.")
@vllm_option
@vllm_version_option
@store_option
@json_option
def tune(model: str, mode: Literal["one-at-a-time", "grid"], tunableop: bool, **options: Any) -> int:
    """Measure which knobs serve MODEL (a recipe, a folder or a repository) best here, by `vllm bench serve`.

    Every value is screened; the best few and the base plan are then launched again by turns, and a rank test decides
    whether one is better. Every trial is a fresh server. Finished trials are kept: the same command goes on after an
    interruption, also with other knobs or a larger budget. Ends with 1 where no measured plan keeps the limits.

    Example: quantmint tune llama70b-fp8kv --budget 2h
    """
    from quantmint.pipeline.base.times import parse_duration
    from quantmint.pipeline.runs.tuning import KernelTuning, SubjectRequest, open_subject
    from quantmint.pipeline.runs.tuning import tune as measure
    from quantmint.pipeline.serving.knobs.table import table
    from quantmint.pipeline.serving.tuning.aiter import gemms
    from quantmint.pipeline.serving.tuning.space import (
        BASE,
        TUNABLEOP,
        Axis,
        option_axes,
        parse_knob,
        without_base_values,
    )
    from quantmint.pipeline.serving.tuning.sweep import Design, KnobSweep, Objective

    as_json, dry_run = options["as_json"], options["dry_run"]
    reporter = reporter_for(json=as_json)
    limit = None if options["budget"] is None else parse_duration(options["budget"])
    knobs = [parse_knob(text) for text in options["knobs"]]
    store = Store(options["store_path"], on_warning=reporter.warn)
    named = {name: options[name] for name in ("target", "workload", "vllm", "vllm_version")}
    request = SubjectRequest(model, **named, measuring=not dry_run, tunableop=tunableop)
    opened = open_subject(request, store, reporter)
    subject = opened.subject
    if tunableop or options["aiter"]:
        _require_rocm(subject.kind)
    products = gemms(opened.facts, opened.arch, subject.plan(BASE)) if options["aiter"] else None
    axes = option_axes(knobs, version=subject.vllm.version) if knobs else opened.default_axes()
    axes = without_base_values(axes, subject.plan(BASE), lambda knob: table()[knob].default)
    if tunableop:
        axes = (Axis(TUNABLEOP, ("1",)), *axes)
    objective = Objective(options["objective"], options["max_ttft"], options["max_itl"])
    sweep = KnobSweep(subject, Design(axes, mode, options["repeat"], options["launches"]), objective)
    if mode == "grid":
        _require_small_grid(axes)
    folder = options["out"] or Path("tuning") / subject.name
    if dry_run:
        return _show(sweep, folder, as_json=as_json, products=products)
    kernels, redo = KernelTuning(tunableop, products), options["redo"]
    report, page = measure(sweep, store, limit, reporter, folder, existing=opened.existing, kernels=kernels, redo=redo)
    if as_json:
        emit({**report, "page": str(page.absolute())})
    else:
        _print(report, page)
    return 0 if report["best"] is not None else 1


def _require_rocm(kind: str) -> None:
    """Raise `UserError` where kernels are to be tuned on a ``kind`` of accelerator other than rocm."""
    if kind != "rocm":
        raise UserError(
            "--tunableop, --aiter: they choose among rocBLAS's, hipBLASLt's and AITER's kernels; elsewhere there is "
            "nothing to tune"
        )


def _require_small_grid(axes: Sequence[Axis]) -> None:
    """Raise `UserError` for a grid with more combinations than a sweep may have."""
    from quantmint.pipeline.serving.tuning.sweep import grid_size

    if grid_size(axes) > _LARGEST_GRID:
        raise UserError(
            f"a grid over {', '.join(axis.knob for axis in axes)} has {grid_size(axes):,} combinations, "
            f"expected at most {_LARGEST_GRID:,}",
            hint="name the knobs that depend on each other with --knob, or leave --mode grid out",
        )


def _print(report: TuningReport, page: Path) -> None:
    _print_points(report)
    click.echo(report["verdict"])
    for line in report["undecided"]:
        click.echo(line)
    if report["gate_again"]:
        click.echo(f"changes what the model answers: {', '.join(report['gate_again'])}; run the gate again")
    if report["best"] and report["serve_yaml"]:
        click.echo(f"\n{report['serve_yaml']}")
    click.echo(f"page  {page}")


def _print_points(report: TuningReport) -> None:
    from quantmint.pipeline.commands.tables import table, terminal
    from quantmint.pipeline.serving.tuning.report import SHORT, percent

    noise = report["noise"]
    rows = table("plan", *SHORT.values(), "launches", right=(*SHORT.values(), "launches"))
    for point in report["points"]:
        figures = [point["status"], *["-"] * (len(SHORT) - 1)]
        if point["ratios"]:
            same = {name for name in SHORT if noise and 1 / noise[name] <= point["ratios"][name] <= noise[name]}
            figures = [("~" if name in same else "") + percent(point["ratios"][name]) for name in SHORT]
        if point["number"] == 0 and len(point["cells"]) == 1:
            (cell,) = point["cells"].values()
            figures = [f"{cell[name]:,.4g}" + ("" if name == "output_throughput" else " ms") for name in SHORT]
        best = ", the best" if point["number"] == report["best"] else ""
        rows.add_row(f"{point['label']}{best}", *figures, str(point["runs"]))
    terminal().print(rows)
    for point in report["points"]:
        if point["why"]:
            click.echo(f"{point['label']}: {point['status']}: {point['why']}")
    for name, why in report["refused"].items():
        click.echo(f"{name}: refused: {why}")
    if report["not_tried"]:
        click.echo(f"not tried: {'; '.join(report['not_tried'])}")


def _show(sweep: KnobSweep, out: Path, *, as_json: bool, products: Gemms | None) -> int:
    from quantmint.pipeline.serving.tuning.contest import MOST_FINALISTS, contest_of
    from quantmint.pipeline.serving.tuning.space import BASE, TUNABLEOP, label
    from quantmint.pipeline.serving.tuning.subject import with_tunableop
    from quantmint.pipeline.serving.tuning.sweep import screening_trials
    from quantmint.pipeline.serving.tuning.tunableop import FOLDER

    kernels = (out / FOLDER).absolute()
    rows: list[dict[str, object]] = []
    if any(axis.knob == TUNABLEOP for axis in sweep.design.axes):
        search = with_tunableop(sweep.subject.plan(BASE), kernels, search=True)
        rows.append({"label": "TunableOp searches", "run": 0, "env": dict(search.env), "argv": list(search.argv)})
    if products is not None:
        name = f"AITER tunes {len(products.lines) - 1} products, which are tried too"
        rows.append({"label": name, "run": 0, "products": list(products.lines)})
    for trial in screening_trials(sweep.design):
        row: dict[str, object] = {"label": label(trial.point), "run": trial.run}
        try:
            plan = sweep.subject.plan(trial.point)
        except UserError as error:
            rows.append({**row, "refused": error.message})
            continue
        if any(knob == TUNABLEOP for knob, _ in trial.point):
            plan = with_tunableop(plan, kernels, search=False)
        rows.append({**row, "env": dict(plan.env), "argv": list(plan.argv)})
    if as_json:
        emit({"sweep": sweep.id, "target": sweep.subject.target, "trials": rows})
        return 0
    vllm, target = sweep.subject.vllm.version, sweep.subject.target
    least, most = (
        count * contest_of([BASE] * (count - 1), sweep.design.launches).launches for count in (2, 1 + MOST_FINALISTS)
    )
    decide = f"{least} to {most} more hold the best of them against the base plan"
    click.echo(f"{len(rows)} launches of vLLM {vllm} on {target}, which screen; {decide}:")
    for row in rows:
        again = ", again" if row["run"] else ""
        click.echo(f"  {row['label']}{again}" + (f": refused: {row['refused']}" if "refused" in row else ""))
    return 0
