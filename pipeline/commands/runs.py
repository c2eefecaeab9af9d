"""quantmint runs"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option


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
    for run in found:
        ended = run.verdict or ("unfinished" if run.finished is None else f"exit {run.exit_code}")
        click.echo(f"{run.started}  {run.recipe:<24} {ended}")
    if not found:
        click.echo(f"no runs in {store_path}", err=True)
    return 0
