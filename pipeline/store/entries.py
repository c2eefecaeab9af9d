"""A finished entry, checked against its record.

A 70 GB checkpoint is not read again for every run: a file whose size and modification time are those of the record
is taken as unchanged, the way git's index does it. Another time costs one reading; equal bytes then get the
recorded time back, so that a copied store is read only once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.canonical import fingerprint
from pipeline.errors import StoreError
from pipeline.store.disk import disk_errors, regular_files, sha256_of
from pipeline.store.records import RECORD, FileFact, Record

ALWAYS_HASHED: Final = 1 << 20  # bytes; below this, reading costs less than wondering


@dataclass(frozen=True)
class Entry:
    """The output of a stage: a folder that is complete and must not be changed."""

    stage: str
    fingerprint: str
    path: Path
    record: Record

    def file(self, name: str) -> Path:
        """Path of an output file. Raises `StoreError` if the entry has none of that name."""
        if name not in self.record.files:
            raise StoreError(f"{self.path} has no file {name!r}, only {', '.join(self.record.files) or 'none'}")
        return self.path / name

    @property
    def digest(self) -> str:
        """SHA-256 over name, SHA-256 and size of all files: the same for equal outputs, whenever they were made."""
        return fingerprint([[name, fact.sha256, fact.size] for name, fact in sorted(self.record.files.items())])

    def verify(self, *, advance: Callable[[int], None] = lambda _: None) -> None:
        """Hash every file; ``advance`` is called with the bytes of each.

        Raises `StoreError` that names the first file which is missing, changed or not in the record.
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


def mismatch(path: Path, record: Record) -> str | None:
    """What the first file says that contradicts the record; None if all agree. Raises `OSError`."""
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
    if not same_time:
        _give_back_time(path, status, fact.mtime_ns)
    return None


def _give_back_time(path: Path, hashed: os.stat_result, mtime_ns: int) -> None:
    now = path.stat()
    if (now.st_mtime_ns, now.st_size) == (hashed.st_mtime_ns, hashed.st_size):
        try:
            os.utime(path, ns=(now.st_atime_ns, mtime_ns))
        except OSError:
            return  # a store that others own: reading it again is only slower
