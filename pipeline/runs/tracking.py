"""Log the figures of a finished run to MLflow: one MLflow run for each report, all of it read from `report.json`.

Parameters are the recipe, flattened; metrics are the gate's figures; tags are for searching. An MLflow run that was
begun and not finished, because the server went away, is filled again with the same values.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from quantmint.eval.comparison.model import ComparedReport, from_report
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import GateReport
from quantmint.eval.report.model import DATA, JUNIT, PAGE
from quantmint.eval.throughput import LATENCY_FIELDS
from quantmint.pipeline.base.errors import QuantmintError, UserError, first_line, redact
from quantmint.pipeline.runs.reports import gate_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from quantmint.pipeline.stages.setting import Setting
    from quantmint.pipeline.store.entries import Entry
    from quantmint.pipeline.store.tree import Store

FINGERPRINT = "quantmint.fingerprint"
"""Tag that tells whether a run is there already: the SHA-256 of its report.json, wherever that lies."""
_LONGEST_VALUE, _LONGEST_KEY = 5000, 250  # characters that every MLflow of the last years takes

_QUIET: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # seven, which is the default, keep a finished run waiting for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output is ours: one JSON object, or what we say
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True, slots=True)
class LoggedReport:
    """A report as MLflow logs it; `fingerprint` is the SHA-256 of report.json, `artifacts` are files to attach."""

    name: str
    fingerprint: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    artifacts: tuple[Path, ...]


def content_of(report: Path, store: Store) -> LoggedReport:
    """Return the content of a `report.json` for MLflow, with the files beside it and its gate record from ``store``.

    Raises `UserError` for a file that is missing or that this version cannot read.
    """
    try:
        raw = report.read_bytes()
        data = json.loads(raw)
        parsed = from_report(data, report)
        recipe = yaml.safe_load(data["recipe"])
    except (OSError, MeasurementError, KeyError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot be logged: {error}") from None
    fingerprint = hashlib.sha256(raw).hexdigest()
    files = (report.with_name(PAGE), report, gate_of(report, store), report.with_name(JUNIT))
    return LoggedReport(
        name=parsed.name,
        fingerprint=fingerprint,
        params=params(recipe),
        metrics=metrics(parsed),
        tags={FINGERPRINT: fingerprint, **tags(parsed)},
        artifacts=tuple(path for path in files if path is not None and path.is_file()),
    )


def params(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the recipe's values by dotted keys, without its tracking section; long values are cut."""
    sections = {name: value for name, value in recipe.items() if name != "tracking"}
    return {_key(name): _short(value) for name, value in _flat(sections, "")}


def metrics(report: ComparedReport) -> dict[str, float]:
    """Return every finite figure of the gate, by names such as "accuracy/TASK/difference"."""
    figures = _figures(report, report.gate)
    return {_key(name): float(value) for name, value in figures if value is not None and math.isfinite(value)}


def tags(report: ComparedReport) -> dict[str, str]:
    """Return the report's tags to search by, such as "quantmint.verdict", and a note with the verdict's reasons."""
    gate = report.gate
    note = "\n".join([f"**{gate.verdict.value}**", "", *(f"- {reason}" for reason in gate.reasons)])
    named = {
        "verdict": gate.verdict.value,
        "recipe": report.name,
        "model": report.model,
        "baseline": report.baseline,
        "scheme": report.scheme,
        "hardware": gate.hardware,
        "device": gate.device,
        "runtime": gate.runtime,
        "artefact": gate.artefact,
        "created": report.created,
    }
    return {f"quantmint.{name}": _short(value) for name, value in named.items()} | {"mlflow.note.content": _short(note)}


def _figures(report: ComparedReport, gate: GateReport) -> Iterator[tuple[str, float | None]]:
    yield "size/bytes", report.size.candidate_bytes
    yield "size/ratio", report.size_ratio
    for result in gate.accuracy:
        at = f"accuracy/{result.task}"
        for field in (
            "baseline", "candidate", "difference", "lower", "upper", "interval_low", "interval_high",
            "recovery", "recovery_low", "recovery_high", "flip_rate", "items",
        ):  # fmt: skip
            yield f"{at}/{field}", getattr(result, field)
        yield f"{at}/margin", gate.policy.margins.get(result.task)
    for cell in gate.throughput:
        at = f"throughput/{cell.cell}"
        repeated = ("ratio_low", "ratio_high", "p_faster") if cell.repeated else ()  # one launch has no interval
        for field in ("ratio", "baseline", "candidate", *repeated):
            yield f"{at}/{field}", getattr(cell, field)
        for field in LATENCY_FIELDS:
            before, after = cell.latency.get(field, (None, None))
            yield f"{at}/{field}_ms", after
            yield f"{at}/{field}_ms_baseline", before
    if gate.canary is not None:
        for field in ("agreement", "agreement_low", "agreement_high", "kl", "kl_low", "kl_high"):
            yield f"canary/{field}", getattr(gate.canary, field)
    if gate.acceptance is not None:
        for field in ("baseline", "candidate", "ratio", "low", "high"):
            yield f"acceptance/{field}", getattr(gate.acceptance, field)
    if gate.kl is not None:
        for field in ("value", "lower", "upper"):
            yield f"kl/{field}", getattr(gate.kl, field)
    for task, control in gate.control.items():
        yield f"control/{task}/flip_rate", control.rate
    for headline in gate.headlines:
        yield f"headline/{headline.name}", headline.measured


def _flat(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{at}.{name}" if at else str(name))
    else:
        yield at, value


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)[:_LONGEST_KEY]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "\N{HORIZONTAL ELLIPSIS}"


def log(content: LoggedReport, uri: str, experiment: str) -> tuple[str, bool]:
    """Log a report to the MLflow server ``uri``; return MLflow's run id, and False where it was logged already.

    MLflow itself reads MLFLOW_TRACKING_TOKEN, or ..._USERNAME and ..._PASSWORD. Raises `UserError`, never with a key in
    its message, for a wrong address, without the mlflow package, and where the server fails.
    """
    if "@" in urlsplit(uri).netloc:  # it would stand in recipes, histories and messages
        raise UserError(
            "found a user or a password in the address of MLflow, expected none",
            hint="MLflow reads MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    if "://" not in uri and not uri.startswith("databricks"):  # MLflow would take it for a folder
        raise UserError(f"found {uri}, expected the address of an MLflow server", hint=f"with its scheme: http://{uri}")
    try:
        for name, value in _QUIET.items():  # where the user has no settings of their own
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        for name in ("mlflow", "urllib3"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        client = MlflowClient(tracking_uri=uri)
        existing = client.get_experiment_by_name(experiment)
        where = client.create_experiment(experiment) if existing is None else existing.experiment_id
        tag = {FINGERPRINT: content.fingerprint}
        begun = client.search_runs([where], filter_string=f"tags.`{FINGERPRINT}` = '{content.fingerprint}'")
        if done := [run for run in begun if run.info.status == "FINISHED"]:
            return done[0].info.run_id, False
        run = begun[0] if begun else client.create_run(where, run_name=content.name, tags=tag)
        _fill(client, run.info.run_id, content)
        client.set_terminated(run.info.run_id)
    except ModuleNotFoundError as error:
        raise UserError(
            f"logging to MLflow needs {error.name}, which is not installed", hint="pip install 'quantmint[mlflow]'"
        ) from None
    except Exception as error:  # whatever a client, a network or a server raises
        cause = redact(first_line(error), os.environ)[:300]
        raise UserError(
            f"nothing, or not all, was logged to MLflow at {uri}: {cause}",
            hint="the same command goes on, and logs nothing twice",
        ) from error
    return run.info.run_id, True


def log_run(setting: Setting, report: Entry, warn: Callable[[str], None]) -> str | None:
    """Log a report if the recipe asks for it; return MLflow's run id, None where nothing was logged.

    A failure is only a warning, because the run itself is finished.
    """
    tracking = setting.recipe.tracking
    if tracking.mlflow is None:
        return None
    try:
        return log(content_of(report.file(DATA), setting.store), tracking.mlflow, tracking.experiment)[0]
    except QuantmintError as error:
        later = f"quantmint track {setting.recipe.name} --mlflow {tracking.mlflow}"
        warn(f"{error.message}; the run is not affected. To log it later: {later}")
        return None


def _fill(client: MlflowClient, run_id: str, content: LoggedReport) -> None:
    from mlflow.entities import Metric, Param, RunTag

    now = int(time.time() * 1000)
    client.log_batch(
        run_id,
        params=[Param(name, value) for name, value in content.params.items()],
        tags=[RunTag(name, value) for name, value in content.tags.items()],
        metrics=[Metric(name, value, now, 0) for name, value in content.metrics.items()],
    )
    for path in content.artifacts:
        client.log_artifact(run_id, str(path))
