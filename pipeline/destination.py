"""The folder that a single checkpoint is written to: whose it is, how far it got, and when it is whole.

While a job runs, everything of it lies in ``OUT/.quantmint``: a store of finished stages, with the job's record. When
all is made and found sound, the files move up one by one, ``config.json`` last: before that no program takes the
folder for a model. The record stays with the checkpoint, in ``OUT/quantmint``. Killed at any moment, a folder says by
itself which job it belongs to, and only that job goes on with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pipeline.canonical import ABSENT, Change, difference, fingerprint
from pipeline.errors import UserError
from pipeline.formats.checkpoint import read_json
from pipeline.store.disk import disk_errors, fsync, write_atomic

WORK: Final = ".quantmint"
EVIDENCE: Final = "quantmint"
JOB: Final = "job.json"
_LOCK: Final = ".quantmint.lock"
_LAST: Final = "config.json"


class State(Enum):
    """How far a job got in its folder."""

    FRESH = "nothing is there yet"
    UNFINISHED = "goes on where it stopped"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Destination:
    """``folder`` for the job with ``payload``: everything that shapes the bytes of the checkpoint."""

    folder: Path
    payload: Mapping[str, Any]

    @property
    def work(self) -> Path:
        """Where the job's stages are, until it is finished."""
        return self.folder / WORK

    @property
    def lock(self) -> Path:
        """Path of the lock that keeps two processes out of one folder."""
        return self.folder / _LOCK

    def state(self) -> State:
        """How far this job got.

        Raises `UserError` for a folder that holds anything else: another job, finished or not, or foreign files.
        """
        if not self.folder.exists():
            return State.FRESH
        if not self.folder.is_dir():
            raise UserError(f"OUT: found the file {self.folder}, expected a folder.")
        finished = self.folder / EVIDENCE / JOB
        if finished.is_file() and (self.folder / _LAST).is_file():
            self._require_same(read_json(finished), "the checkpoint of another job")
            self._require_whole(read_json(finished))
            return State.FINISHED
        if (self.work / JOB).is_file():
            self._require_same(read_json(self.work / JOB), "another job, unfinished")
            return State.UNFINISHED
        foreign = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith(WORK))
        if foreign:
            raise UserError(
                f"OUT: found {foreign[0]} in {self.folder}, expected an empty folder or none.",
                hint="What is there is never overwritten: choose another folder, or empty this one.",
            )
        return State.FRESH

    def begin(self) -> None:
        """Claim the folder for this job."""
        with disk_errors(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
            _write(self.work / JOB, {"fingerprint": fingerprint(self.payload), "payload": self.payload})

    @property
    def moving(self) -> bool:
        """Whether all is made, and only the last renames are missing."""
        return (self.work / "final").is_dir()

    def deliver(self, checkpoint: Path, facts: Mapping[str, Any], evidence: Mapping[str, Path]) -> None:
        """Take a finished checkpoint folder over, with files that prove it, by name.

        ``facts`` go into the record; ``facts["files"]`` has the ``size`` of each file of the checkpoint.
        """
        with disk_errors(self.folder):
            proof = self.work / EVIDENCE
            proof.mkdir(exist_ok=True)
            for name, path in evidence.items():
                shutil.copyfile(path, proof / name)
                fsync(proof / name)
            _write(proof / JOB, {"fingerprint": fingerprint(self.payload), "payload": self.payload, **facts})
            checkpoint.rename(self.work / "final")
            fsync(self.work)

    def move(self) -> None:
        """Make what was delivered visible, ``config.json`` last; may be repeated after a kill at any moment."""
        final, proof = self.work / "final", self.work / EVIDENCE
        with disk_errors(self.folder):
            if proof.is_dir():
                proof.rename(self.folder / EVIDENCE)
            for path in sorted(final.iterdir(), key=lambda path: (path.name == _LAST, path.name)):
                if path.name == _LAST:
                    fsync(self.folder)
                path.rename(self.folder / path.name)
            fsync(self.folder)
            self.tidy()

    def tidy(self) -> None:
        """Remove what a finished job needs no more."""
        shutil.rmtree(self.work, ignore_errors=True)

    def record(self) -> dict[str, Any]:
        """The record of the finished job."""
        return read_json(self.folder / EVIDENCE / JOB)

    def _require_same(self, record: Mapping[str, Any], what: str) -> None:
        if record.get("fingerprint") == fingerprint(self.payload):
            return
        changes = difference(record.get("payload"), json.loads(json.dumps(self.payload)))
        shown = [_sentence(change) for change in changes[:6]]
        shown += [f"… {len(changes) - 6} more"] if len(changes) > 6 else []
        raise UserError(
            f"OUT: found {what} in {self.folder}:\n    " + "\n    ".join(shown),
            hint="Two jobs are never mixed: choose another folder, or remove this one.",
        )

    def _require_whole(self, record: Mapping[str, Any]) -> None:
        for name, fact in record.get("files", {}).items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != fact["size"]:
                raise UserError(
                    f"OUT: {path} is not what this job wrote, which had {fact['size']:,} bytes.",
                    hint="Remove the folder to make it again.",
                )


def _sentence(change: Change) -> str:
    """What differs, as ``quantize.settings.scheme: "fp8" there, "mxfp4" now``; files of the source by their names."""
    _, is_file, name = change.path.partition("$.source.settings.files")
    if is_file:
        what = "is new" if change.old is ABSENT else "is gone" if change.new is ABSENT else "changed since"
        return f"the source's {name.strip('.[]').strip(chr(34))} {what}"
    old, new = ("nothing" if side is ABSENT else json.dumps(side) for side in (change.old, change.new))
    return f"{change.path.removeprefix('$.')}: {old} there, {new} now"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    data = (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    write_atomic(path, data, temporary=path.with_name(path.name + ".partial"))
