"""The gate's record on disk: enough to judge again, without the models.

folder/gate.json                          version of the judgement, verdict, findings, policy, servers, launches, canary
folder/samples/<task>.<side>.json.gz      scores per item, named with their SHA-256 in gate.json; the sides are
                                          baseline and candidate, and again of a control
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import GateReport, Policy, judge
from quantmint.eval.measurements import Measurements
from quantmint.eval.samples import SampleSet

NAME = "gate.json"
SCHEMA = 2
_UNNAMED = 1
"""Version of the judgement in records that name none."""
LARGEST = 1 << 26
"""Bytes that a sample file may unpack to: MMLU takes four million, and a record may come from anywhere."""
_RATIO = 20
"""Most unpacked bytes for each packed byte: hashes hardly pack, and samples of real runs have 3 to 4."""
_SMALL = 1 << 20
"""Bytes that a file may unpack to whatever it is packed into."""


def write(folder: Path, measurements: Measurements, report: GateReport) -> Path:
    """Write a judgement with its measurements into `folder`; returns the path of `gate.json`.

    The samples are written first, so that a `gate.json` never names files that are not there. The bytes depend on
    nothing but the arguments (a gzip member can hold a time: it is 0).
    """
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    files = {
        "samples": {
            task: {
                "baseline": _write_samples(folder, task, "baseline", baseline),
                "candidate": _write_samples(folder, task, "candidate", candidate),
            }
            for task, (baseline, candidate) in measurements.samples.items()
        },
        "control": {task: _write_samples(folder, task, "again", again) for task, again in measurements.control.items()},
    }
    path = folder / NAME
    content = {
        "schema": SCHEMA,
        "judgement": report.judgement,
        **report.to_json(),
        "measurements": {**measurements.to_json(), **files},
    }
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
            task: (_samples(path, sides["baseline"]), _samples(path, sides["candidate"]))
            for task, sides in recorded["samples"].items()
        }
        control = {task: _samples(path, entry) for task, entry in recorded["control"].items()}
        return Measurements.read(recorded, samples, control), report_of(data)
    except OSError as error:
        raise MeasurementError(f"{error.filename}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MeasurementError(f"{path}: not a record of the gate: {_fault(error)}") from error


def read_report(path: Path) -> GateReport:
    """Read the judgement of a `gate.json` without its samples. Raises `MeasurementError` where it is none."""
    try:
        return report_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{path}: not a record of the gate: {error}") from error


def report_of(data: Any) -> GateReport:
    """Return the judgement in the parsed content of a `gate.json`. Raises `MeasurementError` if it holds none."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise MeasurementError(f"not a record of the gate in schema {SCHEMA}")
    judgement = {name: value for name, value in data.items() if name not in ("schema", "measurements")}
    judgement.setdefault("judgement", _UNNAMED)
    return GateReport.from_json(judgement)


def rejudge(path: Path, policy: Policy | None = None) -> GateReport:
    """Judge again from the recorded measurements, by `policy` (None: the recorded one).

    `path` is a `gate.json`. Nothing of the recorded verdict is used; compare the result with `read(path)[1]`. Raises
    `MeasurementError` as `read` does.
    """
    measurements, recorded = read(path)
    return judge(measurements, policy or recorded.policy)


def _fault(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"nothing at {error.args[0]}"
    return f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)


def _write_samples(folder: Path, task: str, side: str, samples: SampleSet) -> dict[str, str]:
    data = gzip.compress(json.dumps(samples.to_json(), separators=(",", ":")).encode(), mtime=0)
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", task)
    if plain != task:  # another's name may differ only in what a file name cannot hold
        plain += f".{hashlib.sha256(task.encode()).hexdigest()[:8]}"
    name = f"samples/{plain}.{side}.json.gz"
    (folder / name).write_bytes(data)
    return {"file": name, "sha256": hashlib.sha256(data).hexdigest()}


def _samples(record: Path, entry: Mapping[str, str]) -> SampleSet:
    path = record.parent / entry["file"]
    # A cache of the Hub's client keeps all files side by side and leads there by links: the record, and so its samples.
    beside = {record.parent.resolve(), record.resolve().parent}
    if ".." in Path(entry["file"]).parts or not any(path.resolve().is_relative_to(place) for place in beside):
        raise MeasurementError(f"{entry['file']}: lies outside the record's folder")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise MeasurementError(f"{path}: SHA-256 differs from the recorded {entry['sha256']}")
    most = min(LARGEST, max(_SMALL, _RATIO * len(data)))
    try:
        text = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise MeasurementError(f"{path}: cannot be unpacked: {error}") from error
    if len(text) > most:
        raise MeasurementError(f"{path}: {len(data):,} bytes, unpacks to more than {most:,} bytes")
    return SampleSet.from_json(json.loads(text))
