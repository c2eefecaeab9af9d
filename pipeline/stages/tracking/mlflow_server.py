"""Logging to an MLflow server, once for each report.

A run that was begun and not finished, because the server went away, is gone on with: what it holds by then is the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.base.errors import QuantmintError, UserError
from pipeline.stages.finished import of_entry
from pipeline.stages.tracking.content import FINGERPRINT, Content, content_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from pipeline.stages.stage import Setting
    from pipeline.store.entries import Entry

_QUIET: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # seven, which is the default, keep a finished run waiting for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is ours: one JSON object, or what we say
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_BATCH = 100  # parameters or tags in one request


class TrackingError(UserError):
    """The figures were not logged; the run that they are of is not affected."""


@dataclass(frozen=True, slots=True)
class Logged:
    """Where a run was logged; `new` is false where it had been before."""

    run_id: str
    experiment: str
    new: bool


def log(content: Content, uri: str, experiment: str) -> Logged:
    """Log a finished run, unless this very report is there already.

    Keys are MLflow's own affair: it reads MLFLOW_TRACKING_TOKEN, or ..._USERNAME and ..._PASSWORD. Raises
    `TrackingError` in one sentence, which never holds a key.
    """
    refuse_credentials(uri)
    if "://" not in uri and not uri.startswith("databricks"):
        raise TrackingError(
            f"found {uri}, expected the address of an MLflow server", hint=f"with its scheme: http://{uri}"
        )
    with _quiet(), _explained(uri):
        client = _client(uri)
        found = client.get_experiment_by_name(experiment)
        where = client.create_experiment(experiment) if found is None else found.experiment_id
        run = _begun(client, where, content.fingerprint)
        if run is not None and run.info.status == "FINISHED":
            return Logged(run.info.run_id, experiment, new=False)
        if run is None:
            run = client.create_run(where, run_name=content.name, tags={FINGERPRINT: content.fingerprint})
        _fill(client, run.info.run_id, content)
        client.set_terminated(run.info.run_id)
        return Logged(run.info.run_id, experiment, new=True)


def log_run(setting: Setting, report: Entry, warn: Callable[[str], None]) -> str | None:
    """Log a report where the recipe asks for it; returns MLflow's name of the run, None where it was not logged.

    What goes wrong is a warning: the run itself is made and proven.
    """
    tracking = setting.recipe.tracking
    if tracking.mlflow is None:
        return None
    try:
        return log(content_of(of_entry(report, setting.store)), tracking.mlflow, tracking.experiment).run_id
    except QuantmintError as error:
        later = f"quantmint track {setting.recipe.name} --mlflow {tracking.mlflow}"
        warn(f"{error.message}; the run is not affected. To log it later: {later}")
        return None


def refuse_credentials(uri: str) -> None:
    """Refuse an address with a name or a password in it: it would stand in recipes, histories and messages."""
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        raise TrackingError(
            f"found a user or a password in the address of MLflow ({parts.hostname}), expected none",
            hint="MLflow reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )


def _client(uri: str) -> MlflowClient:
    try:
        from mlflow import MlflowClient
    except ModuleNotFoundError as error:
        raise TrackingError(
            f"logging to MLflow needs {error.name}, which is not installed", hint="pip install 'quantmint[mlflow]'"
        ) from None
    return MlflowClient(tracking_uri=uri)


def _begun(client: MlflowClient, experiment: str, fingerprint: str) -> Run | None:
    runs = client.search_runs([experiment], filter_string=f"tags.`{FINGERPRINT}` = '{fingerprint}'")
    finished = [run for run in runs if run.info.status == "FINISHED"]
    return next(iter(finished or runs), None)


def _fill(client: MlflowClient, run_id: str, content: Content) -> None:
    import time

    from mlflow.entities import Metric, Param, RunTag

    now = int(time.time() * 1000)
    listed: list[tuple[str, list[Any]]] = [
        ("params", [Param(name, value) for name, value in content.params.items()]),
        ("tags", [RunTag(name, value) for name, value in content.tags.items()]),
        ("metrics", [Metric(name, value, now, 0) for name, value in content.metrics.items()]),
    ]
    for kind, entities in listed:
        for start in range(0, len(entities), _BATCH):
            client.log_batch(run_id, **{kind: entities[start : start + _BATCH]})
    for path in content.artifacts:
        client.log_artifact(run_id, str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """MLflow's settings where the user has none of their own, its log without our output; all as before afterwards."""
    set_here = {name: value for name, value in _QUIET.items() if name not in os.environ}
    loggers = [logging.getLogger(name) for name in ("mlflow", "urllib3")]
    levels = [logger.level for logger in loggers]
    os.environ.update(set_here)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name in set_here:
            os.environ.pop(name, None)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Whatever a client, a network or a server raises, as one sentence with its first line."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
            if secret := os.environ.get(name):
                lines[0] = lines[0].replace(secret, "(hidden)")
        raise TrackingError(
            f"nothing, or not all, was logged to MLflow at {uri}: "
            f"{'nothing answers there' if _unreachable(error) else lines[0][:300]}",
            hint="the same command goes on, and logs nothing twice",
        ) from error


def _unreachable(error: BaseException | None) -> bool:
    """Whether no connection came about at all, whatever that was wrapped into."""
    from requests.exceptions import ConnectionError as NoConnection

    while error is not None:
        if isinstance(error, NoConnection):
            return True
        error = error.__cause__ or error.__context__
    return False
