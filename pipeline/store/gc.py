"""Runs of a store, and the removal of entries that no recent run refers to: first a plan, then its removal.

The collector keeps the entries of each recipe's newest runs, everything younger than a grace period, and everything
whose lock a living process holds. The small files in ``refresh/`` stay. Removal renames before it deletes, so that
after a kill no incomplete entry looks finished.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from quantmint.pipeline.base.canonical import Json
from quantmint.pipeline.store.disk import disk_errors, write_atomic
from quantmint.pipeline.store.entries import FINGERPRINT, RECORD, check_result, timestamp
from quantmint.pipeline.store.locks import Lock, is_held, runs_still, this_process
from quantmint.pipeline.store.tree import ANSWERS, LAUNCHES, QUARANTINE, RESERVED, RUNS, STAGE, TRASH, Store

RUN_SCHEMA: Final = 1


@dataclass(frozen=True)
class RunRecord:
    """The record of one run. ``finished`` is None while the run continues, and stays None if it was killed.

    ``file`` is the absolute path of its recipe; None where the recipe is not a file. Until the run ends, ``facts``
    identifies its process.
    """

    path: Path
    recipe: str
    recipe_digest: str
    plan: tuple[tuple[str, str], ...]  # (stage, fingerprint) in order
    started: str
    finished: str | None = None
    verdict: str | None = None
    exit_code: int | None = None
    facts: dict[str, Json] = field(default_factory=dict)
    file: str | None = None

    @property
    def id(self) -> str:
        """Return the run's unique name in the store: its start, its recipe and a random part."""
        return self.path.stem

    @property
    def killed(self) -> bool:
        """Return whether the run will never finish: it has no end, and its process on this machine is gone.

        False for a process on another machine, of which nothing is known here.
        """
        return self.finished is None and runs_still(self.facts.get("process")) is False


class RunLog:
    """Writer of a running run's record file."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    @classmethod
    def start(
        cls, root: Path, recipe: str, recipe_digest: str, plan: Sequence[tuple[str, str]], file: Path | None = None
    ) -> RunLog:
        """Write the record of a starting run, before it looks up its first entry in the store at ``root``.

        From then on the garbage collector keeps the entries in ``plan``. Raises `StoreError`.
        """
        now = datetime.now(UTC)
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", recipe)[:80]
        name = f"{now.strftime('%Y%m%dT%H%M%S.%fZ')}-{slug}-{secrets.token_hex(4)}.json"
        facts: dict[str, Json] = {"process": {**this_process()}}
        named = None if file is None else str(file.absolute())
        log = cls(
            RunRecord(root / RUNS / name, recipe, recipe_digest, tuple(plan), timestamp(now), facts=facts, file=named)
        )
        log._write()
        return log

    def replan(self, plan: Sequence[tuple[str, str]]) -> None:
        """Replace the run's plan on disk, before the run looks up the new plan's entries. Raises `StoreError`."""
        self.run = replace(self.run, plan=tuple(plan))
        self._write()

    def finish(self, verdict: str | None, exit_code: int, *, facts: Mapping[str, object] | None = None) -> RunRecord:
        """Write the end of the run and return its record. ``facts`` is small plain JSON for reports.

        Raises `ValueError` for facts that JSON cannot hold, and `StoreError`.
        """
        ended = timestamp(datetime.now(UTC))
        self.run = replace(
            self.run, finished=ended, verdict=verdict, exit_code=exit_code, facts=check_result(facts or {})
        )
        self._write()
        return self.run

    def _write(self) -> None:
        path = self.run.path
        data = {**asdict(self.run), "schema": RUN_SCHEMA}
        del data["path"]
        text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        raw = text.encode(errors="backslashreplace")  # half a character of a file's name is JSON's own escape then
        with disk_errors(path, needed=len(raw)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, raw, temporary=path.with_suffix(".tmp"))


def forget(root: Path, run: str) -> None:
    """Delete the record of a run that executed nothing; ``run`` is its `RunRecord.id`."""
    (root / RUNS / f"{run}.json").unlink(missing_ok=True)


def list_runs(root: Path) -> list[RunRecord]:
    """Return every run of the store at ``root``, newest first; unreadable files are skipped."""
    runs = [run for path in (root / RUNS).glob("*.json") if (run := _read(path)) is not None]
    return sorted(runs, key=lambda run: run.path.name, reverse=True)


def _read(path: Path) -> RunRecord | None:
    try:
        data = json.loads(path.read_bytes())
        if data.pop("schema") != RUN_SCHEMA:
            return None
        plan = tuple((str(stage), str(digest)) for stage, digest in data.pop("plan"))
        run = RunRecord(path=path, plan=plan, **data)
        datetime.fromisoformat(run.started)
        return run if isinstance(run.recipe, str) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


GRACE_S: Final = 3600.0
QUARANTINE_S: Final = 7 * 86400.0
ANSWERS_S: Final = 30 * 86400.0
LAUNCHES_S: Final = 30 * 86400.0
UNFINISHED_S: Final = 7 * 86400.0  # a run of another machine without an end counts as dead after this

_AGES: Final = {  # kind -> (seconds for which it is kept anyway, why it is removed then)
    "entry": (GRACE_S, "no recent run refers to it"),
    "half": (GRACE_S, "half-written, and no process continues it"),
    "work": (GRACE_S, "left by a stage that broke, and no process continues it"),
    "lock": (GRACE_S, "lock of a dead process"),
    "scrap": (GRACE_S, "temporary file of a dead process"),
    "quarantine": (QUARANTINE_S, "in quarantine for more than a week"),
    ANSWERS: (ANSWERS_S, "answers that no run has asked for in a month"),
    LAUNCHES: (LAUNCHES_S, "launches of a baseline that no run has asked for in a month"),
    "trash": (0.0, "left by an interrupted removal"),
}


@dataclass(frozen=True)
class Item:
    """A file or folder to remove: its size in bytes, and the reason."""

    path: Path
    bytes: int
    why: str


@dataclass(frozen=True)
class GcPlan:
    """The files and folders that a garbage collection would remove.

    ``keep`` is the number of newest runs kept per recipe. ``young_bytes`` is the size of unreferenced entries that are
    kept only because they are less than an hour old.
    """

    root: Path
    keep: int
    remove: tuple[Item, ...]
    young_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """Return the bytes that the removal frees."""
        return sum(item.bytes for item in self.remove)


@dataclass(frozen=True)
class _Candidate:
    """A file or folder of the store that may be removed.

    ``changed`` is in seconds since the epoch; ``locked`` says that a living process holds its lock.
    """

    path: Path
    kind: str
    bytes: int
    changed: float
    locked: bool = False


def plan_gc(store: Store, *, keep: int, now: float | None = None) -> GcPlan:
    """Return what a garbage collection would remove, without touching anything; ``now`` is in seconds since the epoch.

    Raises `ValueError` for a negative ``keep``, and `StoreError`.
    """
    if keep < 0:
        raise ValueError(f"keep must be 0 or more, not {keep}")
    root, now = store.root, time.time() if now is None else now
    with disk_errors(root):
        candidates = list(_survey(root, now))
        references = _References(root, keep, now)
        live, old = references.runs()
    needed = references.entries(live)
    remove: list[Item] = []
    young = 0
    for candidate in (
        candidate for candidate in candidates if not candidate.locked and not _is_needed(candidate.path, needed)
    ):
        grace, why = _AGES[candidate.kind]
        if now - candidate.changed >= grace:
            remove.append(Item(candidate.path, candidate.bytes, why))
        elif candidate.kind == "entry":
            young += candidate.bytes
    remove += [Item(run.path, 0, f"there are {keep} newer runs of {run.recipe}") for run in old]
    return GcPlan(root, keep, tuple(remove), young)


def apply(plan: GcPlan, *, now: float | None = None) -> int:
    """Remove the items of a plan that a fresh plan would still remove; return the bytes freed. Raises `StoreError`."""
    still = {item.path for item in plan_gc(Store(plan.root), keep=plan.keep, now=now).remove}
    references = _References(plan.root, plan.keep, time.time() if now is None else now)
    freed = 0
    with disk_errors(plan.root):
        for item in plan.remove:
            if item.path in still and _put_away(plan.root, item.path, references):
                freed += item.bytes
    return freed


class _References:
    """The entries that recent runs refer to; each call reads the run files that changed since the last one."""

    def __init__(self, root: Path, keep: int, now: float) -> None:
        self._root, self._keep, self._now = root, keep, now
        self._known: dict[tuple[Path, int, int], RunRecord | None] = {}

    def runs(self) -> tuple[list[RunRecord], list[RunRecord]]:
        """Return the runs that count, and those that newer ones of their recipe replace."""
        runs = []
        for path in sorted((self._root / RUNS).glob("*.json"), reverse=True):
            with suppress(FileNotFoundError):
                status = path.stat()
                key = path, status.st_mtime_ns, status.st_ino
                if key not in self._known:
                    self._known[key] = _read(path)
                if (run := self._known[key]) is not None:
                    runs.append(run)
        return _sort_runs(runs, self._keep, self._now)

    def entries(self, live: Iterable[RunRecord] | None = None) -> set[Path]:
        """Return the paths of the entries that runs refer to (None: the runs that count now)."""
        runs = self.runs()[0] if live is None else live
        return {self._root / stage / fingerprint for run in runs for stage, fingerprint in run.plan}


def _is_needed(path: Path, entries: Collection[Path]) -> bool:
    """Return whether a path is a needed entry, or the working folder that its stage goes on from."""
    if path.suffix != ".work":
        return path in entries
    entry = path.with_suffix("")
    return entry in entries and not (entry / RECORD).exists()


def _put_away(root: Path, path: Path, references: _References) -> bool:
    """Remove a path under the lock that guards it, if there is one; return False where a process uses it.

    A run writes its plan before it looks up entries. The entry is renamed first: if no run refers to it after that, no
    run has seen it, and it is deleted. Otherwise its name is restored; a run that wants to make the entry meanwhile
    waits at the lock.
    """
    guard = None
    if path.parent.name not in RESERVED and FINGERPRINT.match(path.name):
        guard = path.with_name(f"{path.name[:64]}.lock")
    elif path.suffix == ".lock":
        guard = path
    if guard is None:
        return _delete(root, path, lambda: False)
    lock = Lock(guard, heartbeat=0.1, stale_after=GRACE_S)
    if not lock.acquire(timeout=0.5):  # time for two looks at a lock whose heartbeat stopped long ago
        return False
    try:
        return path == guard or _delete(root, path, lambda: _is_needed(path, references.entries()))
    finally:
        lock.release()


def _delete(root: Path, path: Path, is_needed: Callable[[], bool]) -> bool:
    try:
        if is_needed():
            return False
        if path.is_dir() and path.parent != root / TRASH:
            doomed = root / TRASH / f"{path.name}-{secrets.token_hex(4)}"
            doomed.parent.mkdir(exist_ok=True)
            path.rename(doomed)
            if is_needed():
                doomed.rename(path)
                return False
            path = doomed
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False  # another collection was quicker
    return True


def _sort_runs(runs: Iterable[RunRecord], keep: int, now: float) -> tuple[list[RunRecord], list[RunRecord]]:
    live: list[RunRecord] = []
    old: list[RunRecord] = []
    counts: Counter[str] = Counter()
    for run in runs:
        counts[run.recipe] += 1
        age = now - datetime.fromisoformat(run.started).timestamp()
        goes_on = run.finished is None and not run.killed and age < UNFINISHED_S
        (live if counts[run.recipe] <= keep or goes_on else old).append(run)
    return live, old


def _survey(root: Path, now: float) -> Iterator[_Candidate]:
    for folder in sorted(path for path in _children(root) if path.is_dir()):
        if folder.name == RUNS:
            yield from (_measured(path, "scrap") for path in _children(folder) if path.suffix == ".tmp")
        elif folder.name in {QUARANTINE, TRASH, ANSWERS, LAUNCHES}:
            yield from (_measured(path, folder.name) for path in _children(folder))
        elif STAGE.fullmatch(folder.name) and folder.name not in RESERVED:
            for path in _children(folder):
                kind = _kind(path)
                if kind is not None:
                    lock = path.with_name(f"{path.name[:64]}.lock")
                    yield _measured(path, kind, locked=is_held(lock, stale_after=GRACE_S, now=now))


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _kind(path: Path) -> str | None:
    if not FINGERPRINT.match(path.name):
        return None
    suffix = path.name[64:]
    if suffix == "":
        return "entry" if (path / RECORD).exists() else "half"
    if suffix in {".work", ".lock"}:
        return suffix[1:]
    return "scrap" if suffix == ".record" or suffix.startswith(".lock.") else None


def _measured(path: Path, kind: str, *, locked: bool = False) -> _Candidate:
    """Return the size and age of a path; parts that another process removes meanwhile count as nothing.

    An entry's age is that of its record; a quarantined folder's age starts when it was moved.
    """
    size, changed = 0, 0.0
    for part in [path, *path.rglob("*")]:
        with suppress(FileNotFoundError):
            status = part.lstat()
            size += status.st_size if not part.is_dir() else 0
            if kind == "quarantine":
                changed = status.st_ctime if part == path else changed
            elif kind != "entry" or part.name == RECORD:
                changed = max(changed, status.st_mtime)
    return _Candidate(path, kind, size, changed, locked)
