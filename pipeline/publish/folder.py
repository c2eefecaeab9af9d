"""A folder as a place to publish to: a reader finds the old release or the new one and never a mixture.

    published/llama70b-fp8kv -> .releases/llama70b-fp8kv/v20261121-3f1c0a52
    published/.releases/llama70b-fp8kv/v20261121-3f1c0a52/
    published/.releases/llama70b-fp8kv/candidate -> v20261122-90ab12cd

A release is copied under a temporary name, checked against its digests on the way, put on the disk, and renamed whole.
Then one rename of a symbolic link makes it the current one, as it does in a promotion and in a rollback. Of a release
that was damaged, each file that differs is replaced by itself, so that readers never lose the folder.

Publishers exclude each other by a lock. One that was paused for longer than the lock lasts goes on beside its
successor: before each step that cannot be undone it looks whether the lock is still its own, and a temporary folder is
renamed before it is emptied, so that no half of one can become a release. A crash leaves at most folders with a
temporary name, which the next publication removes, and the link ``pending``: it names the release whose publication was
not finished.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from quantmint.calibration.durable import fsync
from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish import manifest
from quantmint.pipeline.publish.destination import (
    Destination,
    DestinationState,
    Difference,
    ListedRelease,
    find_release,
    manifest_summary,
    newest_first,
    pointer_moved,
    require_same,
)
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE, TAG, Release, day_in, identity_in
from quantmint.pipeline.recipe.destinations import RELEASES, Folder
from quantmint.pipeline.store.disk import disk_errors, folders, free_bytes
from quantmint.pipeline.store.files import Wanted, chunks, copy, digest_of, fetch
from quantmint.pipeline.store.locks import Lock

_PARTIAL: Final = ".partial"


class FolderDestination(Destination):
    """``folder/name``. Publishers exclude each other by a lock."""

    @classmethod
    def of(cls, destination: Folder, name: str, home: Path, *, typed: bool = False) -> FolderDestination:
        """See `Destination.of`."""
        return cls((home / destination.path).resolve() if not typed else Path(destination.path), name)

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._home = folder / RELEASES / name
        self._link = folder / name
        self._candidate = self._home / "candidate"
        self._pending = self._home / "pending"
        self._lock = Lock(self._home / "lock")
        self._dangling: str | None = None  # what the link names although nothing of that name is there

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
        missing = () if release is None else self._difference(release).missing
        if release is not None and free < (needed := sum(release.files[name].size for name in missing)):
            raise StageError(
                f"{self.address}: the release has {needed:,} bytes, the disk has {free:,} free",
                hint="Free space (`quantmint release prune` removes old releases) and run the same command again.",
            )

    def state(self) -> DestinationState:
        """What is there, also what is damaged."""
        current, candidate = self._current(), _target(self._candidate)
        found = []
        for path in self._home.iterdir() if self._home.is_dir() else ():
            if TAG.fullmatch(path.name) and path.is_dir():
                raw = _read(path / MANIFEST)
                title, created, size = manifest_summary(raw or b"")
                found.append(
                    ListedRelease(
                        tag=path.name,
                        revision=path.name if raw is None else manifest.identity(raw),
                        created=created or day_in(path.name),
                        title=title,
                        current=path.name == current,
                        candidate=path.name == candidate != current,
                        size=sum(_sizes(path).values()) if size is None else size,
                    )
                )
        self._dangling = None if any(release.current for release in found) else current
        pending = _target(self._pending)
        return DestinationState(newest_first(found), frozenset(() if pending is None else (pending,)))

    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """By names and sizes, then by digests. The signature is not compared: it is the same whoever signed it."""
        self._refuse_foreign()
        raw = _read(self._home / release.tag / MANIFEST)
        there = None if raw is None else manifest.identity(raw)
        if there is not None and there.startswith(identity_in(release.tag)):  # else it is damaged, and replaced
            require_same(self.address, release.tag, there, release.identity)
        found = self._difference(release)
        if progress is None or len(found.missing) == len(release.files):
            return found
        folder, missing = self._home / release.tag, set(found.missing)
        with progress.bar(release.size, "B") as advance:
            for name, file in release.files.items():
                if name != SIGNATURE and name not in missing and digest_of(folder / name, advance) != file.sha256:
                    missing.add(name)
        return Difference(_manifest_last(missing), found.strays)

    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Copy what differs, each digest checked; then rename the whole, or each file where a release is mended."""
        if not diff:
            return release.identity
        folder, partial = self._home / release.tag, self._fresh(release.tag)
        with progress.bar(release.size, "B") as advance:
            advance(release.size - sum(release.files[name].size for name in diff.missing))
            for name in diff.missing:
                copy(release.files[name], partial / name, advance)
        if diff.missing:
            for inner in folders(partial):
                fsync(inner)
        self._lock.check()
        if _sizes(partial) != {name: release.files[name].size for name in diff.missing}:
            raise StageError(f"{partial}: something else removed files of it", hint="Run the same command again.")
        if folder.is_dir():
            _mend(folder, partial, diff)
        else:
            self._set(self._pending, Path(release.tag))
            partial.rename(folder)
        fsync(self._home)
        self._sweep()
        return release.identity

    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """One rename of a link; it is undone where a pause just before it let another remove the release."""
        self._lock.check()
        shown, seen = self._current(), None if state.current is None else state.current.tag
        if not candidate and shown != (seen or self._dangling):
            raise pointer_moved(self.address, "the link", shown, release.tag)
        link = self._candidate if candidate else self._link
        before, folder = link.readlink() if link.is_symlink() else None, self._home / release.tag
        if folder.is_dir():
            self._set(link, Path(release.tag) if candidate else Path(RELEASES, self._name, release.tag))
            if folder.is_dir():
                return
            if before is None:
                link.unlink()
            else:
                self._set(link, before)
        raise StageError(f"{self.address}: {release.tag} was removed meanwhile", hint="Publish it again.")

    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Remove the link ``candidate``."""
        if _target(self._candidate) in {release.tag for release in releases}:
            self._candidate.unlink()

    def finish(self, release: ListedRelease) -> None:
        """Remove the link ``pending``, where it names this release."""
        if _target(self._pending) == release.tag:
            self._pending.unlink()
            fsync(self._home)

    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """From the disk."""
        return _read(self._home / release.tag / name)

    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """From the disk."""
        return _sizes(self._home / release.tag)

    def is_in_use(self, release: ListedRelease) -> bool:
        """By the links."""
        return release.tag in (self._current(), _target(self._candidate))

    def hide(self, release: ListedRelease) -> None:
        """Rename it to what is swept."""
        self._lock.check()
        (self._home / release.tag).rename(self._hidden(release))
        fsync(self._home)

    def unhide(self, release: ListedRelease) -> None:
        """Rename it back."""
        with suppress(FileNotFoundError):
            self._hidden(release).rename(self._home / release.tag)
            fsync(self._home)

    def drop(self, release: ListedRelease) -> None:
        """Off the disk."""
        self._sweep()

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Wanted = None) -> Path:
        """Where the release lies, or a copy whose digests were checked."""
        found = tag or self._current()
        if found is None:
            raise UserError(f"{self.address}: nothing is published there")
        release = find_release(self.releases(), found, self.address)
        folder = self._home / release.tag
        if into is None:
            return folder
        sizes, digests = manifest.expected_files(self.manifest_of(release), self.sizes(release), str(folder), wanted)

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return chunks(folder / name, start=start)

        return fetch(into, sizes, digests, pieces, place=str(folder), progress=progress, wanted=wanted)

    @contextmanager
    def exclusive(self, progress: Progress) -> Iterator[None]:
        """Alone here."""
        self._refuse_foreign()
        with disk_errors(self._folder):
            self._home.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(on_wait=lambda holder: progress.say(f"{self.address}: waiting for {holder}"))
            try:
                self._sweep()
                yield
            finally:
                self._lock.release()

    def _refuse_foreign(self) -> None:
        if os.path.lexists(self._link) and self._current() is None:
            raise UserError(f"{self._link} is there and was not published by quantmint: move it away.")

    def _current(self) -> str | None:
        return _target(self._link, (RELEASES, self._name))

    def _difference(self, release: Release) -> Difference:
        """Return what differs by the names and sizes of files, and by the bytes of the manifest."""
        folder = self._home / release.tag
        present = _sizes(folder)
        missing = {name for name, file in release.files.items() if present.get(name) != file.size}
        raw = _read(folder / MANIFEST)
        if raw is None or manifest.identity(raw) != release.identity:
            missing.add(MANIFEST)
        if folder.is_dir():
            missing.discard(SIGNATURE)
        return Difference(_manifest_last(missing), sorted(present.keys() - release.files.keys() - {SIGNATURE}))

    def _fresh(self, name: str) -> Path:
        """Return a name of this attempt alone, which is swept where the attempt does not come to its end."""
        return self._home / f"{name}.{secrets.token_hex(4)}{_PARTIAL}"

    def _hidden(self, release: ListedRelease) -> Path:
        return self._home / f"{release.tag}.removed{_PARTIAL}"

    def _set(self, link: Path, to: Path) -> None:
        fresh = self._fresh(link.name)
        fresh.symlink_to(to, target_is_directory=True)
        fresh.replace(link)
        fsync(link.parent)

    def _sweep(self) -> None:
        """Remove what has a temporary name.

        A folder is renamed first: whoever still writes there finds it whole or not at all, and never half.
        """
        for stale in self._home.glob(f"*{_PARTIAL}"):
            with suppress(FileNotFoundError):
                if stale.is_symlink():
                    stale.unlink()
                else:
                    shutil.rmtree(stale.rename(self._fresh("swept")))


def _target(link: Path, before: tuple[str, ...] = ()) -> str | None:
    """The name that a link of ours ends with; None for what is not there, or is not ours."""
    parts = link.readlink().parts if link.is_symlink() else ()
    return parts[-1] if parts and parts[:-1] == before else None


def _read(path: Path) -> bytes | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def _mend(folder: Path, partial: Path, diff: Difference) -> None:
    """Put files into a damaged release, the manifest last; every file is its old one or the right one."""
    for name in diff.strays:
        (folder / name).unlink()
    for inner in sorted((path for path in folders(folder)[1:]), reverse=True):
        with suppress(OSError):  # one that is not empty
            inner.rmdir()
    for name in diff.missing:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).replace(folder / name)
    for inner in folders(folder):
        fsync(inner)


def _manifest_last(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (name == MANIFEST, name)))


def _sizes(folder: Path) -> dict[str, int]:
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in found}
