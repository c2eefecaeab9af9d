"""A place that releases are published to, and what can be done there.

    target = open_target("my-org/Llama-3.3-70B-FP8-KV")
    target.publish(release, candidate=False, progress=progress)
    target.releases()
    target.promote(None, progress=progress)
    target.rollback("v20261121-3f1c0a52", progress=progress)

What a run made the current release, another run may replace by an earlier one (`Target.bring_back`): its inputs moved
there and back. What a person promoted or rolled back to stays: each place records which of the two it was, and what
somebody went back from, to which no run returns.

Three kinds: a repository of the Hub (`pipeline.publish.hub`), a folder (`pipeline.publish.folder`), a bucket
(`pipeline.publish.storage`). In each of them readers get one release at a time, the current one, and it changes from
one to another in a single step; a tagged release never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.progress import Progress
from pipeline.publish.release import Release


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that would be done, in words: ``verb`` "upload", ``what`` "model.safetensors", ``size`` in bytes."""

    verb: str
    what: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """Where a release is now. ``revision`` names its bytes for ever; ``again``: it was there, nothing was sent."""

    place: str
    tag: str
    revision: str
    current: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Listed:
    """A release that a place holds. ``created`` is ISO 8601 in UTC; ``size`` in bytes, None where nobody said."""

    tag: str
    revision: str
    created: str
    title: str
    current: bool
    candidate: bool
    size: int | None = None


class Target(Protocol):
    """A place. Errors are `StageError` (try again) and `UserError` (it will never work so); both lose nothing."""

    @property
    def place(self) -> str:
        """What it is called: ``my-org/name``, ``published/name``, ``s3://bucket/prefix/name``."""
        ...

    def require_access(self) -> None:
        """What would stop any release: rights, and what is in the way; asked before hours of work make one."""
        ...

    def preflight(self, release: Release) -> None:
        """Everything that would stop a publication, asked before the first byte: rights, sizes, names, room."""
        ...

    def operations(self, release: Release, *, candidate: bool) -> Sequence[Operation]:
        """Exactly what `publish` would do now; asks, but changes nothing."""
        ...

    def publish(self, release: Release, *, candidate: bool, progress: Progress) -> Published:
        """Make the release the current one, or a candidate. A release that is there already is left as it is."""
        ...

    def releases(self) -> Sequence[Listed]:
        """What is there, the newest first."""
        ...

    def promote(self, tag: str | None, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Make a candidate the current release (None: the only one); returns what was done."""
        ...

    def rollback(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Make an earlier release the current one again, byte by byte; returns what was done."""
        ...

    def chosen_by_run(self) -> bool:
        """Whether a run made the current release that, and nobody promoted or rolled back to one since.

        False where that is not recorded, as before this was: then nobody knows, and the current release stays.
        """
        ...

    def bring_back(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """A run makes an earlier release the current one again; returns what was done.

        Nothing unless `chosen_by_run`, nor where the release is not there, is one of `left`, or waits as a candidate,
        which is for a person to promote.
        """
        ...

    def left(self) -> frozenset[str]:
        """Tags of releases that a person went back from, and that nobody has chosen since; they need not be there."""
        ...

    def remove(self, tags: Collection[str], *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Remove releases, never the current one or a candidate."""
        ...

    def fetch(
        self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Callable[[str], bool] | None = None
    ) -> Path:
        """A folder with a release's files (None: the current one): where it lies, or a copy in ``into`` or a cache.

        ``wanted`` says of a file's name in the release whether it is needed (None: all are); a folder that lies here is
        given as it is. What is fetched from elsewhere is not believed: names that lead out of the folder are refused.
        """
        ...
