"""quantmint track PATH_OR_RECIPE --mlflow URI"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.commands.options import emit, json_option, store_option


@click.command(name="track")
@click.argument("finished", metavar="PATH_OR_RECIPE")
@click.option("--mlflow", "uri", required=True, metavar="URI", help="MLflow's tracking server: http://host:5000.")
@click.option("--experiment", default="quantmint", show_default=True, help="Experiment that the run is put into.")
@store_option
@json_option
def command(finished: str, uri: str, experiment: str, store_path: Path, as_json: bool) -> int:
    """Log a finished run to MLflow: its recipe, figures, verdict and report. What is there already stays as it is.

    PATH_OR_RECIPE is a published folder, a report.json, a report in the store, or the name of a recipe that was run.
    A key is read from MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """
    from pipeline.finished import find
    from pipeline.store.tree import Store
    from pipeline.tracking.content import content_of
    from pipeline.tracking.mlflow_server import log

    content = content_of(find(finished, Store(store_path)))
    logged = log(content, uri, experiment)
    if as_json:
        emit({"run_id": logged.run_id, "experiment": experiment, "new": logged.new, "fingerprint": content.fingerprint})
    else:
        click.echo(f"{'logged' if logged.new else 'was logged before:'} {content.name}, run {logged.run_id}")
    return 0
