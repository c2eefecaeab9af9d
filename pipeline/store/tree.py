"""The folders of a store, and one process making one entry.

A working folder outlives a crash, so a stage finds its finished pieces there. A commit makes every file durable,
gives the folder its final name, and writes the record last: what has no record is not an entry. A process that dies
between the two renames leaves a final folder without a record. It becomes the working folder again: its files are
what the working folder held a moment before, the stage that resumes checks them as it would have, and hours of work
are not thrown away.

Entries that cannot be trusted are moved to ``quarantine/``, never deleted: they may be all that is left of a long
run, and they show what went wrong.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from quantmint.calibration.durable import fsync
from quantmint.pipeline.base.canonical import fingerprint as digest_of
from quantmint.pipeline.base.errors import StoreError
from quantmint.pipeline.store.disk import FULL, disk_errors, explain, folders, regular_files, sha256_of, write_atomic
from quantmint.pipeline.store.entries import (
    FINGERPRINT,
    RECORD,
    Entry,
    FileFact,
    Record,
    check_payload,
    check_result,
    mismatch,
    timestamp,
)
from quantmint.pipeline.store.locks import Lock

QUARANTINE: Final = "quarantine"
RUNS: Final = "runs"
TRASH: Final = "trash"
REFRESH: Final = "refresh"
ANSWERS: Final = "answers"
LAUNCHES: Final = "launches"
RESERVED: Final = frozenset({QUARANTINE, RUNS, TRASH, REFRESH, ANSWERS, LAUNCHES})
STAGE: Final = re.compile(r"[a-z][a-z0-9_-]*")
_CACHEDIR_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n"  # backup programs skip it: https://bford.info/cachedir/


class Store:
    """A store at ``root``, which is made by the first write.

    ``on_warning`` hears of every entry that was put aside; by default this module's logger does.
    """

    def __init__(self, root: Path, *, on_warning: Callable[[str], None] | None = None) -> None:
        self.root = root
        self._warn = on_warning or logging.getLogger(__name__).warning

    def find(self, stage: str, fingerprint: str) -> Entry | None:
        """The entry, if it is whole and its files are its record's; a damaged one is put away. `StoreError`."""
        path = self.entry_path(stage, fingerprint)
        with disk_errors(path):
            try:
                raw = (path / RECORD).read_bytes()
                identity = path.stat().st_ino
            except (FileNotFoundError, NotADirectoryError):
                return None  # nothing here, or only half: `working` deals with that, under the lock
            try:
                record = Record.from_json(raw)
                reason = f"its record is of {record.stage}/{record.fingerprint[:12]}"
                if (record.stage, record.fingerprint) == (stage, fingerprint):
                    reason = mismatch(path, record) or ""
            except ValueError as error:
                reason = f"{RECORD} cannot be used: {error}"
        if not reason:
            return Entry(stage, fingerprint, path, record)
        try:
            self.quarantine(stage, fingerprint, reason, identity=identity)
        except OSError as error:
            self._warn(f"{stage} at {path} is damaged: {reason}; it is ignored, but stays there ({error})")
        return None

    def working(self, stage: str, fingerprint: str, *, on_wait: Callable[[str], None] | None = None) -> Work:
        """A context in which this process alone makes the entry; ``on_wait`` hears who else does. `StoreError`."""
        return Work(self, stage, fingerprint, on_wait)

    def begun(self, stage: str, fingerprint: str) -> int:
        """Bytes that interrupted attempts at an entry have left on the disk."""
        work = self.entry_path(stage, fingerprint).with_name(f"{fingerprint}.work")
        return sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file()) if work.is_dir() else 0

    def entry_path(self, stage: str, fingerprint: str) -> Path:
        """Return the folder of an entry, existing or not. Raises `ValueError` for no stage's name or no fingerprint."""
        if not STAGE.fullmatch(stage) or stage in RESERVED:
            raise ValueError(f"{stage!r} cannot be the name of a stage's folder")
        if not FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is not a fingerprint: 64 hex digits")
        return self.root / stage / fingerprint

    def retire(self, entry: Entry) -> None:
        """Take a sound entry away, so that its stage runs again; the next garbage collection deletes it.

        Waits for a process that works on it, and leaves what such a process has put in its place. Raises `StoreError`.
        """
        away = self.root / TRASH / _stamped(entry.stage, entry.fingerprint)
        with disk_errors(entry.path), Lock(entry.path.with_name(f"{entry.fingerprint}.lock")):
            away.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                if (entry.path / RECORD).read_bytes() == entry.record.to_json():
                    entry.path.rename(away)

    def quarantine(self, stage: str, fingerprint: str, reason: str, *, identity: int) -> None:
        """Move a damaged entry away, unless its folder has another inode than ``identity`` by now. `OSError`."""
        path = self.entry_path(stage, fingerprint)
        aside = self.root / QUARANTINE / _stamped(stage, fingerprint)
        aside.parent.mkdir(exist_ok=True)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        if aside.stat().st_ino != identity:  # another process put the bad one away and made a good one
            aside.rename(path)
            return
        self._warn(
            f"the result of {stage} at {path} is damaged: {reason}; it was moved to {aside} and will be made again"
        )


def _stamped(stage: str, fingerprint: str) -> str:
    return f"{stage}-{fingerprint[:12]}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S.%fZ')}"


class Work:
    """The right to make an entry, from entering the context until leaving it.

    ``existing`` is the entry, if it is there already; else ``path`` is the working folder, which stays uncommitted.
    """

    def __init__(self, store: Store, stage: str, fingerprint: str, on_wait: Callable[[str], None] | None) -> None:
        self.stage = stage
        self.fingerprint = fingerprint
        self.existing: Entry | None = None
        self._store = store
        self._final = store.entry_path(stage, fingerprint)
        self._on_wait = on_wait
        self.path = self._final.with_name(f"{fingerprint}.work")
        self.lock = Lock(self._final.with_name(f"{fingerprint}.lock"))

    def __enter__(self) -> Work:
        with disk_errors(self.path):
            self._final.parent.mkdir(parents=True, exist_ok=True)
            tag = self._store.root / "CACHEDIR.TAG"
            if not tag.exists():
                tag.write_text(_CACHEDIR_TAG, encoding="ascii")
            self.lock.acquire(on_wait=self._on_wait)
            try:
                self.existing = self._store.find(self.stage, self.fingerprint)  # the loser of a race takes the result
                if self.existing is None:
                    self._open()
            except BaseException:
                self.lock.release()
                raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with disk_errors(self.path):
            if error is not None and self.existing is None and not any(path.is_file() for path in self.path.rglob("*")):
                shutil.rmtree(self.path, ignore_errors=True)  # nothing to go on with
            self.lock.release()
        if isinstance(error, OSError):
            named = isinstance(error.filename, str)  # a full disk is reported without a name
            if Path(error.filename).is_relative_to(self.path) if named else error.errno in FULL:
                raise explain(error, self.path) from error

    def commit(
        self,
        *,
        payload: Mapping[str, object],
        result: Mapping[str, object],
        started: datetime,
        tools: Mapping[str, str],
        known: Mapping[str, tuple[int, str]] | None = None,
    ) -> Entry:
        """Make the working folder the entry.

        ``payload`` is what the fingerprint was computed from; ``started`` is aware of its time zone; ``known``
        gives size and SHA-256 of files that were hashed while they were written. Raises `ValueError` if these
        contradict each other, and `StoreError` if the disk refuses, a file changes meanwhile or the lock was lost:
        the working folder then stays.
        """
        if self.existing is not None:
            raise ValueError(f"{self._final} exists already")
        finished = datetime.now(UTC)
        duration_s = max(0.0, round((finished - started) / timedelta(seconds=1), 3))
        facts = check_result(result)
        whole = check_payload(self.stage, payload)
        if digest_of(whole) != self.fingerprint:
            raise ValueError(f"the payload has the fingerprint {digest_of(whole)}, not {self.fingerprint}")
        with disk_errors(self.path):
            files = self._hash(known or {})
            record = Record(
                stage=self.stage,
                fingerprint=self.fingerprint,
                payload=whole,
                files=files,
                result=facts,
                tools=dict(tools),
                started=timestamp(started.astimezone(UTC)),
                finished=timestamp(finished),
                duration_s=duration_s,
            )
        return self._become(record)

    def adopt(self, record: Record) -> Entry:
        """Make the working folder the entry that another store has, whose files were checked while they came in.

        Raises `ValueError` for a record of another entry or other files, and `StoreError` as `commit` does.
        """
        if self.existing is not None or (record.stage, record.fingerprint) != (self.stage, self.fingerprint):
            raise ValueError(f"{self._final} exists already, or is not what {record.stage}/{record.fingerprint} is")
        with disk_errors(self.path):
            files = self._hash({name: (fact.size, fact.sha256) for name, fact in record.files.items()})
        if files.keys() != record.files.keys():
            raise ValueError(f"{self.path} has other files than its record")
        return self._become(replace(record, files=files))

    def _become(self, record: Record) -> Entry:
        data = record.to_json()
        Record.from_json(data)  # what `find` will ask of it, asked while there is still something to go back to
        with disk_errors(self.path):
            for folder in folders(self.path):
                fsync(folder)
            self.lock.check()
            self.path.rename(self._final)
            fsync(self._final.parent)
        with disk_errors(self._final, needed=len(data)):
            write_atomic(self._final / RECORD, data, temporary=self._final.with_name(f"{self.fingerprint}.record"))
        self.existing = Entry(self.stage, self.fingerprint, self._final, record)
        return self.existing

    def discard(self) -> None:
        """Empty the working folder: for a stage that cannot use what an earlier attempt left."""
        if self.existing is not None:
            raise ValueError(f"{self._final} is finished: there is nothing to discard")
        with disk_errors(self.path):
            self.lock.check()
            shutil.rmtree(self.path)
            self.path.mkdir()

    def _open(self) -> None:
        if self._final.exists():
            identity = self._final.stat().st_ino
            if (self._final / RECORD).exists() or self.path.exists():
                self._store.quarantine(self.stage, self.fingerprint, "it is half-written", identity=identity)
            else:
                self._final.rename(self.path)
        self.path.mkdir(exist_ok=True)

    def _hash(self, known: Mapping[str, tuple[int, str]]) -> dict[str, FileFact]:
        found = regular_files(self.path)
        missing = known.keys() - found.keys()
        if missing:
            raise StoreError(f"{self.path / min(missing)} was announced as finished, but is not there")
        if RECORD in found:
            raise StoreError(f"a stage may not write {self.path / RECORD}: the store does")
        return {name: self._fact(name, status, known.get(name)) for name, status in found.items()}

    def _fact(self, name: str, before: os.stat_result, known: tuple[int, str] | None) -> FileFact:
        path = self.path / name
        fsync(path)
        size, digest = known or (before.st_size, sha256_of(path))
        after = path.stat()
        if size != after.st_size:
            raise StoreError(
                f"{path} has {after.st_size:,} bytes, but {size:,} were written: something else changed it"
            )
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StoreError(f"{path} changed while it was hashed: the stage, or something else, still writes to it")
        return FileFact(size, digest, after.st_mtime_ns)
