"""One process making one entry.

The working folder outlives a crash, so a stage finds its finished pieces there. A commit makes every file durable,
gives the folder its final name, and writes the record last: what has no record is not an entry. A process that dies
between the two renames leaves a final folder without a record. It becomes the working folder again: its files are
what the working folder held a moment before, the stage that resumes checks them as it would have, and hours of work
are not thrown away.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline.canonical import fingerprint as digest_of
from pipeline.errors import StoreError
from pipeline.locks import Lock
from pipeline.store.disk import FULL, disk_errors, explain, folders, fsync, regular_files, sha256_of, write_atomic
from pipeline.store.entries import Entry
from pipeline.store.records import RECORD, FileFact, Record, check_payload, check_result, timestamp

if TYPE_CHECKING:
    from pipeline.store.tree import Store


class Work:
    """The right to make an entry, from entering the context until leaving it.

    ``existing`` is the entry, if there is one already. Otherwise ``path`` is the working folder, with what an
    earlier attempt left. Leaving without a commit keeps it.
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
            self._store.prepare(self.stage)
            self.lock.acquire(on_wait=self._on_wait)
            try:
                self.existing = self._store.find(self.stage, self.fingerprint)  # the loser of a race takes the result
                if self.existing is None:
                    self._open()
            except BaseException:
                self.lock.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with disk_errors(self.path):
            self.lock.release()
        if isinstance(error, OSError) and self._concerns(error):
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

    def _concerns(self, error: OSError) -> bool:
        """Whether an error of the stage is about this disk; a full one is reported without a name."""
        if isinstance(error.filename, str):
            return Path(error.filename).is_relative_to(self.path)
        return error.errno in FULL
