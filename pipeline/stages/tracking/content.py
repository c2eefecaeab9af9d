"""What is logged of a finished run: all from its `report.json`, so that last month's run logs as one of now does.

Parameters are the recipe, flattened; metrics the gate's figures; tags what one searches by. No secret has a place in a
recipe, and what is named like one is left out all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eval.comparison.model import Contender, from_report
from eval.errors import MeasurementError
from eval.gate import GateReport
from pipeline.base.errors import UserError
from pipeline.stages.finished import Finished

FINGERPRINT = "quantmint.fingerprint"
"""Tag that tells whether a run is there already: the SHA-256 of its report.json, wherever that lies."""
LONGEST_PARAM, LONGEST_TAG, LONGEST_KEY = 6000, 5000, 250  # characters that every MLflow of the last years takes

_SECRET = re.compile(r"token(?!iz|s\b)|secret|passw|credential|api.?key|access.?key", re.IGNORECASE)
_LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "e2el_p50", "e2el_p99")


@dataclass(frozen=True, slots=True)
class Content:
    """One run of a tracker. `artifacts` are files, logged under their names."""

    name: str
    fingerprint: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    artifacts: tuple[Path, ...]


def content_of(finished: Finished) -> Content:
    """Read what is to be logged; raises `UserError` where the report is none of this version."""
    try:
        raw = finished.report.read_bytes()
        report = json.loads(raw)
        found = from_report(report, finished.report)
        recipe = yaml.safe_load(report["recipe"])
        if not isinstance(recipe, dict):
            raise MeasurementError(f"{finished.report}: its recipe is no mapping")
    except OSError as error:
        raise UserError(f"{finished.report}: cannot be read: {error.strerror}") from None
    except (MeasurementError, KeyError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot be logged: {error}") from None
    fingerprint = hashlib.sha256(raw).hexdigest()
    files = (finished.page, finished.report, finished.gate, finished.junit)
    return Content(
        name=found.name,
        fingerprint=fingerprint,
        params=params(recipe),
        metrics=dict(metrics(found)),
        tags={FINGERPRINT: fingerprint, **tags(found)},
        artifacts=tuple(path for path in files if path is not None),
    )


def params(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The recipe with dotted keys; where it is logged is left out, as is what is named like a secret."""
    kept = {name: value for name, value in recipe.items() if name != "tracking"}
    return {_key(name): _short(value, LONGEST_PARAM) for name, value in _flat(kept, "")}


def metrics(found: Contender) -> Iterator[tuple[str, float]]:
    """Every figure of the gate, by task, cell and kind; what is no finite number is left out."""
    for name, value in _metrics(found, found.gate):
        if value is not None and math.isfinite(value):
            yield _key(name), float(value)


def tags(found: Contender) -> dict[str, str]:
    """What one searches by, and a note with the verdict's reasons."""
    gate = found.gate
    named = {
        "verdict": gate.verdict.value,
        "recipe": found.name,
        "model": found.model,
        "baseline": found.baseline,
        "scheme": found.scheme,
        "hardware": gate.hardware,
        "device": gate.device,
        "runtime": gate.runtime,
        "artefact": gate.artefact,
        "created": found.created,
    }
    note = "\n".join([f"**{gate.verdict.value}**", "", *(f"- {reason}" for reason in gate.reasons)])
    kept = {f"quantmint.{name}": _short(value, LONGEST_TAG) for name, value in named.items()}
    return {**kept, "mlflow.note.content": _short(note, LONGEST_TAG)}


def _metrics(found: Contender, gate: GateReport) -> Iterator[tuple[str, float | None]]:
    yield "size/bytes", found.size[1]
    yield "size/ratio", found.size_ratio
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
        for field in ("ratio", "baseline", "candidate"):
            yield f"{at}/{field}", getattr(cell, field)
        for field in ("ratio_low", "ratio_high", "p_faster"):  # of one launch there is no interval, and no test
            yield f"{at}/{field}", getattr(cell, field) if cell.repeated else None
        for field in _LATENCIES:
            before, after = cell.latency.get(field, (None, None))
            yield f"{at}/{field}_ms", after
            yield f"{at}/{field}_ms_baseline", before
    if gate.canary is not None:
        for field in ("agreement", "agreement_low", "agreement_high", "kl", "kl_low", "kl_high"):
            yield f"canary/{field}", getattr(gate.canary, field)
    for task, control in gate.control.items():
        yield f"control/{task}/flip_rate", control.rate
    for headline in gate.headlines:
        yield f"headline/{headline.name}", headline.measured


def _flat(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if not _SECRET.search(str(name)):
                yield from _flat(inner, f"{at}.{name}" if at else str(name))
    elif isinstance(value, list):
        yield at, json.dumps(list(_without_secrets(value)), ensure_ascii=False)
    else:
        yield at, value


def _without_secrets(values: list[Any]) -> Iterator[Any]:
    """A list, such as arguments of a server, without the values of flags that are named like a secret."""
    hidden = False
    for value in values:
        text = str(value)
        flag, separator, _ = text.partition("=")
        if hidden and not text.startswith("-"):
            yield "(hidden)"
            hidden = False
            continue
        hidden = text.startswith("-") and bool(_SECRET.search(flag)) and not separator
        yield f"{flag}=(hidden)" if separator and _SECRET.search(flag) else value


def _key(name: str) -> str:
    """A name in the letters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_KEY]


def _short(value: Any, longest: int) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
