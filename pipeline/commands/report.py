"""quantmint report, site, track: what runs came to, as files, as an index of all, and in an experiment tracker."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option, vllm_option

FORMATS = ("html", "markdown", "junit", "json")


@click.command(name="report")
@click.argument("subject", metavar="RECIPE_OR_PATH")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="html", show_default=True,
    help="The page, the section of a model card, test results for a CI system, or the data.",
)  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Copy it there.")
@vllm_option
@store_option
@json_option
def report(subject: str, form: str, output: Path | None, vllm: str | None, store_path: Path, as_json: bool) -> int:
    """Show the report of a recipe, of a published folder or of an entry of the store.

    Of a recipe it is that of its current state; where that has none, of its last run, which is then said.

    The page is told by its path; the other forms are printed, unless --output says where they go.
    """
    from pipeline.base.errors import UserError, shown_path
    from pipeline.stages.report import FILES

    folder = _folder(subject, vllm, store_path)
    file = (folder / FILES[form]).absolute()  # as it was named: a link to the newest release stays one
    if not file.is_file():
        raise UserError(
            f"{folder} has no {FILES[form]}: it was made by an earlier version.",
            hint="Make it again: quantmint run RECIPE --redo report",
        )
    if output is not None:
        try:
            shutil.copyfile(file, output)
        except OSError as error:
            raise UserError(f"--output: {output} cannot be written: {error.strerror}.") from None
        file = output.absolute()
    if as_json:
        data = (folder / FILES["json"]).absolute()
        emit({"report": str(file), "format": form, "data": str(data)})
    elif form == "html" or output is not None:
        click.echo(shown_path(file))
    else:
        click.echo(file.read_text(encoding="utf-8"), nl=False)
    return 0


def _folder(subject: str, vllm: str | None, store_path: Path) -> Path:
    """Where the files of the report lie: beside the data that a path names, or in the entry of a recipe's report."""
    from pipeline.base.errors import UserError
    from pipeline.stages import finished
    from pipeline.stages.planning import build_plan, find_entry, foreseen
    from pipeline.stages.session import open_setting
    from pipeline.store.tree import Store

    path = Path(subject)
    if path.is_dir() or path.suffix == ".json":
        return finished.find(subject, Store(store_path)).report.parent
    store = Store(store_path)
    try:
        setting = open_setting(subject, store=store, vllm=vllm)
    except UserError:
        made = finished.last(subject, store)  # its recipe is elsewhere: what it left is here
        if made is None:
            raise
        return made[1].path
    planned = next(planned for planned in foreseen(build_plan(setting), setting) if planned.key == "report")
    entry = find_entry(planned, setting)
    if entry is not None:
        return entry.path
    made = finished.last(setting.recipe.name, store)
    if made is None:
        raise UserError(f"{setting.recipe.name} has no report yet.", hint=f"Make it: quantmint run {subject}")
    run, entry = made
    since = f"`quantmint explain {subject}` says what changed since"
    click.echo(f"this is the report of the run of {run.started}; {since}", err=True)
    return entry.path


@click.command(name="site")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("site"),
    show_default=True,
    help="Folder of the site; what is there is brought up to date.",
)
@store_option
@json_option
def site(output: Path, store_path: Path, as_json: bool) -> int:
    """Render an index of all runs with their reports: plain files for any web server, or to be opened from the disk.

    Runs that the store has forgotten stay in the index; delete the folder to begin anew.
    """
    from pipeline.base.errors import shown_path
    from pipeline.base.progress import reporter_for
    from pipeline.stages.site import INDEX, build
    from pipeline.store.tree import Store

    reporter = reporter_for(json=as_json)
    built = build(output, Store(store_path, on_warning=reporter.warn))
    page = (output / INDEX).resolve()
    if as_json:
        emit({"page": str(page), "copied": built.copied, "runs": [row.to_json() for row in built.rows]})
        return 0
    click.echo(f"{len(built.rows)} runs, {built.copied} new reports")
    click.echo(f"page  {shown_path(page)}")
    return 0


@click.command(name="track")
@click.argument("finished", metavar="PATH_OR_RECIPE")
@click.option("--mlflow", "uri", required=True, metavar="URI", help="MLflow's tracking server: http://host:5000.")
@click.option("--experiment", default="quantmint", show_default=True, help="Experiment that the run is put into.")
@store_option
@json_option
def track(finished: str, uri: str, experiment: str, store_path: Path, as_json: bool) -> int:
    """Log a finished run to MLflow: its recipe, figures, verdict and report. What is there already stays as it is.

    PATH_OR_RECIPE is a published folder, a report.json, a report in the store, or the name of a recipe that was run.
    A key is read from MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """
    from pipeline.stages.finished import find
    from pipeline.stages.tracking import content_of, log
    from pipeline.store.tree import Store

    content = content_of(find(finished, Store(store_path)))
    logged = log(content, uri, experiment)
    if as_json:
        emit({"run_id": logged.run_id, "experiment": experiment, "new": logged.new, "fingerprint": content.fingerprint})
    else:
        click.echo(f"{'logged' if logged.new else 'was logged before:'} {content.name}, run {logged.run_id}")
    return 0
