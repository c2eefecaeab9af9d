"""quantmint run RECIPE"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import (
    device_option,
    emit,
    json_option,
    on_option,
    remote_option,
    store_option,
    vllm_option,
)

if TYPE_CHECKING:
    from pipeline.store.entries import Entry


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
def command(
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
    from dataclasses import replace

    from pipeline.cluster.spread import spread_over
    from pipeline.commands import published
    from pipeline.planning import build_plan, cut
    from pipeline.progress import reporter_for
    from pipeline.publish.opening import published_folder
    from pipeline.runner import relative, run_plan
    from pipeline.session import open_setting
    from pipeline.store.remote.tier import open_tier
    from pipeline.store.tree import Store
    from pipeline.tracking.after_run import log_run

    reporter = reporter_for(json=as_json)
    setting = open_setting(
        recipe,
        store=Store(store_path, on_warning=reporter.warn),
        vllm=vllm,
        device=device,
        to_run=True,
        remote=None if remote is None else open_tier(remote, reporter.warn),
    )
    plan = cut(build_plan(setting), until)
    for name in redo:
        cut(plan, name)
    from pipeline.preflight import require_means

    with spread_over(on, setting, reporter) as spread:
        setting = replace(setting, spread=spread)
        require_means(plan, setting, redo)
        outcome = run_plan(plan, setting, reporter, redo=redo)
    report, places = outcome.entry("report"), published.of(outcome)
    page = published.page(outcome, setting)
    checkpoint = published_folder(setting) if places else None
    tracked = None if report is None else log_run(setting, report, reporter.warn)
    judged = outcome.entry("gate") or (None if outcome.stopped is None else outcome.entry(outcome.stopped))
    reasons: object = [] if judged is None else judged.record.result["reasons"]
    measured = _measured(outcome.entry("gate"))
    if as_json:
        emit(
            {
                "recipe": setting.recipe.name,
                "verdict": None if outcome.verdict is None else outcome.verdict.value,
                "reasons": reasons,
                "measured": measured,
                "stopped": outcome.stopped,
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "published": published.as_json(places),
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
        from pipeline.commands.tables import paragraph, terminal

        click.echo(f"\n{outcome.verdict.value}  {setting.recipe.name}")
        console = terminal()
        for reason in reasons if isinstance(reasons, list) else []:
            click.echo(paragraph(console, "  ", str(reason)))
    if measured is not None:
        click.echo(f"measured    by {measured['runtime']} on {measured['device'] or measured['hardware']}")
    published.show(places, setting)
    if page is not None:
        click.echo(f"report      {relative(page.absolute())}")
    if tracked is not None:
        click.echo(f"mlflow      run {tracked} of {setting.recipe.tracking.experiment}")
    return outcome.exit_code


def _measured(gate: Entry | None) -> dict[str, str] | None:
    """What answered, and on what: a verdict is of that, and of nothing else."""
    from pipeline.stages.gate import GATE

    if gate is None or GATE not in gate.record.files:
        return None
    told = json.loads(gate.file(GATE).read_text(encoding="utf-8"))
    return {name: str(told[name]) for name in ("runtime", "hardware", "device")}
