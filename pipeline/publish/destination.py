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
from quantmint.pipeline.store.files import DamagedError, Wanted


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that would be done, in words: ``verb`` "upload", ``what`` "model.safetensors", ``size`` in bytes."""

    verb: str
    what: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """Where a release is now. ``revision`` names its bytes for ever; ``again``: it was there, nothing was sent."""

    place: str
    tag: str
    revision: str
    current: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class ListedRelease:
    """A release that a place holds. ``created`` is ISO 8601 in UTC; ``size`` in bytes, None where nobody said."""

    tag: str
    revision: str
    created: str
    title: str
    current: bool
    candidate: bool
    size: int | None = None


@dataclass(frozen=True, slots=True)
class DestinationState:
    """A place as it was looked at: releases, the newest first; ``unfinished`` tags, whose publication was cut off.

    ``mark`` is what the place itself needs to refuse a change where somebody else made one since.
    """

    releases: tuple[ListedRelease, ...] = ()
    unfinished: frozenset[str] = frozenset()
    mark: Any = None

    @property
    def current(self) -> ListedRelease | None:
        """What readers get."""
        return next((release for release in self.releases if release.current), None)

    def find(self, tag: str) -> ListedRelease | None:
        """The release of that tag."""
        return next((release for release in self.releases if release.tag == tag), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """How what lies under a release's tag differs from it: names to send, and names that are none of its."""

    missing: Sequence[str] = field(default=())
    strays: Sequence[str] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.missing or self.strays)


class Destination(ABC):
    """A place. Errors are `StageError` (try again) and `UserError` (it will never work so); both lose nothing."""

    @classmethod
    @abstractmethod
    def of(cls, destination: Any, name: str, home: Path, *, typed: bool = False) -> Destination:
        """Return the place of a recipe of that name, relative to ``home``; nothing is asked of it.

        ``destination`` is of the class in `recipe.destinations` whose place this is.
        ``typed``: a person named it on the command line, so no setting of it is to be changed.
        """

    @property
    @abstractmethod
    def address(self) -> str:
        """What it is called: ``my-org/name``, ``published/name``, ``s3://bucket/prefix/name``."""

    @abstractmethod
    def preflight(self, release: Release | None) -> None:
        """Everything that would stop a publication (None: any), asked before the first byte: rights, names, room."""

    @abstractmethod
    def state(self) -> DestinationState:
        """What is there now."""

    @abstractmethod
    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """What of a release is not there yet; without ``progress`` no file is read for that."""

    @abstractmethod
    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Send what differs and see that it arrived; returns the release's revision there."""

    @abstractmethod
    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Make it what readers get, and a candidate no more; or (``candidate``) make it what waits.

        In one step; refused where somebody else did so since the state was looked at.
        """

    @abstractmethod
    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Make those of these releases that wait as candidates no candidates any more."""

    @abstractmethod
    def finish(self, release: ListedRelease) -> None:
        """Note that its publication is over, where that is not noted yet."""

    @abstractmethod
    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """A small file of a release; None where it has none of that name."""

    @abstractmethod
    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """Bytes of every file that lies under a release's tag, by name."""

    @abstractmethod
    def is_in_use(self, release: ListedRelease) -> bool:
        """Return whether readers get a release now, or it waits for a promotion, also while it is hidden."""

    @abstractmethod
    def hide(self, release: ListedRelease) -> None:
        """Take a release out of the list: whoever looks from now on cannot choose it.

        Whoever looked before fails to point to it, where the place can tell; else the pointer is read again after this.
        """

    @abstractmethod
    def unhide(self, release: ListedRelease) -> None:
        """Put a release back into the list, where it is hidden."""

    @abstractmethod
    def drop(self, release: ListedRelease) -> None:
        """Remove a hidden release."""

    def hidden(self) -> Sequence[ListedRelease]:
        """Return the releases that an attempt to remove them has left hidden, where the place keeps any."""
        return ()

    @abstractmethod
    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Wanted = None) -> Path:
        """A folder with a release's files (None: the current one): where it lies, or a copy in ``into`` or a cache.

        ``wanted`` says of a file's name in the release whether it is needed (None: all are); a folder that lies here is
        given as it is. What is fetched from elsewhere is not believed: names that lead out of the folder are refused.
        """

    def expected_identity(self, release: ListedRelease) -> str:
        """Return the SHA-256 of a release's manifest, in as many hex digits as the place keeps beside it."""
        return identity_in(release.tag)

    def exclusive(self, progress: Progress) -> AbstractContextManager[None]:
        """What a change is made in: alone, where the place knows locks."""
        return nullcontext()

    def setup_operations(self, state: DestinationState) -> Sequence[Operation]:
        """What `put` and `finish` would do to the place itself, in words."""
        return ()

    def planned_operations(self, release: Release, *, candidate: bool) -> Sequence[Operation]:
        """Exactly what `publish` would do now; asks, but changes nothing."""
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
        """Make the release the current one, or a candidate. One that is there already is left as it is."""
        with self.exclusive(progress):
            state = self.state()
            known = state.find(release.tag) if release.tag not in state.unfinished else None
            difference = self.compare(release, state, candidate=candidate, progress=progress)
            if known is None or difference:
                revision = self.upload(release, difference, state, candidate=candidate, progress=progress)
            else:
                revision = known.revision
            listed = listed_release(release, revision)
            shown = state.current.tag if state.current else None
            if self._is_due(listed, state, candidate=candidate):
                self._point(listed, state, "Publish", candidate=candidate)
                shown = shown if candidate else release.tag
            self.finish(listed)
        again = known is not None and not difference
        return Publication(self.address, release.tag, revision, shown == release.tag, again=again)

    def releases(self) -> tuple[ListedRelease, ...]:
        """What is there, the newest first."""
        return self.state().releases

    def promote(self, tag: str | None, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Make a candidate the current release (None: the only one); returns what was done."""
        with nullcontext() if dry_run else self.exclusive(progress):
            state = self.state()
            return self._switch(find_candidate(state.releases, tag, self.address), state, "Promote", dry_run=dry_run)

    def rollback(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Make an earlier release the current one again, byte by byte; returns what was done."""
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
        """Remove all but the newest releases, never the current one or a candidate; returns what was done."""
        with nullcontext() if dry_run else self.exclusive(progress):
            gone = (*outdated(self.releases(), keep=keep), *self.hidden())
            if not dry_run:
                gone = tuple(release for release in gone if self._remove(release, progress))
            return tuple(Operation("remove", release.tag, release.size) for release in gone)

    def manifest_of(self, release: ListedRelease) -> bytes:
        """The bytes of a release's manifest, for which its tag vouches; raises `DamagedError` for others."""
        raw = self.read(release, MANIFEST)
        if raw is None or not manifest.identity(raw).startswith(self.expected_identity(release)):
            state = "missing" if raw is None else f"not that of {release.tag}"
            raise DamagedError(
                f"{self.address}: {release.tag} is damaged: its {MANIFEST} is {state}", hint=manifest.DAMAGED
            )
        return raw

    def _is_due(self, release: ListedRelease, state: DestinationState, *, candidate: bool) -> bool:
        """Whether a publication still has to point to its release.

        Not to one that was published to its end: another may be current because somebody went back to it.
        """
        there = state.find(release.tag)
        known = there is not None and release.tag not in state.unfinished
        if known and (candidate or state.current is not None):
            return False
        return there is None or not (there.current or (candidate and there.candidate))

    def _point(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """What readers had is finished first: a publication that was cut off stays so then."""
        if not candidate and state.current is not None and state.current.tag in state.unfinished:
            self.finish(state.current)
        self.set_pointer(release, state, why, candidate=candidate)
        if not candidate:  # the former one may have been promoted and cut off before this step
            self.withdraw([release, *([] if state.current is None else [state.current])])

    def _remove(self, release: ListedRelease, progress: Progress) -> bool:
        """Remove a release; return False where somebody has chosen it since the list was made."""
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
        """Each file's size is compared, not its digest: going back must not take the time of reading a model."""
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
    """A release as a place lists it."""
    title, created, _ = manifest_summary(release.files[MANIFEST].path.read_bytes())
    return ListedRelease(release.tag, revision, created or day_in(release.tag), title, False, False, release.size)


def pointer_moved(address: str, pointer: str, now: str | None, tag: str) -> StageError:
    """Return what is said where somebody moved a pointer after the state was looked at."""
    return StageError(
        f"{address}: {pointer} names {now or 'nothing'} now: somebody else published meanwhile. "
        "Nothing was overwritten.",
        hint=f"Look at `quantmint release list {address}`; the same command again makes {tag} the next.",
    )


def require_same(address: str, tag: str, there: str | None, identity: str) -> None:
    """Raise `StageError` where a tag is of another release, by the SHA-256 of its manifest (None: no such tag)."""
    if there not in (None, identity):
        raise StageError(f"{address}: {tag} is another release there, and a release never changes.")


def manifest_summary(raw: bytes) -> tuple[str, str | None, int | None]:
    """Title, creation and bytes of all files, as a ``quantmint.json`` says them; never raises.

    Of one that cannot be read nothing is known: a list must also show what is damaged.
    """
    try:
        found = manifest.decode(raw)
    except manifest.ManifestError:
        return "", None, None
    return found.title, found.created, sum(file.size for file in found.files.values()) + len(raw)


def newest_first(releases: Iterable[ListedRelease]) -> tuple[ListedRelease, ...]:
    """Releases by when they were made; of those of one judgement the current one first, then by their tags."""

    def age(one: ListedRelease) -> tuple[datetime, bool, str]:
        return datetime.fromisoformat(one.created), one.current, one.tag

    return tuple(sorted(releases, key=age, reverse=True))


def find_release(releases: Sequence[ListedRelease], tag: str, place: str) -> ListedRelease:
    """The release of that tag; raises `UserError` with the nearest tag where there is none."""
    found = next((release for release in releases if release.tag == tag), None)
    if found is None:
        tags = [release.tag for release in releases]
        raise UserError(
            f"{place} has no release {tag}{did_you_mean(tag, tags)}",
            hint=f"`quantmint release list {place}` lists them." if tags else f"Nothing is published in {place} yet.",
        )
    return found


def find_candidate(releases: Sequence[ListedRelease], tag: str | None, place: str) -> ListedRelease:
    """The candidate of that tag, or the only one; the current release where that is named: it was promoted before.

    Raises `UserError` where none waits, several do, or the tag is that of an earlier release.
    """
    candidates = [release for release in releases if release.candidate]
    if tag is not None:
        found = find_release(releases, tag, place)
        if not (found.candidate or found.current):
            raise UserError(
                f"{tag} is an earlier release of {place}, expected a candidate"
                + (f" such as {candidates[0].tag}" if candidates else ""),
                hint=f"`quantmint release rollback {place} {tag}` makes it the current one again.",
            )
        return found
    if not candidates:
        raise UserError(
            f"{place} has no candidate to promote", hint="`quantmint publish RECIPE --to candidate` publishes one."
        )
    if len(candidates) > 1:
        tags = ", ".join(release.tag for release in candidates)
        raise UserError(f"{place} has {len(candidates)} candidates, expected the tag of one: {tags}")
    return candidates[0]


def outdated(releases: Sequence[ListedRelease], *, keep: int) -> tuple[ListedRelease, ...]:
    """The releases beyond the newest ``keep``, the newest first; never the current one or a candidate.

    A candidate is not one of those that are counted either, because nobody can go back to what readers never had.
    """
    return tuple(release for release in without_candidates(releases)[keep:] if not release.current)


def without_candidates(releases: Iterable[ListedRelease]) -> tuple[ListedRelease, ...]:
    """Return the releases that a limit on their number counts, the newest first: all but candidates."""
    return newest_first(release for release in releases if not release.candidate)
