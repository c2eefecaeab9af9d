"""A bucket as a place to publish to: S3 and what is compatible, Google, Azure, or a folder that machines share.

    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52/model-00001-of-00030.safetensors, ...
    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52.json      written when the publication was over
    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52.removed   while `prune` removes it: nobody can choose it
    s3://bucket/models/llama70b-fp8kv/current.json                 what readers get
    s3://bucket/models/llama70b-fp8kv/candidate.json               what waits to be promoted

Nobody looks under a tag before ``current.json`` names it; that object is replaced as a whole, on the condition that it
is still the one that was read, and that it names the release which was current when the state was looked at.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.machine import cache_folder
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish import manifest
from quantmint.pipeline.publish.destination import (
    Destination,
    DestinationState,
    Difference,
    ListedRelease,
    find_release,
    newest_first,
    pointer_moved,
    require_same,
)
from quantmint.pipeline.publish.release import MANIFEST, SIGNATURE, TAG, Release
from quantmint.pipeline.recipe.destinations import Storage
from quantmint.pipeline.store.disk import disk_errors
from quantmint.pipeline.store.files import DamagedError, Wanted, fetch
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.objects import Objects

_CURRENT: Final = "current.json"
_CANDIDATE: Final = "candidate.json"
_JSON: Final = ".json"
_REMOVED: Final = ".removed"
_TRIES: Final = 5  # of a swap, where others rewrite the pointer and it still names the same release


@dataclass(frozen=True, slots=True)
class Pointer:
    """A release by its tag and identity, and what lists say of it; ``created`` is ISO 8601, ``size`` in bytes."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    tag: Annotated[str, StringConstraints(pattern=r"^v\d{8}-[0-9a-f]{8}$")]
    identity: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    title: str
    created: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)$")]
    size: Annotated[int, Field(ge=0)]
    schema: Annotated[int, Field(ge=1, le=1)] = 1


class BucketDestination(Destination):
    """``url/name``. ``endpoint`` is the address of an S3-compatible server (None: AWS, or AWS_ENDPOINT_URL)."""

    @classmethod
    def of(cls, destination: Storage, name: str, home: Path, *, typed: bool = False) -> BucketDestination:
        """See `Destination.of`."""
        return cls(destination.url, name, destination.endpoint)

    def __init__(self, url: str, name: str, endpoint: str | None = None) -> None:
        self._url = f"{url.rstrip('/')}/{name}"
        self._endpoint = endpoint

    @cached_property
    def _objects(self) -> Objects:
        return Objects(self._url, self._endpoint)

    @property
    def address(self) -> str:
        """The URL under which the releases lie."""
        return self._url

    def preflight(self, release: Release | None) -> None:
        """Credentials, bucket, the rights to list, write and remove; that the pointers are ours, and so is the tag."""
        self._objects.require_writable()
        state = self.state()
        if release is not None:
            self._require_own(release, state)

    def state(self) -> DestinationState:
        """What was published to its end, and what is pointed to: of that only the record can be missing."""
        pointed = {name: self._look(name) for name in (_CANDIDATE, _CURRENT)}
        names = self._objects.names()
        recorded, hidden = (
            {name.removesuffix(end) for name in names if name.endswith(end) and TAG.fullmatch(name.removesuffix(end))}
            for end in (_JSON, _REMOVED)
        )
        found = {pointer.tag: pointer for pointer, _ in pointed.values() if pointer is not None}
        for tag in recorded - found.keys() - hidden:
            pointer, _ = self._look(f"{tag}{_JSON}")
            if pointer is not None:
                found[tag] = pointer
        waits, current = tags = [None if pointer is None else pointer.tag for pointer, _ in pointed.values()]
        listed = (
            _listed(pointer, current=pointer.tag == current, candidate=pointer.tag == waits != current)
            for pointer in found.values()
        )
        # Of the tag that waits the releases do not tell where it is current as well: its promotion was cut off.
        mark = _Mark(dict(zip(pointed, tags, strict=True)), frozenset(hidden))
        return DestinationState(newest_first(listed), frozenset(found.keys() - recorded), mark)

    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """By the sizes and digests that the server says.

        The signature of a release that was published to its end is not compared: it is the same whoever signed it.
        """
        known = self._require_own(release, state)
        present = self._objects.sizes(release.tag)
        missing = [
            name
            for name, file in release.files.items()
            if not (known and name == SIGNATURE)
            and (present.get(name) != file.size or not self._objects.holds(f"{release.tag}/{name}", file))
        ]
        strays = sorted(present.keys() - release.files.keys() - {SIGNATURE})
        return Difference(sorted(missing, key=lambda name: (name == MANIFEST, name)), strays)

    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Under the tag, the manifest last."""
        if self._objects.insecure is not None:
            progress.warn(f"{self._objects.insecure} is not encrypted: what is sent can be read on the way.")
        with progress.bar(release.size, "B") as advance:
            advance(release.size - sum(release.files[name].size for name in diff.missing))
            for name in diff.missing:
                self._objects.send(f"{release.tag}/{name}", release.files[name], advance)
        for name in diff.strays:
            progress.warn(f"{self._url}: {release.tag}/{name} is no file of the release and was removed.")
            self._objects.remove(f"{release.tag}/{name}")
        return release.identity

    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Replace ``current.json`` or ``candidate.json``."""
        name = _CANDIDATE if candidate else _CURRENT
        self._swap(name, state.mark.tags[name], _pointer(release))

    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Remove ``candidate.json``."""
        pointer, _ = self._look(_CANDIDATE)
        if pointer is not None and pointer.tag in {release.tag for release in releases}:
            self._objects.remove(_CANDIDATE)

    def finish(self, release: ListedRelease) -> None:
        """Write the record of its own name; whoever wrote one before wrote the same."""
        name = f"{release.tag}{_JSON}"
        if self._objects.read(name) is None:
            self._objects.put_if(name, _encode(_pointer(release)), None)

    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """One object."""
        found = self._objects.read(f"{release.tag}/{name}")
        return None if found is None else found.data

    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """By the bucket's list."""
        return self._objects.sizes(release.tag)

    def expected_identity(self, release: ListedRelease) -> str:
        """All of it: the record holds it."""
        return release.revision

    def is_in_use(self, release: ListedRelease) -> bool:
        """By the pointers."""
        pointers = (self._look(name)[0] for name in (_CURRENT, _CANDIDATE))
        return any(pointer is not None and pointer.tag == release.tag for pointer in pointers)

    def hidden(self) -> Sequence[ListedRelease]:
        """Those that have a ``v….removed``."""
        found = (self._look(name)[0] for name in self._objects.names() if name.endswith(_REMOVED))
        return [_listed(pointer) for pointer in found if pointer is not None]

    def hide(self, release: ListedRelease) -> None:
        """Write ``v….removed``, then the pointer anew: who read it before cannot swap it without reading it again."""
        self._objects.put_if(f"{release.tag}{_REMOVED}", _encode(_pointer(release)), None)
        for _ in range(_TRIES):
            current, mark = self._look(_CURRENT)
            if current is None or current.tag == release.tag:
                return
            if self._objects.put_if(_CURRENT, _encode(current, unique=True), mark):
                return
        self.unhide(release)
        raise StageError(f"{self._url}: {_CURRENT} changes all the time: nothing was removed", hint="Run it again.")

    def unhide(self, release: ListedRelease) -> None:
        """Remove ``v….removed``."""
        self._objects.remove(f"{release.tag}{_REMOVED}")

    def drop(self, release: ListedRelease) -> None:
        """Its files, its record, and last what hides it: the same command goes on with what was cut off."""
        self._objects.remove_folder(release.tag)
        self._objects.remove(f"{release.tag}{_JSON}")
        self.unhide(release)

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Wanted = None) -> Path:
        """A copy whose digests were checked, in ``into`` or below XDG_CACHE_HOME; what is there is not sent again."""
        state = self.state()
        found = tag or (state.current.tag if state.current else None)
        if found is None:
            raise UserError(f"{self._url}: nothing is published there")
        release = find_release(state.releases, found, self._url)
        raw = self.manifest_of(release)
        sizes, digests = manifest.expected_files(raw, self.sizes(release), f"{self._url}/{release.tag}", wanted)
        which = hashlib.sha256(f"{self._endpoint or ''} {self._url}".encode()).hexdigest()[:16]
        folder = into or cache_folder() / "releases" / which / release.tag

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return self._objects.pieces(f"{release.tag}/{name}", start, sizes[name])

        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with Lock(folder.parent / f".{folder.name}.lock"):
            return fetch(folder, sizes, digests, pieces, place=self._url, progress=progress, wanted=wanted)

    def _look(self, name: str) -> tuple[Pointer | None, str | None]:
        """A pointer as it is now, and the mark of its object (None, None: there is none)."""
        found = self._objects.read(name)
        return (None, None) if found is None else (_decode(found.data, f"{self._url}/{name}"), found.mark)

    def _swap(self, name: str, seen: str | None, new: Pointer) -> None:
        """Replace a pointer that names the release ``seen``; raises `StageError` where it names another one.

        Between reading the pointer and writing it, on the condition that it is the same object, this looks for
        ``v….removed``: `hide` writes that before it renews the pointer, so that one of the two learns of the other.
        """
        for _ in range(_TRIES):
            before, mark = self._look(name)
            if before == new:
                return  # the answer was lost on the way, or another process published the same
            if (before and before.tag) != seen:
                break
            hidden = self._objects.read(f"{new.tag}{_REMOVED}") is not None
            if hidden or self._objects.read(f"{new.tag}/{MANIFEST}") is None:  # in this order: `drop` has the other one
                raise _removed(self._url, new.tag)
            if self._objects.put_if(name, _encode(new), mark):
                return
        raise pointer_moved(self._url, name, None if before is None else before.tag, new.tag)

    def _require_own(self, release: Release, state: DestinationState) -> bool:
        """Whether the release was published to its end; raises `StageError` where its tag is another's, or removed."""
        if release.tag in state.mark.hidden and release.tag not in state.mark.tags.values():
            raise _removed(self._url, release.tag)
        found = state.find(release.tag)
        require_same(self._url, release.tag, None if found is None else found.revision, release.identity)
        return found is not None and release.tag not in state.unfinished


@dataclass(frozen=True, slots=True)
class _Mark:
    """Tags that the pointers named, by the objects' names (None: nothing), and tags that `prune` removes."""

    tags: Mapping[str, str | None]
    hidden: frozenset[str]


def _removed(url: str, tag: str) -> StageError:
    return StageError(
        f"{url}: `quantmint release prune` removes {tag}, or has removed it",
        hint="Wait for it, or run it again where it was cut off; then the recipe can be published again.",
    )


def _listed(pointer: Pointer, *, current: bool = False, candidate: bool = False) -> ListedRelease:
    created, title = pointer.created, pointer.title
    return ListedRelease(pointer.tag, pointer.identity, created, title, current, candidate, pointer.size)


def _pointer(release: ListedRelease) -> Pointer:
    return Pointer(release.tag, release.revision, release.title, release.created, release.size or 0)


def _encode(pointer: Pointer, *, unique: bool = False) -> bytes:
    """Return a pointer's bytes; ``unique``: with blanks behind it that no other call writes, for an ETag of its own."""
    blanks = "".join(secrets.choice(" \t") for _ in range(64)) if unique else ""
    return (json.dumps(asdict(pointer), indent=1, sort_keys=True, ensure_ascii=False) + f"{blanks}\n").encode()


def _decode(data: bytes, what: str) -> Pointer:
    """Read a pointer; ``what`` is what an error calls it. Raises `DamagedError`."""
    try:
        return TypeAdapter(Pointer).validate_json(data)
    except ValidationError as error:
        raise DamagedError(
            f"{what} is no pointer to a release: {manifest.first_fault(error)}",
            hint="Was it written by something else than quantmint, or by a newer one?",
        ) from None
