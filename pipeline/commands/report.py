"""quantmint report RECIPE"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option, vllm_option


@click.command(name="report")
@click.argument("recipe")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Copy the page there.")
@vllm_option
@store_option
@json_option
def command(recipe: str, output: Path | None, vllm: str | None, store_path: Path, as_json: bool) -> int:
    """Print where the report of RECIPE's current state is."""
    from pipeline.errors import UserError
    from pipeline.planning import build_plan
    from pipeline.runner import find_entry, relative
    from pipeline.session import open_setting
    from pipeline.stages.report import DATA, PAGE
    from pipeline.store.tree import Store

    setting = open_setting(recipe, store=Store(store_path), vllm=vllm)
    planned = next(planned for planned in build_plan(setting) if planned.key == "report")
    entry = find_entry(planned, setting)
    if entry is None:
        raise UserError(f"{setting.recipe.name} has no report yet.", hint=f"Make it: quantmint run {recipe}")
    page = entry.file(PAGE).resolve()
    if output is not None:
        try:
            shutil.copyfile(page, output)
        except OSError as error:
            raise UserError(f"--output: {output} cannot be written: {error.strerror}.") from None
        page = output.resolve()
    if as_json:
        emit({"report": str(page), "data": str(entry.file(DATA).resolve())})
    else:
        click.echo(relative(page))
    return 0
