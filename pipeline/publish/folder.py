"""A folder as a place to publish to: a reader finds the old release or the new one and never a mixture.

    published/llama70b-fp8kv -> .releases/llama70b-fp8kv/v20261121-3f1c0a52
    published/.releases/llama70b-fp8kv/v20261121-3f1c0a52/
    published/.releases/llama70b-fp8kv/candidate -> v20261122-90ab12cd

A release is copied under a temporary name, checked against its digests on the way, put on the disk, and renamed. Then
one rename of a symbolic link makes it the current one, as it does in a promotion and in a rollback. A crash leaves at
most folders with a temporary name, which the next publication removes, and the link ``pending``: it names the release
whose publication was not finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from calibration.durable import fsync
from pipeline.base.errors import StageError, UserError
from pipeline.base.progress import Progress
from pipeline.publish import manifest
from pipeline.publish.place import Difference, Listed, Place, State, named, newest_first, said_of
from pipeline.publish.release import MANIFEST, SIGNATURE, TAG, Release, day_in
from pipeline.store.disk import disk_errors, folders, free_bytes
from pipeline.store.files import Wanted, chunks, copy, digest_of, fetch
from pipeline.store.locks import Lock

RELEASES: Final = ".releases"
_PARTIAL: Final = ".partial"


class FolderPlace(Place):
    """``folder/name``. Publishers exclude each other by a lock."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._home = folder / RELEASES / name
        self._link = folder / name
        self._candidate = self._home / "candidate"
        self._pending = self._home / "pending"

    @property
    def address(self) -> str:
        """The link that readers follow."""
        return str(self._link)

    def preflight(self, release: Release | None) -> None:
        """What is in the way, whether the folder can be written, and whether the release fits on its disk."""
        self._refuse_foreign()
        there = self._home
        while not there.exists():
            there = there.parent
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UserError(f"{self.address}: {there} cannot be written", hint="Give this user the right to write.")
        free = free_bytes(there) + sum(sum(_sizes(path).values()) for path in self._home.glob(f"*{_PARTIAL}"))
        if release is not None and not self._looks_whole(release) and free < release.size:
            raise StageError(
                f"{self.address}: the release has {release.size:,} bytes, the disk has {free:,} free",
                hint="Free space (`quantmint prune` removes old releases) and run the same command again.",
            )

    def state(self) -> State:
        """What is there, also what is damaged."""
        current, candidate = self._current(), _target(self._candidate)
        found = []
        for path in self._home.iterdir() if self._home.is_dir() else ():
            if TAG.fullmatch(path.name) and path.is_dir():
                raw = _read(path / MANIFEST)
                title, created, size = said_of(raw or b"")
                found.append(
                    Listed(
                        tag=path.name,
                        revision=path.name if raw is None else manifest.identity(raw),
                        created=created or day_in(path.name),
                        title=title,
                        current=path.name == current,
                        candidate=path.name == candidate != current,
                        size=sum(_sizes(path).values()) if size is None else size,
                    )
                )
        pending = _target(self._pending)
        return State(newest_first(found), frozenset(() if pending is None else (pending,)))

    def compare(self, release: Release, state: State, *, candidate: bool, progress: Progress | None) -> Difference:
        """All of it, unless exactly these bytes are there. The signature is not compared: whoever signed it."""
        self._refuse_foreign()
        everything = Difference(tuple(sorted(release.files)))
        if not self._looks_whole(release):
            return everything
        if progress is None:
            return Difference()
        folder = self._home / release.tag
        with progress.bar(release.size, "B") as advance:
            same = all(
                digest_of(folder / name, advance) == file.sha256
                for name, file in release.files.items()
                if name != SIGNATURE
            )
        return Difference() if same else everything

    def put(self, release: Release, diff: Difference, state: State, *, candidate: bool, progress: Progress) -> str:
        """Copy the whole, each digest checked, then rename."""
        if not diff:
            return release.identity
        folder = self._home / release.tag
        partial = self._home / f"{release.tag}{_PARTIAL}"
        with progress.bar(release.size, "B") as advance:
            for name, file in release.files.items():
                copy(file, partial / name, advance)
        for inner in folders(partial):
            fsync(inner)
        if folder.is_dir():
            folder.rename(self._home / f"{release.tag}.damaged{_PARTIAL}")
        else:
            self._set(self._pending, Path(release.tag))
        partial.rename(folder)
        fsync(self._home)
        self._sweep()
        return release.identity

    def point(self, release: Listed, state: State, why: str, *, candidate: bool) -> None:
        """One rename of a link."""
        if candidate:
            self._set(self._candidate, Path(release.tag))
            return
        self._set(self._link, Path(RELEASES, self._name, release.tag))
        # A candidate no more is it itself, and one that was promoted and cut off.
        if _target(self._candidate) in {release.tag, state.current.tag if state.current else release.tag}:
            self._candidate.unlink()

    def finish(self, release: Listed) -> None:
        """Remove the link ``pending``, where it names this release."""
        if _target(self._pending) == release.tag:
            self._pending.unlink()
            fsync(self._home)

    def read(self, release: Listed, name: str) -> bytes | None:
        """From the disk."""
        return _read(self._home / release.tag / name)

    def sizes(self, release: Listed) -> dict[str, int]:
        """From the disk."""
        return _sizes(self._home / release.tag)

    def drop(self, release: Listed) -> None:
        """Out of sight first, then off the disk."""
        (self._home / release.tag).rename(self._home / f"{release.tag}.removed{_PARTIAL}")
        fsync(self._home)
        self._sweep()

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Wanted = None) -> Path:
        """Where the release lies, or a copy whose digests were checked."""
        found = tag or self._current()
        if found is None:
            raise UserError(f"{self.address}: nothing is published there")
        release = named(self.releases(), found, self.address)
        folder = self._home / release.tag
        if into is None:
            return folder
        sizes, digests = manifest.expected(self.manifest_of(release), self.sizes(release), str(folder), wanted)

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return chunks(folder / name, start=start)

        return fetch(into, sizes, digests, pieces, place=str(folder), progress=progress, wanted=wanted)

    @contextmanager
    def changing(self, progress: Progress) -> Iterator[None]:
        """Alone here."""
        self._refuse_foreign()
        with disk_errors(self._folder):
            self._home.mkdir(parents=True, exist_ok=True)
            lock = Lock(self._home / "lock")
            lock.acquire(on_wait=lambda holder: progress.say(f"{self.address}: waiting for {holder}"))
            try:
                self._sweep()
                yield
            finally:
                lock.release()

    def _refuse_foreign(self) -> None:
        if os.path.lexists(self._link) and self._current() is None:
            raise UserError(f"{self._link} is there and was not published by quantmint: move it away.")

    def _current(self) -> str | None:
        return _target(self._link, (RELEASES, self._name))

    def _looks_whole(self, release: Release) -> bool:
        """Whether the release is there by the names and sizes of its files, and by the bytes of its manifest."""
        folder = self._home / release.tag
        sizes = _sizes(folder)
        expected = {name: file.size for name, file in release.files.items()}
        for found in (sizes, expected):
            found.pop(SIGNATURE, None)
        raw = _read(folder / MANIFEST)
        return sizes == expected and raw is not None and manifest.identity(raw) == release.identity

    def _set(self, link: Path, to: Path) -> None:
        fresh = link.with_name(f".{link.name}{_PARTIAL}")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(to, target_is_directory=True)
        fresh.replace(link)
        fsync(link.parent)

    def _sweep(self) -> None:
        for stale in self._home.glob(f"*{_PARTIAL}"):
            if stale.is_symlink():
                stale.unlink()
            else:
                shutil.rmtree(stale)


def _target(link: Path, before: tuple[str, ...] = ()) -> str | None:
    """The name that a link of ours ends with; None for what is not there, or is not ours."""
    parts = link.readlink().parts if link.is_symlink() else ()
    return parts[-1] if parts and parts[:-1] == before else None


def _read(path: Path) -> bytes | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def _sizes(folder: Path) -> dict[str, int]:
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in found}
