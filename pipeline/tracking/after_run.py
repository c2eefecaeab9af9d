"""Logging at the end of a run: what goes wrong there is a warning, for the run itself is made and proven."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.errors import QuantmintError
from pipeline.finished import of_entry
from pipeline.stage import Setting
from pipeline.store.entries import Entry


def log_run(setting: Setting, report: Entry, warn: Callable[[str], None]) -> str | None:
    """Log a report where the recipe asks for it; returns MLflow's name of the run, None where it was not logged."""
    tracking = setting.recipe.tracking
    if tracking.mlflow is None:
        return None
    from pipeline.tracking.content import content_of
    from pipeline.tracking.mlflow_server import log

    try:
        return log(content_of(of_entry(report, setting.store)), tracking.mlflow, tracking.experiment).run_id
    except QuantmintError as error:
        later = f"quantmint track {setting.recipe.name} --mlflow {tracking.mlflow}"
        warn(f"{error.message}; the run is not affected. To log it later: {later}")
        return None
