"""The folders of a store.

Entries that cannot be trusted are moved to ``quarantine/``, never deleted: they may be all that is left of a long
run, and they show what went wrong.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pipeline.locks import Lock
from pipeline.store.disk import disk_errors
from pipeline.store.entries import Entry, mismatch
from pipeline.store.records import FINGERPRINT, RECORD, Record
from pipeline.store.working import Work

QUARANTINE: Final = "quarantine"
RUNS: Final = "runs"
TRASH: Final = "trash"
REFRESH: Final = "refresh"
RESERVED: Final = frozenset({QUARANTINE, RUNS, TRASH, REFRESH})
STAGE: Final = re.compile(r"[a-z][a-z0-9_-]*")
_CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Backup programs skip this folder: quantmint can make its content again.\n"
    "# https://bford.info/cachedir/\n"
)


class Store:
    """A store at ``root``, which is made by the first write.

    ``on_warning`` hears of every entry that was put aside; by default the logger ``pipeline.store.tree`` does.
    """

    def __init__(self, root: Path, *, on_warning: Callable[[str], None] | None = None) -> None:
        self.root = root
        self._warn = on_warning or logging.getLogger(__name__).warning

    def find(self, stage: str, fingerprint: str) -> Entry | None:
        """Return the entry if it is complete and its files are those of its record.

        A damaged one is put into quarantine with a warning. Raises `StoreError` if the store cannot be read.
        """
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
            self._warn(
                f"the result of {stage} at {path} is damaged: {reason}; it is ignored, but stays there ({error})"
            )
        return None

    def working(self, stage: str, fingerprint: str, *, on_wait: Callable[[str], None] | None = None) -> Work:
        """Return a context in which this process alone makes the entry.

        ``on_wait`` is told who else makes it meanwhile. Entering raises `StoreError` if the store cannot be written.
        """
        self.entry_path(stage, fingerprint)
        return Work(self, stage, fingerprint, on_wait)

    def entry_path(self, stage: str, fingerprint: str) -> Path:
        """Where an entry is, or would be. Raises `ValueError` for what is no stage or no fingerprint."""
        if not STAGE.fullmatch(stage) or stage in RESERVED:
            raise ValueError(f"{stage!r} cannot be the name of a stage's folder")
        if not FINGERPRINT.fullmatch(fingerprint):
            raise ValueError(f"{fingerprint!r} is not a fingerprint: 64 hex digits")
        return self.root / stage / fingerprint

    def prepare(self, stage: str) -> None:
        """Make the folders of a stage, and mark the root as a cache. Raises `OSError`."""
        (self.root / stage).mkdir(parents=True, exist_ok=True)
        tag = self.root / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text(_CACHEDIR_TAG, encoding="ascii")

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
        """Move a damaged entry away; nothing happens if another process has just done so.

        ``identity`` is the inode of the folder that was judged. Raises `OSError`.
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
