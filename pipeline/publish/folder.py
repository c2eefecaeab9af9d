"""A folder as a place to publish to: a reader finds the old release or the new one and never a mixture.

    published/llama70b-fp8kv -> .releases/llama70b-fp8kv/v20261121-3f1c0a52
    published/.releases/llama70b-fp8kv/v20261121-3f1c0a52/
    published/.releases/llama70b-fp8kv/candidate -> v20261122-90ab12cd

A release is copied under a temporary name, checked against its digests on the way, put on the disk, and renamed. Then
one rename of a symbolic link makes it the current one, as it does in a promotion and in a rollback. A crash leaves at
most folders with a temporary name, which the next publication removes, and the link ``pending``: it names the release
whose publication was not finished, so that the same command finishes it and a release that was rolled back stays so.
The link ``chosen`` names the release that a run made the current one; a promotion and a rollback remove it. A link
``left.v20261121-3f1c0a52`` says that a person went back from that release.

Folders with other names, as earlier versions of quantmint made, are releases as well.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from pipeline.errors import StageError, UserError
from pipeline.locks import Lock
from pipeline.progress import Progress
from pipeline.publish import manifest
from pipeline.publish.choosing import earlier, named, removable, waiting
from pipeline.publish.copying import Advance, chunks, copy, digest_of
from pipeline.publish.fetching import fetch
from pipeline.publish.listing import described, newest_first
from pipeline.publish.release import MANIFEST, SIGNATURE, Release
from pipeline.publish.target import Listed, Operation, Published
from pipeline.publish.wholeness import require_whole
from pipeline.store.disk import FULL, folders, free_bytes, fsync, regular_files

RELEASES: Final = ".releases"
_CANDIDATE: Final = "candidate"
_PENDING: Final = "pending"
_CHOSEN: Final = "chosen"
_LEFT: Final = "left."
_PARTIAL: Final = ".partial"


class FolderTarget:
    """``folder/name``; see `pipeline.publish.target.Target`. Publishers exclude each other by a lock."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._home = folder / RELEASES / name
        self._link = folder / name

    @property
    def place(self) -> str:
        """The link that readers follow."""
        return str(self._link)

    def require_access(self) -> None:
        """What is in the way, and whether the folder can be written."""
        self._writable()

    def preflight(self, release: Release) -> None:
        """What is in the way, whether the folder can be written, and whether the release fits on its disk."""
        there = self._writable()
        free = free_bytes(there) + sum(sum(_sizes(path).values()) for path in self._home.glob(f"*{_PARTIAL}"))
        if not self._looks_whole(release) and free < release.size:
            raise StageError(
                f"{self.place}: the release has {release.size:,} bytes, the disk has {free:,} free",
                hint="Free space (`quantmint prune` removes old releases) and run the same command again.",
            )

    def operations(self, release: Release, *, candidate: bool) -> Sequence[Operation]:
        """What would be copied and pointed; of a release that is there, names, sizes and manifest are compared."""
        self._refuse_foreign()
        files = {} if self._looks_whole(release) else release.files
        copies = (Operation("copy", name, file.size) for name, file in sorted(files.items()))
        return (*copies, *self._pointing(release.tag, candidate=candidate, again=self._has(release.tag)))

    def publish(self, release: Release, *, candidate: bool, progress: Progress) -> Published:
        """Copy it where it is not there with every digest as it should be, and point to it."""
        with self._changing(progress):
            self._refuse_foreign()
            self._sweep()
            known = self._has(release.tag)
            with progress.bar(release.size, "B") as advance:
                again = self._holds(release, advance)
                if not again:
                    self._write(release, advance)
            if again and self._signature(release.tag) != _digest(release, SIGNATURE):
                progress.warn(f"{release.tag} is there with another signature, which stays: a release never changes.")
            unfinished = not known or self._pending() == release.tag
            if self._pointing(release.tag, candidate=candidate, again=known):
                unfinished = True
                if candidate:
                    self._point(self._home / _CANDIDATE, Path(release.tag))
                else:
                    self._leave(self._left_by_hand())
                    self._show(release.tag)
            if unfinished and not candidate:
                self._point(self._home / _CHOSEN, Path(release.tag))
            self._settle()
        current = self._current()
        return Published(self.place, release.tag, release.identity, current == release.tag, again=again)

    def releases(self) -> Sequence[Listed]:
        """What is there, also what is damaged or was made before releases had tags."""
        current, candidate = self._current(), self._waiting()
        found = []
        for path in self._released():
            with suppress(FileNotFoundError):  # it is being removed
                found.append(_listed(path, current=path.name == current, candidate=path.name == candidate != current))
        return newest_first(found)

    def promote(self, tag: str | None, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Point to a candidate: one rename."""
        with nullcontext() if dry_run else self._changing(progress):
            return self._switch(waiting(self.releases(), tag, self.place), "promotion", dry_run)

    def rollback(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Point to an earlier release: one rename."""
        with nullcontext() if dry_run else self._changing(progress):
            return self._switch(named(self.releases(), tag, self.place), "rollback", dry_run)

    def chosen_by_run(self) -> bool:
        """Whether the link ``chosen`` names the current release."""
        current = self._current()
        return current is not None and self._target(self._home / _CHOSEN, ()) == current

    def bring_back(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Point to an earlier release; what is cut off here, the publication of that release finishes."""
        with nullcontext() if dry_run else self._changing(progress):
            release = earlier(self.releases(), tag)
            if release is None or tag in self.left() or not self.chosen_by_run():
                return ()
            return self._switch(release, "run", dry_run)

    def left(self) -> frozenset[str]:
        """By the links ``left.*``; and what a run made the current one, where somebody moved the link by hand."""
        noted = {link.name.removeprefix(_LEFT) for link in self._home.glob(f"{_LEFT}*") if link.is_symlink()}
        by_hand = self._left_by_hand()
        return frozenset(noted if by_hand is None else noted | {by_hand}) - {self._current()}

    def remove(self, tags: Collection[str], *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Take releases away: out of sight first, then off the disk."""
        with nullcontext() if dry_run else self._changing(progress):
            gone = removable(self.releases(), tags, self.place)
            if not dry_run:
                for release in gone:
                    (self._home / release.tag).rename(self._home / f"{release.tag}.removed{_PARTIAL}")
                fsync(self._home)
                self._sweep()
            return tuple(Operation("remove", release.tag, release.size) for release in gone)

    def fetch(
        self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Callable[[str], bool] | None = None
    ) -> Path:
        """Where the release lies, or a copy whose digests were checked."""
        found = tag or self._current()
        if found is None:
            raise UserError(f"{self.place}: nothing is published there")
        folder = self._home / named(self.releases(), found, self.place).tag
        if into is None:
            return folder
        sizes = {name: status.st_size for name, status in regular_files(folder).items()}
        raw = _read(folder / MANIFEST)
        digests: dict[str, str] = {}
        if raw is not None:
            digests = {name: file.sha256 for name, file in manifest.decode(raw, what=str(folder)).files.items()}
            digests[MANIFEST] = manifest.identity(raw)

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return chunks(folder / name, start=start)

        return fetch(into, sizes, digests, pieces, place=str(folder), progress=progress, wanted=wanted)

    def _switch(
        self, release: Listed, by: Literal["run", "promotion", "rollback"], dry_run: bool
    ) -> Sequence[Operation]:
        """Make a release the current one, if its files are there; the size of each is looked at, and the manifest."""
        if release.current:
            if not (by == "run" or dry_run):  # it is what they want, whoever had chosen it
                self._by_hand(release.tag, None)
            return ()
        folder = self._home / release.tag
        raw = _read(folder / MANIFEST)
        if raw is not None:
            require_whole(raw, release.tag, _sizes(folder), str(folder))
        done = self._pointing(release.tag, candidate=False, again=False)
        if not dry_run:
            if by == "run":
                self._point(self._home / _PENDING, Path(release.tag))
            else:
                self._by_hand(release.tag, self._current() if by == "rollback" else None)
            self._show(release.tag)
            if by == "run":
                self._point(self._home / _CHOSEN, Path(release.tag))
            self._settle()
        return done

    def _by_hand(self, tag: str, back_from: str | None) -> None:
        """Note a person's choice before readers get it: what is cut off here leaves nothing for a run to finish."""
        self._leave(back_from)
        for note in (f"{_LEFT}{tag}", _CHOSEN, _PENDING):
            (self._home / note).unlink(missing_ok=True)
        fsync(self._home)

    def _leave(self, tag: str | None) -> None:
        if tag is not None:
            self._point(self._home / f"{_LEFT}{tag}", Path(tag))

    def _left_by_hand(self) -> str | None:
        """What a run made the current release, where nothing of ours replaced it; None where nothing did.

        A run that was cut off before it noted what it shows has left ``pending``.
        """
        chosen, current = self._target(self._home / _CHOSEN, ()), self._current()
        return None if current in (None, chosen, self._pending()) else chosen

    def _pointing(self, tag: str, *, candidate: bool, again: bool) -> tuple[Operation, ...]:
        """What remains of a publication once the files are there.

        Nothing for a release that was there: another may be current because somebody went back to it. Unless nothing
        is current, or the publication that copied it was cut off here.
        """
        current, waiting_there = self._current(), self._waiting()
        if again and self._pending() != tag and (candidate or current is not None):
            return ()
        if candidate:
            at = self._home / _CANDIDATE
            return () if tag in (current, waiting_there) else (Operation("point", f"{at} to {tag}"),)
        ended = (Operation("remove", f"{self._home / _CANDIDATE}"),) if _ends(waiting_there, tag, current) else ()
        return () if current == tag else (Operation("point", f"{self._link} to {tag}"), *ended)

    @contextmanager
    def _changing(self, progress: Progress) -> Iterator[None]:
        """Alone here; what the disk refuses is told as an error that says that nothing changed."""
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            lock = Lock(self._home / "lock")
            lock.acquire(on_wait=lambda holder: progress.say(f"{self.place}: waiting for {holder}"))
            try:
                yield
            finally:
                lock.release()
        except OSError as error:
            if error.errno in FULL:
                raise StageError(
                    f"{self._folder}: the disk is full; nothing was published.",
                    hint="Free space and run the same command again.",
                ) from error
            raise StageError(f"{self._folder}: nothing was published: {error}") from error

    def _writable(self) -> Path:
        """The folder that all would be written below, the nearest that is there; raises `UserError`."""
        self._refuse_foreign()
        there = self._home
        while not there.exists() and there != there.parent:
            there = there.parent
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UserError(f"{self.place}: {there} cannot be written", hint="Give this user the right to write there.")
        return there

    def _refuse_foreign(self) -> None:
        if os.path.lexists(self._link) and self._current() is None:
            raise UserError(f"{self._link} is there and was not published by quantmint: move it away.")

    def _current(self) -> str | None:
        return self._target(self._link, (RELEASES, self._name))

    def _pending(self) -> str | None:
        return self._target(self._home / _PENDING, ())

    def _waiting(self) -> str | None:
        return self._target(self._home / _CANDIDATE, ())

    @staticmethod
    def _target(link: Path, before: tuple[str, ...]) -> str | None:
        """The name that a link of ours ends with; None for what is not there, or is not ours."""
        parts = link.readlink().parts if link.is_symlink() else ()
        return parts[-1] if parts and parts[:-1] == before else None

    def _has(self, tag: str) -> bool:
        return (self._home / tag).is_dir()

    def _released(self) -> list[Path]:
        if not self._home.is_dir():
            return []
        found = [path for path in self._home.iterdir() if path.suffix != _PARTIAL]
        return [path for path in found if path.is_dir() and not path.is_symlink()]

    def _looks_whole(self, release: Release) -> bool:
        """Whether the release is there by the names and sizes of its files, and by the bytes of its manifest."""
        folder = self._home / release.tag
        sizes = _sizes(folder)
        expected = {name: file.size for name, file in release.files.items()}
        for found in (sizes, expected):
            found.pop(SIGNATURE, None)
        raw = _read(folder / MANIFEST)
        return sizes == expected and (None if raw is None else manifest.identity(raw)) == _digest(release, MANIFEST)

    def _holds(self, release: Release, advance: Advance) -> bool:
        """Whether the release is there with exactly these bytes: its name alone proves nothing.

        The signature is not compared: a release is the same whoever signed it.
        """
        folder = self._home / release.tag
        return self._looks_whole(release) and all(
            digest_of(folder / name, advance) == file.sha256
            for name, file in release.files.items()
            if name != SIGNATURE
        )

    def _write(self, release: Release, advance: Advance) -> None:
        folder = self._home / release.tag
        partial = self._home / f"{release.tag}{_PARTIAL}"
        for name, file in release.files.items():
            copy(file.path, partial / name, file.sha256, advance)
        for inner in folders(partial):
            fsync(inner)
        if not folder.is_dir():
            self._point(self._home / _PENDING, Path(release.tag))
        else:
            folder.rename(self._home / f"{release.tag}.damaged{_PARTIAL}")
        partial.rename(folder)
        fsync(self._home)
        self._sweep()

    def _show(self, tag: str) -> None:
        before = self._current()
        self._point(self._link, Path(RELEASES, self._name, tag))
        if _ends(self._waiting(), tag, before):
            (self._home / _CANDIDATE).unlink()

    def _point(self, link: Path, to: Path) -> None:
        fresh = link.with_name(f".{link.name}{_PARTIAL}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(to, target_is_directory=True)
        fresh.replace(link)
        fsync(link.parent)

    def _settle(self) -> None:
        (self._home / _PENDING).unlink(missing_ok=True)
        fsync(self._home)

    def _sweep(self) -> None:
        for stale in self._home.glob(f"*{_PARTIAL}"):
            if stale.is_symlink():
                stale.unlink()
            else:
                shutil.rmtree(stale)

    def _signature(self, tag: str) -> str | None:
        raw = _read(self._home / tag / SIGNATURE)
        return None if raw is None else hashlib.sha256(raw).hexdigest()


def _ends(waits: str | None, shown: str, before: str | None) -> bool:
    """Whether a candidate is one no more: it is shown now, or was before, by a promotion that was cut off."""
    return waits is not None and waits in (shown, before)


def _listed(folder: Path, *, current: bool, candidate: bool) -> Listed:
    raw = _read(folder / MANIFEST)
    said = described(raw or b"")
    made = datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(timespec="seconds")
    return Listed(
        tag=folder.name,
        revision=folder.name if raw is None else manifest.identity(raw),
        created=said.created or made,
        title=said.title,
        current=current,
        candidate=candidate,
        size=sum(_sizes(folder).values()) if said.size is None else said.size,
    )


def _digest(release: Release, name: str) -> str | None:
    file = release.files.get(name)
    return None if file is None else file.sha256


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of everything in a folder by its name there."""
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in found}
