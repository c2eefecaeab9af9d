"""The folders of a store, and the making of an entry by one process at a time.

A stage writes into a working folder, which survives a crash, so that the stage can resume. A commit makes every file
durable, renames the folder to its final name, and writes the record last: a folder without a record is not an entry. If
a process dies between the two, the final folder becomes the working folder again, and the resuming stage checks its
files as usual.

Damaged entries are moved to ``quarantine/``, never deleted: they may be all that is left of a long run, and they show
what went wrong.
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
    EntryRecord,
    FileFact,
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
    """A store at ``root``, created by the first write.

    ``on_warning`` is called with a message for every entry that was quarantined (default: this module's logger).
    """

    def __init__(self, root: Path, *, on_warning: Callable[[str], None] | None = None) -> None:
        self.root = root
        self._warn = on_warning or logging.getLogger(__name__).warning

    def find(self, stage: str, fingerprint: str) -> Entry | None:
        """Return an entry if it is complete and its files match its record, else None; a damaged entry is quarantined.

        Raises `StoreError` where the disk fails.
        """
        path = self.entry_path(stage, fingerprint)
        with disk_errors(path):
            try:
                raw = (path / RECORD).read_bytes()
                identity = path.stat().st_ino
            except (FileNotFoundError, NotADirectoryError):
                return None  # nothing here, or only half: `working` deals with that, under the lock
            try:
                record = EntryRecord.from_json(raw)
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
        """Return a context in which this process alone makes the entry.

        ``on_wait`` is called with a description of a process that it waits for. Entering the context raises
        `StoreError` if the disk fails.
        """
        return Work(self, stage, fingerprint, on_wait)

    def begun(self, stage: str, fingerprint: str) -> int:
        """Return the bytes on disk that interrupted attempts at an entry have left."""
        work = self.entry_path(stage, fingerprint).with_name(f"{fingerprint}.work")
        return sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file()) if work.is_dir() else 0

    def entry_path(self, stage: str, fingerprint: str) -> Path:
        """Return the folder of an entry, whether it exists or not.

        Raises `ValueError` for an invalid stage name or fingerprint.
        """
        if not STAGE.fullmatch(stage) or stage in RESERVED:
            raise ValueError(f"{stage!r} cannot be the name of a stage's folder")
        if not FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is not a fingerprint: 64 hex digits")
        return self.root / stage / fingerprint

    def retire(self, entry: Entry) -> None:
        """Move a sound entry to the trash, so that its stage runs again; the next garbage collection deletes it.

        Waits for a process that holds the entry's lock, and keeps an entry that such a process has just made. Raises
        `StoreError`.
        """
        away = self.root / TRASH / _stamped(entry.stage, entry.fingerprint)
        with disk_errors(entry.path), Lock(entry.path.with_name(f"{entry.fingerprint}.lock")):
            away.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):
                if (entry.path / RECORD).read_bytes() == entry.record.to_json():
                    entry.path.rename(away)

    def quarantine(self, stage: str, fingerprint: str, reason: str, *, identity: int) -> None:
        """Move a damaged entry to quarantine, unless its folder was replaced (its inode is not ``identity``).

        ``reason`` goes into the warning. Raises `OSError`.
        """
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
    """The exclusive right to make an entry, held while the context is open.

    ``existing`` is the entry, if another process finished it first; otherwise ``path`` is the working folder, which is
    kept for the next attempt if the context ends without a commit.
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
        hashed: Mapping[str, tuple[int, str]] | None = None,
    ) -> Entry:
        """Turn the working folder into the entry and return it.

        ``payload`` is the mapping that the fingerprint was computed from; ``started`` has a time zone; ``hashed`` gives
        size and SHA-256 of files that were hashed while they were written. Raises `ValueError` if these contradict each
        other, and `StoreError` if the disk fails, a file changes meanwhile or the lock was lost: the working folder is
        kept then.
        """
        if self.existing is not None:
            raise ValueError(f"{self._final} exists already")
        finished = datetime.now(UTC)
        duration_s = max(0.0, round((finished - started) / timedelta(seconds=1), 3))
        facts = check_result(result)
        full_payload = check_payload(self.stage, payload)
        if digest_of(full_payload) != self.fingerprint:
            raise ValueError(f"the payload has the fingerprint {digest_of(full_payload)}, not {self.fingerprint}")
        with disk_errors(self.path):
            files = self._hash(hashed or {})
            record = EntryRecord(
                stage=self.stage,
                fingerprint=self.fingerprint,
                payload=full_payload,
                files=files,
                result=facts,
                tools=dict(tools),
                started=timestamp(started.astimezone(UTC)),
                finished=timestamp(finished),
                duration_s=duration_s,
            )
        return self._become(record)

    def adopt(self, record: EntryRecord) -> Entry:
        """Commit the working folder with the record of another store's entry, whose files were checked on download.

        Raises `ValueError` for a record of another entry or with other files, and `StoreError` as `commit` does.
        """
        if self.existing is not None or (record.stage, record.fingerprint) != (self.stage, self.fingerprint):
            raise ValueError(f"{self._final} exists already, or is not what {record.stage}/{record.fingerprint} is")
        with disk_errors(self.path):
            files = self._hash({name: (fact.size, fact.sha256) for name, fact in record.files.items()})
        if files.keys() != record.files.keys():
            raise ValueError(f"{self.path} has other files than its record")
        return self._become(replace(record, files=files))

    def _become(self, record: EntryRecord) -> Entry:
        data = record.to_json()
        EntryRecord.from_json(data)  # what `find` will ask of it, asked while there is still something to go back to
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
        """Empty the working folder, for a stage that cannot use the files of an earlier attempt."""
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

    def _hash(self, hashed: Mapping[str, tuple[int, str]]) -> dict[str, FileFact]:
        files = regular_files(self.path)
        missing = hashed.keys() - files.keys()
        if missing:
            raise StoreError(f"{self.path / min(missing)} was announced as finished, but is not there")
        if RECORD in files:
            raise StoreError(f"a stage may not write {self.path / RECORD}: the store does")
        return {name: self._fact(name, status, hashed.get(name)) for name, status in files.items()}

    def _fact(self, name: str, before: os.stat_result, hashed: tuple[int, str] | None) -> FileFact:
        path = self.path / name
        fsync(path)
        size, digest = hashed or (before.st_size, sha256_of(path))
        after = path.stat()
        if size != after.st_size:
            raise StoreError(
                f"{path} has {after.st_size:,} bytes, but {size:,} were written: something else changed it"
            )
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise StoreError(f"{path} changed while it was hashed: the stage, or something else, still writes to it")
        return FileFact(size, digest, after.st_mtime_ns)
