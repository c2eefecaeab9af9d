"""The gate's record on disk: enough to judge again, without the models.

folder/gate.json                          verdict, findings, policy, servers, launches of every cell
folder/samples/<task>.<side>.json         scores per item, named with their SHA-256 in gate.json
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from eval.errors import MeasurementError
from eval.gate import GateReport, Policy, judge
from eval.measurements import Measurements
from eval.samples import SampleSet

SCHEMA = 1


def write(folder: Path, measurements: Measurements, report: GateReport) -> Path:
    """Write a judgement with its measurements into `folder`; returns the path of `gate.json`.

    The samples are written first, so that a `gate.json` never names files that are not there.
    """
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, dict[str, str]]] = {}
    for task, pair in measurements.samples.items():
        files[task] = {}
        for side, samples in zip(("baseline", "candidate"), pair, strict=True):
            data = json.dumps(samples.to_json(), separators=(",", ":")).encode()
            name = f"samples/{re.sub(r'[^A-Za-z0-9._-]', '_', task)}.{side}.json"
            (folder / name).write_bytes(data)
            files[task][side] = {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
    path = folder / "gate.json"
    content = {"schema": SCHEMA, **report.to_json(), "measurements": {**measurements.to_json(), "samples": files}}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> tuple[Measurements, GateReport]:
    """Read a `gate.json` with its samples.

    Raises `MeasurementError` where a file is missing, is not what its hash says, or is not a record of this schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise MeasurementError(f"{path}: schema {data['schema']}, this version reads {SCHEMA}")
        recorded = data["measurements"]
        samples = {
            task: (_samples(path.parent, sides["baseline"]), _samples(path.parent, sides["candidate"]))
            for task, sides in recorded["samples"].items()
        }
        return Measurements.from_json(recorded, samples), GateReport.from_json(data)
    except OSError as error:
        raise MeasurementError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise MeasurementError(f"{path}: not a record of the gate: {error!r}") from error


def rejudge(path: Path, policy: Policy | None = None) -> GateReport:
    """Judge again from the published numbers, by the recorded policy or by your own.

    `path` is a `gate.json`. Nothing of the recorded verdict is used; compare the result with `read(path)[1]`.
    """
    measurements, recorded = read(path)
    return judge(measurements, policy or recorded.policy)


def _samples(folder: Path, entry: dict[str, Any]) -> SampleSet:
    path = folder / entry["file"]
    if not path.resolve().is_relative_to(folder.resolve()):
        raise MeasurementError(f"{entry['file']}: lies outside the record's folder")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise MeasurementError(f"{path}: SHA-256 differs from the recorded {entry['sha256']}")
    return SampleSet.from_json(json.loads(data))
