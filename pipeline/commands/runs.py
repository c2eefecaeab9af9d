"""quantmint runs"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands.options import emit, json_option, store_option

if TYPE_CHECKING:
    from pipeline.store.runs import Run


@click.command(name="runs")
@click.option("--recipe", help="Only runs of this recipe.")
@store_option
@json_option
def command(recipe: str | None, store_path: Path, as_json: bool) -> int:
    """List past runs, the newest first, with how each ended."""
    from pipeline.store.runs import list_runs

    found = [run for run in list_runs(store_path) if recipe in (None, run.recipe)]
    if as_json:
        emit(
            [
                {
                    "recipe": run.recipe,
                    "started": run.started,
                    "finished": run.finished,
                    "verdict": run.verdict,
                    "exit_code": run.exit_code,
                    "facts": run.facts,
                }
                for run in found
            ]
        )
        return 0
    width = max((len(run.recipe) for run in found), default=0)
    for run in found:
        ended = run.verdict or ("unfinished" if run.finished is None else f"exit {run.exit_code}")
        began = run.started[:16].replace("T", " ")
        click.echo(f"{began} UTC  {run.recipe:<{width}}  {ended:<12}  {_took(run)}".rstrip())
    if not found:
        click.echo(f"no runs in {store_path}", err=True)
    return 0


def _took(run: Run) -> str:
    """From start to end, for people; nothing for a run that has no end."""
    from eval.report.numbers import duration

    if run.finished is None:
        return ""
    return duration((datetime.fromisoformat(run.finished) - datetime.fromisoformat(run.started)).total_seconds())
