"""Finished entries of the store, and the ``record.json`` of each.

A record names no user, host or path, so that it can be published. It holds the whole payload: the fingerprint can be
computed again from it, and `pipeline.base.canonical.difference` of two payloads tells why a stage ran again.

A run does not read a 70 GB checkpoint again: a file with the recorded size and modification time counts as unchanged,
as in git's index. A file with another time is read once; if its bytes are equal, its time is set back to the recorded
one, so that a copied store is read only once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Final

from quantmint.pipeline.base.canonical import Json, UnstableValueError, fingerprint, plain
from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.store.disk import disk_errors, regular_files, sha256_of

SCHEMA: Final = 1
RECORD: Final = "record.json"
FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}")
ALWAYS_HASHED: Final = 1 << 20  # bytes; below this, reading costs less than wondering


@dataclass(frozen=True)
class FileFact:
    """One output file: bytes, SHA-256 in hex, modification time in ns since the epoch."""

    size: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True)
class EntryRecord:
    """The record of an entry. Times are ISO 8601 in UTC.

    ``payload`` is the mapping that the fingerprint was computed from, ``files`` the output files by name, ``result``
    small facts for later stages.
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
    def inputs(self) -> dict[str, str]:
        """Return the fingerprints of the entries that this one was made from, by the name of the input."""
        inputs = self.payload["inputs"]
        return {name: str(value) for name, value in inputs.items()} if isinstance(inputs, dict) else {}

    def to_json(self) -> bytes:
        """Return the bytes of ``record.json``: UTF-8 JSON, indented, with sorted keys."""
        return (json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> EntryRecord:
        """Read a record and check everything that does not need its files. Raises `ValueError` with the reason."""
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
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts or name in {"", ".", RECORD}:
                raise ValueError(f"it lists the file {name!r}, which is no name inside an entry")
            numbers = isinstance(fact.size, int) and isinstance(fact.mtime_ns, int)
            if not numbers or not isinstance(fact.sha256, str) or not FINGERPRINT.fullmatch(fact.sha256):
                raise ValueError(f"what it says about {name!r} has the wrong shape")
        if recomputed != record.fingerprint:
            raise ValueError(f"its payload has the fingerprint {recomputed[:12]}, not {str(record.fingerprint)[:12]}")
        return record


def check_payload(stage: str, payload: Mapping[str, object]) -> dict[str, Json]:
    """Return a copy of a payload in plain JSON.

    Raises `ValueError` unless its ``stage`` is this stage, and it has a ``version`` and ``inputs``, a mapping of names
    to fingerprints.
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
    """Return a copy of a stage's result as a later reader will see it.

    Raises `ValueError` for values that JSON cannot hold.
    """
    try:
        copy: dict[str, Json] = json.loads(json.dumps(dict(result), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a stage's result must be plain JSON: {error}") from None
    return copy


def timestamp(moment: datetime) -> str:
    """Return a time in UTC as ISO 8601, to the millisecond."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Entry:
    """A stage's complete output: a folder whose files must not be changed."""

    stage: str
    fingerprint: str
    path: Path
    record: EntryRecord

    def file(self, name: str) -> Path:
        """Return the path of an output file. Raises `StoreError` if the entry has no file of that name."""
        if name not in self.record.files:
            raise StoreError(f"{self.path} has no file {name!r}, only {', '.join(self.record.files) or 'none'}")
        return self.path / name

    @property
    def digest(self) -> str:
        """Return the SHA-256 over the names, digests and sizes of all files.

        It is equal for equal outputs, whenever they were made.
        """
        return fingerprint([[name, fact.sha256, fact.size] for name, fact in sorted(self.record.files.items())])

    def verify(self, *, advance: Callable[[int], None] = lambda _: None) -> None:
        """Hash every file and compare it with the record.

        ``advance`` is called with the size of each file when it is done. Raises `StoreError` for a file that is
        missing, changed or not in the record.
        """
        with disk_errors(self.path):
            for name, fact in self.record.files.items():
                reason = _fault(self.path / name, fact, always=True)
                if reason:
                    raise StoreError(f"{self.path / name} {reason}", hint="run the recipe again: it makes a new one")
                advance(fact.size)
            extra = regular_files(self.path).keys() - self.record.files.keys() - {RECORD}
        if extra:
            raise StoreError(f"{self.path / min(extra)} is not in the record of its entry", hint="move it elsewhere")


def mismatch(path: Path, record: EntryRecord) -> str | None:
    """Return how the first file that differs from the record differs; None if all agree. Raises `OSError`."""
    for name, fact in record.files.items():
        reason = _fault(path / name, fact, always=False)
        if reason:
            return f"{name} {reason}"
    return None


def _fault(path: Path, fact: FileFact, *, always: bool) -> str | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    if status.st_size != fact.size:
        return f"has {status.st_size:,} bytes, its record says {fact.size:,}"
    same_time = status.st_mtime_ns == fact.mtime_ns
    if same_time and not always and fact.size >= ALWAYS_HASHED:
        return None
    if sha256_of(path) != fact.sha256:
        return "has other bytes than its record says"
    now = path.stat()
    if not same_time and (now.st_mtime_ns, now.st_size) == (status.st_mtime_ns, status.st_size):
        with suppress(OSError):  # a store that others own: reading it again is only slower
            os.utime(path, ns=(now.st_atime_ns, fact.mtime_ns))
    return None
