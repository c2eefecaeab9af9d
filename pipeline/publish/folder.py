"""A folder as a destination: a reader gets the old release or the new one and never a mixture.

    published/llama70b-fp8kv -> .releases/llama70b-fp8kv/v20261121-3f1c0a52
    published/.releases/llama70b-fp8kv/v20261121-3f1c0a52/
    published/.releases/llama70b-fp8kv/candidate -> v20261122-90ab12cd

A release is copied under a temporary name, checked against its digests during the copy, fsynced, and renamed as a
whole. Then one rename of a symbolic link makes it the current one; promotions and rollbacks do the same. In a damaged
release each differing file is replaced on its own, so that readers never lose the folder.

A lock keeps publishers apart. A publisher that was paused for longer than the lock lasts continues beside its
successor. So it checks before each irreversible step that it still has the lock, and a temporary folder is renamed
before it is emptied, so that no half of it becomes a release. A crash leaves folders with a temporary name, which the
next publication removes, and the link ``pending`` with the name of the unfinished release.
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
from quantmint.pipeline.store.files import Selection, chunks, copy, digest_of, fetch
from quantmint.pipeline.store.locks import Lock

_PARTIAL: Final = ".partial"


class FolderDestination(Destination):
    """The published folder ``folder/name``. A lock keeps publishers apart."""

    @classmethod
    def of(cls, destination: Folder, name: str, home: Path, *, typed: bool = False) -> FolderDestination:
        """Return the folder of a recipe's section, or of one ``typed`` on the command line, which is not opened."""
        return cls((home / destination.path).resolve() if not typed else Path(destination.path), name)

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._home = folder / RELEASES / name
        self._link = folder / name
        self._candidate = self._home / "candidate"
        self._pending = self._home / "pending"
        self._lock = Lock(self._home / "lock")
        self._dangling: str | None = None  # target of the link when no such release is there

    @property
    def address(self) -> str:
        """Return the path of the link that readers follow."""
        return str(self._link)

    def preflight(self, release: Release | None) -> None:
        """Raise `UserError` for a foreign file in the link's place and for a read-only folder.

        Raises `StageError` for a disk without room for the release (None: its size is not checked).
        """
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
        """Return a snapshot; damaged releases are listed too, with what can be read of them."""
        current, candidate = self._current(), _target(self._candidate)
        listed = []
        for path in self._home.iterdir() if self._home.is_dir() else ():
            if TAG.fullmatch(path.name) and path.is_dir():
                raw = _read(path / MANIFEST)
                title, created, size = manifest_summary(raw or b"")
                listed.append(
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
        self._dangling = None if any(release.current for release in listed) else current
        pending = _target(self._pending)
        return DestinationState(newest_first(listed), frozenset(() if pending is None else (pending,)))

    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """Return the differing files: names and sizes are compared, then digests if ``progress`` is given.

        The signature of an existing release is left out: another signer makes no other release. Raises `StageError` if
        the tag is another release's.
        """
        self._refuse_foreign()
        raw = _read(self._home / release.tag / MANIFEST)
        there = None if raw is None else manifest.identity(raw)
        if there is not None and there.startswith(identity_in(release.tag)):  # else it is damaged and will be replaced
            require_same(self.address, release.tag, there, release.identity)
        difference = self._difference(release)
        if progress is None or len(difference.missing) == len(release.files):
            return difference
        folder, missing = self._home / release.tag, set(difference.missing)
        with progress.bar(release.size, "B") as advance:
            for name, file in release.files.items():
                if name != SIGNATURE and name not in missing and digest_of(folder / name, advance) != file.sha256:
                    missing.add(name)
        return Difference(_manifest_last(missing), difference.strays)

    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Copy the differing files with digest checks, then rename the folder into place.

        In a damaged release each file is renamed on its own. Returns the release's identity. Raises `StageError` for a
        file that changed since its digest was taken, or that another process removed.
        """
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
            raise StageError(
                f"{partial}: another process removed some of its files", hint="Run the same command again."
            )
        if folder.is_dir():
            _mend(folder, partial, diff)
        else:
            self._set(self._pending, Path(release.tag))
            partial.rename(folder)
        fsync(self._home)
        self._sweep()
        return release.identity

    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Rename a new link over the old one; undo it if another publisher removed the release just before.

        Raises `StageError` in that case, and if the link of readers moved since the snapshot. ``why`` is not used.
        """
        self._lock.check()
        current, expected = self._current(), None if state.current is None else state.current.tag
        if not candidate and current != (expected or self._dangling):
            raise pointer_moved(self.address, "the link", current, release.tag)
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
        """Remove the link ``candidate`` if it names one of these releases."""
        if _target(self._candidate) in {release.tag for release in releases}:
            self._candidate.unlink()

    def finish(self, release: ListedRelease) -> None:
        """Remove the link ``pending`` if it names this release."""
        if _target(self._pending) == release.tag:
            self._pending.unlink()
            fsync(self._home)

    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """Return the bytes of a file of the release; None if it has no such file."""
        return _read(self._home / release.tag / name)

    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """Return the size in bytes of every file of the release on disk, by name."""
        return _sizes(self._home / release.tag)

    def is_in_use(self, release: ListedRelease) -> bool:
        """Return whether the link of readers or the link ``candidate`` names the release."""
        return release.tag in (self._current(), _target(self._candidate))

    def hide(self, release: ListedRelease) -> None:
        """Rename the folder to a temporary name, which the next sweep removes."""
        self._lock.check()
        (self._home / release.tag).rename(self._hidden(release))
        fsync(self._home)

    def unhide(self, release: ListedRelease) -> None:
        """Rename the folder back."""
        with suppress(FileNotFoundError):
            self._hidden(release).rename(self._home / release.tag)
            fsync(self._home)

    def drop(self, release: ListedRelease) -> None:
        """Delete the hidden folder."""
        self._sweep()

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, select: Selection = None) -> Path:
        """Return the release's own folder, or with ``into`` a copy whose digests were checked.

        Raises `UserError` if nothing is published or the tag is unknown.
        """
        chosen = tag or self._current()
        if chosen is None:
            raise UserError(f"{self.address}: nothing is published there")
        release = find_release(self.releases(), chosen, self.address)
        folder = self._home / release.tag
        if into is None:
            return folder
        sizes, digests = manifest.expected_files(self.manifest_of(release), self.sizes(release), str(folder), select)

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return chunks(folder / name, start=start)

        return fetch(into, sizes, digests, pieces, place=str(folder), progress=progress, select=select)

    @contextmanager
    def exclusive(self, progress: Progress) -> Iterator[None]:
        """Within the block hold the lock; first remove leftovers of crashed publications.

        Raises `UserError` for a foreign file in the link's place, and `StoreError` for faults of the disk.
        """
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
        """Compare the names and sizes of files, and the bytes of the manifest."""
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
        """Return a temporary path for this attempt, which a sweep removes if the attempt does not finish."""
        return self._home / f"{name}.{secrets.token_hex(4)}{_PARTIAL}"

    def _hidden(self, release: ListedRelease) -> Path:
        return self._home / f"{release.tag}.removed{_PARTIAL}"

    def _set(self, link: Path, to: Path) -> None:
        fresh = self._fresh(link.name)
        fresh.symlink_to(to, target_is_directory=True)
        fresh.replace(link)
        fsync(link.parent)

    def _sweep(self) -> None:
        """Remove everything with a temporary name.

        A folder is renamed first: a publisher that still writes to it finds the whole folder or none, never a half.
        """
        for stale in self._home.glob(f"*{_PARTIAL}"):
            with suppress(FileNotFoundError):
                if stale.is_symlink():
                    stale.unlink()
                else:
                    shutil.rmtree(stale.rename(self._fresh("swept")))


def _target(link: Path, before: tuple[str, ...] = ()) -> str | None:
    """Return the last part of the link's target; None for no link, and for a target outside the folder ``before``."""
    parts = link.readlink().parts if link.is_symlink() else ()
    return parts[-1] if parts and parts[:-1] == before else None


def _read(path: Path) -> bytes | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    return None


def _mend(folder: Path, partial: Path, diff: Difference) -> None:
    """Replace the differing files of a damaged release, the manifest last; each rename is atomic."""
    for name in diff.strays:
        (folder / name).unlink()
    for inner in sorted((path for path in folders(folder)[1:]), reverse=True):
        with suppress(OSError):  # a folder that is not empty
            inner.rmdir()
    for name in diff.missing:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).replace(folder / name)
    for inner in folders(folder):
        fsync(inner)


def _manifest_last(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (name == MANIFEST, name)))


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix(): path.lstat().st_size for path in files}
