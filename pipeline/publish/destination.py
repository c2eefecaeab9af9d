"""A destination of releases: a folder, a bucket or a repository of the Hub, under one state machine.

Readers get one release at a time, the current one, which changes in a single step. A publication uploads the files
where nobody looks, moves the pointer, and marks the release as finished. Each step detects the work of an earlier
attempt, so the same command finishes an interrupted publication. A finished release stays as it is: when readers get
another one, somebody chose that, and only `rollback` undoes it.

The abstract methods of `Destination` are the primitives that differ between destinations: storage, and one pointer
that is compared and swapped. This module has the protocol above them, which `tests/publish/test_protocol.py` tests
with every kind of destination:

    publish, promote, rollback   put, point (refused when somebody moved the pointer), withdraw, finish
    prune                        look, hide (nobody can choose it any more), look again, then drop or unhide
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.errors import StageError, UserError, did_you_mean
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish import manifest
from quantmint.pipeline.publish.release import MANIFEST, Release, day_in, identity_in
from quantmint.pipeline.store.files import DamagedError, Selection


@dataclass(frozen=True, slots=True)
class Operation:
    """A planned or finished change for people: ``verb`` "upload", ``what`` "model.safetensors", ``size`` in bytes."""

    verb: str
    what: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """A release at one destination. ``revision`` identifies its bytes; ``again``: it was there, nothing was sent."""

    place: str
    tag: str
    revision: str
    current: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class ListedRelease:
    """A release in a destination's list. ``created`` is ISO 8601 in UTC; ``size`` in bytes, None if unknown."""

    tag: str
    revision: str
    created: str
    title: str
    current: bool
    candidate: bool
    size: int | None = None


@dataclass(frozen=True, slots=True)
class DestinationState:
    """A snapshot of a destination: the releases, the newest first, and the ``unfinished`` tags of cut-off publications.

    ``mark`` is private to the destination, which refuses a change when somebody else made one since the snapshot.
    """

    releases: tuple[ListedRelease, ...] = ()
    unfinished: frozenset[str] = frozenset()
    mark: Any = None

    @property
    def current(self) -> ListedRelease | None:
        """Return the release that readers get; None if there is none."""
        return next((release for release in self.releases if release.current), None)

    def find(self, tag: str) -> ListedRelease | None:
        """Return the release with this tag, or None."""
        return next((release for release in self.releases if release.tag == tag), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of the files under a release's tag from the release: files to send, and files that do not belong."""

    missing: Sequence[str] = field(default=())
    strays: Sequence[str] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.missing or self.strays)


class Destination(ABC):
    """A destination of releases.

    Methods raise `StageError` (try again) or `UserError` (another try fails the same). Neither loses anything
    published.
    """

    @classmethod
    @abstractmethod
    def of(cls, destination: Any, name: str, home: Path, *, typed: bool = False) -> Destination:
        """Return the destination for releases called ``name``, without any request to it.

        ``destination`` is its section of the recipe; paths are relative to ``home``. ``typed`` says that a person named
        it on the command line: its settings are then left alone.
        """

    @property
    @abstractmethod
    def address(self) -> str:
        """Return the name for people: ``my-org/name``, ``published/name``, ``s3://bucket/prefix/name``."""

    @abstractmethod
    def preflight(self, release: Release | None) -> None:
        """Raise before any byte is sent if the release (None: any) could not be published: rights, names, room."""

    @abstractmethod
    def state(self) -> DestinationState:
        """Return a snapshot of the destination."""

    @abstractmethod
    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """Return the differences of the files under the release's tag from the release.

        ``candidate`` says that it will be published as a candidate. ``progress`` shows the hashing of local files;
        without it no file is read.
        """

    @abstractmethod
    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Send the differing files, check that they arrived, and return the release's revision there."""

    @abstractmethod
    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Make the release the current one and no longer a candidate; with ``candidate`` make it the candidate.

        This is one step. Raises `StageError` when somebody else moved the pointer since the snapshot ``state``. ``why``
        begins the message of a commit.
        """

    @abstractmethod
    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Remove the candidate pointer if it names one of these releases."""

    @abstractmethod
    def finish(self, release: ListedRelease) -> None:
        """Mark the release's publication as finished; a second call changes nothing."""

    @abstractmethod
    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """Return a small file of the release, None when it has no such file."""

    @abstractmethod
    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """Return the size in bytes of every file under the release's tag, by name."""

    @abstractmethod
    def is_in_use(self, release: ListedRelease) -> bool:
        """Return whether the release is current or a candidate, also while it is hidden."""

    @abstractmethod
    def hide(self, release: ListedRelease) -> None:
        """Remove the release from the list, so that nobody who lists releases from now on can choose it.

        `set_pointer` with an older snapshot fails if the destination can detect it; else the caller reads the pointer
        again after this.
        """

    @abstractmethod
    def unhide(self, release: ListedRelease) -> None:
        """Put a hidden release back into the list; do nothing for others."""

    @abstractmethod
    def drop(self, release: ListedRelease) -> None:
        """Delete a hidden release."""

    def hidden(self) -> Sequence[ListedRelease]:
        """Return the releases that an interrupted `prune` left hidden."""
        return ()

    @abstractmethod
    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, select: Selection = None) -> Path:
        """Return a folder with the files of the release ``tag`` (None: the current one), or a copy of it in ``into``.

        Without ``into`` a remote release is copied to a cache. ``select`` tells by its name whether a file is needed
        (None: all are). File names from a destination are not trusted: raises `UserError` for names that lead out of
        the folder.
        """

    def expected_identity(self, release: ListedRelease) -> str:
        """Return the SHA-256 of the release's manifest, or its first digits, as recorded outside the release."""
        return identity_in(release.tag)

    def exclusive(self, progress: Progress) -> AbstractContextManager[None]:
        """Return a context for changes; it excludes other publishers if the destination has locks."""
        return nullcontext()

    def setup_operations(self, state: DestinationState) -> Sequence[Operation]:
        """Return the changes that `upload` and `finish` would make to the destination's own settings."""
        return ()

    def planned_operations(self, release: Release, *, candidate: bool) -> Sequence[Operation]:
        """Return exactly the changes that `publish` would make now, without making them."""
        state = self.state()
        difference = self.compare(release, state, candidate=candidate, progress=None)
        listed = listed_release(release, release.identity)
        return (
            *self.setup_operations(state),
            *(Operation("upload", name, release.files[name].size) for name in difference.missing),
            *(Operation("remove", name) for name in difference.strays),
            *(self._pointing(listed, candidate) if self._is_due(listed, state, candidate=candidate) else ()),
        )

    def publish(self, release: Release, *, candidate: bool, progress: Progress) -> Publication:
        """Make the release the current one, or with ``candidate`` a candidate, and return what was done.

        It finishes an interrupted publication. The pointer stays for a finished release, as somebody may have rolled
        back.
        """
        with self.exclusive(progress):
            state = self.state()
            finished = state.find(release.tag) if release.tag not in state.unfinished else None
            difference = self.compare(release, state, candidate=candidate, progress=progress)
            if finished is None or difference:
                revision = self.upload(release, difference, state, candidate=candidate, progress=progress)
            else:
                revision = finished.revision
            listed = listed_release(release, revision)
            shown = state.current.tag if state.current else None
            if self._is_due(listed, state, candidate=candidate):
                self._point(listed, state, "Publish", candidate=candidate)
                shown = shown if candidate else release.tag
            self.finish(listed)
        again = finished is not None and not difference
        return Publication(self.address, release.tag, revision, shown == release.tag, again=again)

    def releases(self) -> tuple[ListedRelease, ...]:
        """Return the releases, the newest first."""
        return self.state().releases

    def promote(self, tag: str | None, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Make a candidate (None: the only one) the current release; return the changes.

        With ``dry_run`` nothing is changed. Raises `UserError` for a tag that is unknown or an earlier release's, and
        without a tag if there is no candidate or more than one.
        """
        with nullcontext() if dry_run else self.exclusive(progress):
            state = self.state()
            return self._switch(find_candidate(state.releases, tag, self.address), state, "Promote", dry_run=dry_run)

    def rollback(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Make an earlier release the current one again, byte for byte; return the changes.

        With ``dry_run`` nothing is changed. Raises `UserError` for an unknown tag and for a candidate, and
        `DamagedError` for a damaged release.
        """
        with nullcontext() if dry_run else self.exclusive(progress):
            state = self.state()
            chosen = find_release(state.releases, tag, self.address)
            if chosen.candidate and not chosen.current:
                raise UserError(
                    f"{tag} of {self.address} is a candidate that was never a release",
                    hint=f"`quantmint release promote {self.address} {tag}` makes it one.",
                )
            return self._switch(chosen, state, "Roll back to", dry_run=dry_run)

    def prune(self, *, keep: int, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Remove all releases but the newest ``keep``, the current one and candidates; return the changes.

        Releases that an interrupted `prune` left hidden are removed too. With ``dry_run`` nothing is changed.
        """
        with nullcontext() if dry_run else self.exclusive(progress):
            removed = (*outdated(self.releases(), keep=keep), *self.hidden())
            if not dry_run:
                removed = tuple(release for release in removed if self._remove(release, progress))
            return tuple(Operation("remove", release.tag, release.size) for release in removed)

    def manifest_of(self, release: ListedRelease) -> bytes:
        """Return the bytes of a release's manifest; `DamagedError` when they do not match the release's tag."""
        raw = self.read(release, MANIFEST)
        if raw is None or not manifest.identity(raw).startswith(self.expected_identity(release)):
            state = "missing" if raw is None else f"not that of {release.tag}"
            raise DamagedError(
                f"{self.address}: {release.tag} is damaged: its {MANIFEST} is {state}", hint=manifest.DAMAGED
            )
        return raw

    def _is_due(self, release: ListedRelease, state: DestinationState, *, candidate: bool) -> bool:
        """Return whether a publication still has to move the pointer to its release.

        It does not for a finished release: another one may be current because somebody rolled back to it.
        """
        there = state.find(release.tag)
        finished = there is not None and release.tag not in state.unfinished
        if finished and (candidate or state.current is not None):
            return False
        return there is None or not (there.current or (candidate and there.candidate))

    def _point(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Move the pointer to the release, and withdraw it and the former current release as candidates.

        A former current release that is unfinished is finished first, because it would stay unfinished after that.
        """
        if not candidate and state.current is not None and state.current.tag in state.unfinished:
            self.finish(state.current)
        self.set_pointer(release, state, why, candidate=candidate)
        if not candidate:  # the former one may have been promoted and cut off before this step
            self.withdraw([release, *([] if state.current is None else [state.current])])

    def _remove(self, release: ListedRelease, progress: Progress) -> bool:
        """Remove a release; return False, without removing it, if readers get it or it is a candidate by now."""
        if not self.is_in_use(release):
            progress.say(f"removing {release.tag}")
            self.hide(release)
            if not self.is_in_use(release):
                self.drop(release)
                return True
        self.unhide(release)
        return False

    def _pointing(self, release: ListedRelease, candidate: bool) -> tuple[Operation, ...]:
        return (Operation("point", f"{'candidate' if candidate else 'current'} of {self.address} to {release.tag}"),)

    def _switch(
        self, release: ListedRelease, state: DestinationState, why: str, *, dry_run: bool
    ) -> Sequence[Operation]:
        """Make the release current; return the changes, with ``dry_run`` without making them.

        File sizes are checked and not digests, because a rollback must not read a whole model. Raises `DamagedError`.
        """
        if not release.current:
            raw = self.manifest_of(release)
            manifest.require_sizes(raw, self.sizes(release), f"{self.address}: {release.tag}")
        if not dry_run:
            if release.tag in state.unfinished:
                self.finish(release)
            self._point(release, state, why, candidate=False)
            self.finish(release)  # also where `prune` hid it meanwhile
        return () if release.current else self._pointing(release, False)


def listed_release(release: Release, revision: str) -> ListedRelease:
    """Return a local release as a destination would list it."""
    title, created, _ = manifest_summary(release.files[MANIFEST].path.read_bytes())
    return ListedRelease(release.tag, revision, created or day_in(release.tag), title, False, False, release.size)


def pointer_moved(address: str, pointer: str, now: str | None, tag: str) -> StageError:
    """Return the error for a pointer that somebody moved after the snapshot."""
    return StageError(
        f"{address}: {pointer} names {now or 'nothing'} now: somebody else published meanwhile. "
        "Nothing was overwritten.",
        hint=f"Look at `quantmint release list {address}`; the same command again makes {tag} the next.",
    )


def require_same(address: str, tag: str, there: str | None, identity: str) -> None:
    """Raise `StageError` when the tag has another release: ``there`` is its manifest's SHA-256 (None: no such tag)."""
    if there not in (None, identity):
        raise StageError(f"{address}: {tag} is another release there, and a release never changes.")


def manifest_summary(raw: bytes) -> tuple[str, str | None, int | None]:
    """Return title, creation time and total bytes from the bytes of a ``quantmint.json``.

    Returns "", None, None for an unreadable one: a list must also show damaged releases.
    """
    try:
        parsed = manifest.decode(raw)
    except manifest.ManifestError:
        return "", None, None
    return parsed.title, parsed.created, sum(file.size for file in parsed.files.values()) + len(raw)


def newest_first(releases: Iterable[ListedRelease]) -> tuple[ListedRelease, ...]:
    """Sort releases by creation time, the newest first; of equal times the current one, then the highest tag."""

    def age(release: ListedRelease) -> tuple[datetime, bool, str]:
        return datetime.fromisoformat(release.created), release.current, release.tag

    return tuple(sorted(releases, key=age, reverse=True))


def find_release(releases: Sequence[ListedRelease], tag: str, address: str) -> ListedRelease:
    """Return the release with this tag; raise `UserError` with the nearest tag when there is none."""
    match = next((release for release in releases if release.tag == tag), None)
    if match is None:
        tags = [release.tag for release in releases]
        raise UserError(
            f"{address} has no release {tag}{did_you_mean(tag, tags)}",
            hint=f"`quantmint release list {address}` lists them."
            if tags
            else f"Nothing is published in {address} yet.",
        )
    return match


def find_candidate(releases: Sequence[ListedRelease], tag: str | None, address: str) -> ListedRelease:
    """Return the candidate with this tag (None: the only one), or the current release if it has the tag.

    Raises `UserError` for no candidate, for several without a tag, and for the tag of an earlier release.
    """
    candidates = [release for release in releases if release.candidate]
    if tag is not None:
        release = find_release(releases, tag, address)
        if not (release.candidate or release.current):
            raise UserError(
                f"{tag} is an earlier release of {address}, expected a candidate"
                + (f" such as {candidates[0].tag}" if candidates else ""),
                hint=f"`quantmint release rollback {address} {tag}` makes it the current one again.",
            )
        return release
    if not candidates:
        raise UserError(
            f"{address} has no candidate to promote", hint="`quantmint publish RECIPE --to candidate` publishes one."
        )
    if len(candidates) > 1:
        tags = ", ".join(release.tag for release in candidates)
        raise UserError(f"{address} has {len(candidates)} candidates, expected the tag of one: {tags}")
    return candidates[0]


def outdated(releases: Sequence[ListedRelease], *, keep: int) -> tuple[ListedRelease, ...]:
    """Return the releases beyond the newest ``keep``, the newest first, without the current one and candidates.

    Candidates do not count towards ``keep``: nobody can roll back to a release that readers never had.
    """
    return tuple(release for release in without_candidates(releases)[keep:] if not release.current)


def without_candidates(releases: Iterable[ListedRelease]) -> tuple[ListedRelease, ...]:
    """Return all releases but the candidates, the newest first."""
    return newest_first(release for release in releases if not release.candidate)
