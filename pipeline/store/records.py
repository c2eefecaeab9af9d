"""What is known about a finished entry: ``record.json``.

A record names no user, host or path, so that it can be published. The payload is kept whole: its fingerprint
recomputes, and `pipeline.canonical.difference` of two payloads tells why a stage ran again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import PurePosixPath
from typing import Final

from pipeline.canonical import Json, UnstableValueError, fingerprint, plain

SCHEMA: Final = 1
RECORD: Final = "record.json"
FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileFact:
    """One output file: bytes, SHA-256 in hex, modification time in ns since the epoch."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class Record:
    """The record of an entry.

    ``started`` and ``finished`` are ISO 8601 in UTC; ``result`` is small facts for later stages.
    """

    stage: str
    fingerprint: str
    payload: dict[str, Json]
    files: dict[str, FileFact]
    result: dict[str, Json]
    tools: dict[str, str]
    started: str
    finished: str
    duration_s: float
    schema: int = SCHEMA

    @property
    def stage_version(self) -> Json:
        """Version of the stage that made this, as its payload says."""
        return self.payload["version"]

    @property
    def inputs(self) -> dict[str, str]:
        """Fingerprints of the entries that this was made from, by the name of the input."""
        inputs = self.payload["inputs"]
        return {name: str(value) for name, value in inputs.items()} if isinstance(inputs, dict) else {}

    def to_json(self) -> bytes:
        """Encode for ``record.json``, indented for readers."""
        return (json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Record:
        """Decode, with everything checked that does not need the files. Raises `ValueError` with the reason."""
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from None
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {data.get('schema')!r}, this version of quantmint reads {SCHEMA}")
        try:
            files = {name: FileFact(**fact) for name, fact in data.pop("files").items()}
            record = cls(files=files, **data)
            check_payload(record.stage, record.payload)
            recomputed = fingerprint(record.payload)
        except (KeyError, TypeError, AttributeError, UnstableValueError) as error:
            raise ValueError(f"it has the wrong shape ({error})") from None
        for name, fact in files.items():
            _check_file(name, fact)
        if recomputed != record.fingerprint:
            raise ValueError(f"its payload has the fingerprint {recomputed[:12]}, not {str(record.fingerprint)[:12]}")
        return record


def check_payload(stage: str, payload: Mapping[str, object]) -> dict[str, Json]:
    """Copy a payload to plain JSON.

    Raises `ValueError` unless it says ``stage`` (this one), ``version`` and ``inputs`` (a mapping of name to
    fingerprint).
    """
    copy = plain(payload)
    if not isinstance(copy, dict) or not {"stage", "version", "inputs"} <= copy.keys():
        raise ValueError("a payload needs the keys stage, version and inputs")
    inputs = copy["inputs"]
    if copy["stage"] != stage:
        raise ValueError(f"the payload is of stage {copy['stage']!r}, not {stage!r}")
    if not isinstance(inputs, dict) or not all(
        isinstance(v, str) and FINGERPRINT.fullmatch(v) for v in inputs.values()
    ):
        raise ValueError("inputs must map names to fingerprints of 64 hex digits")
    return copy


def check_result(result: Mapping[str, object]) -> dict[str, Json]:
    """Copy a stage's result to plain JSON, as it will be read back. Raises `ValueError` for what JSON cannot hold."""
    try:
        copy: dict[str, Json] = json.loads(json.dumps(dict(result), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a stage's result must be plain JSON: {error}") from None
    return copy


def timestamp(moment: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _check_file(name: str, fact: FileFact) -> None:
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or name in {"", ".", RECORD}:
        raise ValueError(f"it lists the file {name!r}, which is no name inside an entry")
    numbers = isinstance(fact.size, int) and isinstance(fact.mtime_ns, int)
    if not numbers or not isinstance(fact.sha256, str) or not FINGERPRINT.fullmatch(fact.sha256):
        raise ValueError(f"what it says about {name!r} has the wrong shape")
