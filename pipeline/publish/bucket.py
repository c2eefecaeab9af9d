"""A bucket as a destination: S3 and compatible servers, Google, Azure, or a folder that machines share.

    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52/model-00001-of-00030.safetensors, ...
    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52.json      written when the publication was finished
    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52.removed   while `prune` removes the release
    s3://bucket/models/llama70b-fp8kv/current.json                 pointer to the current one
    s3://bucket/models/llama70b-fp8kv/candidate.json               pointer to the candidate

Readers look under a tag only after ``current.json`` names it. That object is replaced as a whole, if it is still the
object that was read and names the release that was current in the snapshot.
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
from quantmint.pipeline.store.files import DamagedError, Selection, fetch
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.objects import Objects

_CURRENT: Final = "current.json"
_CANDIDATE: Final = "candidate.json"
_JSON: Final = ".json"
_REMOVED: Final = ".removed"
_TRIES: Final = 5  # of a swap, while others rewrite the pointer with the same release


@dataclass(frozen=True, slots=True)
class Pointer:
    """The content of a pointer or of a release's record: tag, manifest's SHA-256 (``identity``), and facts for lists.

    ``created`` is ISO 8601, ``size`` is in bytes.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    tag: Annotated[str, StringConstraints(pattern=r"^v\d{8}-[0-9a-f]{8}$")]
    identity: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    title: str
    created: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)$")]
    size: Annotated[int, Field(ge=0)]
    schema: Annotated[int, Field(ge=1, le=1)] = 1


class BucketDestination(Destination):
    """The bucket prefix ``url/name``, below which the releases lie.

    ``endpoint`` is the address of an S3-compatible server (None: AWS, or AWS_ENDPOINT_URL).
    """

    @classmethod
    def of(cls, destination: Storage, name: str, home: Path, *, typed: bool = False) -> BucketDestination:
        """Return the destination for a recipe's section, without any request; ``home`` and ``typed`` change nothing."""
        return cls(destination.url, name, destination.endpoint)

    def __init__(self, url: str, name: str, endpoint: str | None = None) -> None:
        self._url = f"{url.rstrip('/')}/{name}"
        self._endpoint = endpoint

    @cached_property
    def _objects(self) -> Objects:
        return Objects(self._url, self._endpoint)

    @property
    def address(self) -> str:
        """Return the URL under which the releases lie."""
        return self._url

    def preflight(self, release: Release | None) -> None:
        """Raise if the release (None: any) could not be published.

        Checks the credentials, the bucket, the rights to list, write and remove, the pointers, and the release's tag.
        """
        self._objects.require_writable()
        state = self.state()
        if release is not None:
            self._require_own(release, state)

    def state(self) -> DestinationState:
        """Return a snapshot: the finished releases, and those that a pointer names.

        A release without a record is unfinished.
        """
        pointed = {name: self._look(name) for name in (_CANDIDATE, _CURRENT)}
        names = self._objects.names()
        recorded, hidden = (
            {name.removesuffix(end) for name in names if name.endswith(end) and TAG.fullmatch(name.removesuffix(end))}
            for end in (_JSON, _REMOVED)
        )
        pointers = {pointer.tag: pointer for pointer, _ in pointed.values() if pointer is not None}
        for tag in recorded - pointers.keys() - hidden:
            pointer, _ = self._look(f"{tag}{_JSON}")
            if pointer is not None:
                pointers[tag] = pointer
        waits, current = tags = [None if pointer is None else pointer.tag for pointer, _ in pointed.values()]
        listed = (
            _listed(pointer, current=pointer.tag == current, candidate=pointer.tag == waits != current)
            for pointer in pointers.values()
        )
        # The pointers' own tags: the list does not show a candidate that is current too (an interrupted promotion).
        mark = _Pointers(dict(zip(pointed, tags, strict=True)), frozenset(hidden))
        return DestinationState(newest_first(listed), frozenset(pointers.keys() - recorded), mark)

    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """Return the differences from the release by the sizes and digests that the server reports.

        The signature of a finished release is left out: another signer makes no other release. Raises `StageError` if
        the tag is another release's.
        """
        finished = self._require_own(release, state)
        present = self._objects.sizes(release.tag)
        missing = [
            name
            for name, file in release.files.items()
            if not (finished and name == SIGNATURE)
            and (present.get(name) != file.size or not self._objects.holds(f"{release.tag}/{name}", file))
        ]
        strays = sorted(present.keys() - release.files.keys() - {SIGNATURE})
        return Difference(sorted(missing, key=lambda name: (name == MANIFEST, name)), strays)

    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Send the missing files under the tag, the manifest last, and remove foreign ones.

        Returns the release's identity. Warns if the connection is not encrypted.
        """
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
        """Replace ``current.json``, or with ``candidate`` ``candidate.json``; ``why`` is not used.

        Raises `StageError` if the pointer moved since the snapshot, or if `prune` is removing the release.
        """
        name = _CANDIDATE if candidate else _CURRENT
        self._swap(name, state.mark.tags[name], _pointer(release))

    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Remove ``candidate.json`` if it names one of these releases."""
        pointer, _ = self._look(_CANDIDATE)
        if pointer is not None and pointer.tag in {release.tag for release in releases}:
            self._objects.remove(_CANDIDATE)

    def finish(self, release: ListedRelease) -> None:
        """Write the release's record, which every publisher writes with the same bytes."""
        name = f"{release.tag}{_JSON}"
        if self._objects.read(name) is None:
            self._objects.put_if(name, _encode(_pointer(release)), None)

    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """Return the bytes of one object of the release; None if there is no such object."""
        stored = self._objects.read(f"{release.tag}/{name}")
        return None if stored is None else stored.data

    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """Return the size in bytes of every object under the release's tag, by name."""
        return self._objects.sizes(release.tag)

    def expected_identity(self, release: ListedRelease) -> str:
        """Return the SHA-256 of the release's manifest from its record or pointer."""
        return release.revision

    def is_in_use(self, release: ListedRelease) -> bool:
        """Return whether ``current.json`` or ``candidate.json`` names the release."""
        pointers = (self._look(name)[0] for name in (_CURRENT, _CANDIDATE))
        return any(pointer is not None and pointer.tag == release.tag for pointer in pointers)

    def hidden(self) -> Sequence[ListedRelease]:
        """Return the releases that have an object ``v….removed``."""
        pointers = (self._look(name)[0] for name in self._objects.names() if name.endswith(_REMOVED))
        return [_listed(pointer) for pointer in pointers if pointer is not None]

    def hide(self, release: ListedRelease) -> None:
        """Write ``v….removed``, then rewrite ``current.json``, so that a swap based on an earlier read of it fails.

        Raises `StageError`, with the release in the list again, if the pointer changes at every attempt.
        """
        self._objects.put_if(f"{release.tag}{_REMOVED}", _encode(_pointer(release)), None)
        for _ in range(_TRIES):
            current, mark = self._look(_CURRENT)
            if current is None or current.tag == release.tag:
                return
            if self._objects.put_if(_CURRENT, _encode(current, unique=True), mark):
                return
        self.unhide(release)
        raise StageError(
            f"{self._url}: {_CURRENT} changed at each of {_TRIES} attempts: nothing was removed", hint="Run it again."
        )

    def unhide(self, release: ListedRelease) -> None:
        """Remove ``v….removed``."""
        self._objects.remove(f"{release.tag}{_REMOVED}")

    def drop(self, release: ListedRelease) -> None:
        """Delete the files, the record, and ``v….removed`` last, so that `prune` can finish an interrupted drop."""
        self._objects.remove_folder(release.tag)
        self._objects.remove(f"{release.tag}{_JSON}")
        self.unhide(release)

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, select: Selection = None) -> Path:
        """Copy the release with digest checks to ``into`` or below XDG_CACHE_HOME, and return the folder.

        Files that are already there are not sent again. Raises `UserError` if nothing is published or the tag is
        unknown.
        """
        state = self.state()
        chosen = tag or (state.current.tag if state.current else None)
        if chosen is None:
            raise UserError(f"{self._url}: nothing is published there")
        release = find_release(state.releases, chosen, self._url)
        raw = self.manifest_of(release)
        sizes, digests = manifest.expected_files(raw, self.sizes(release), f"{self._url}/{release.tag}", select)
        which = hashlib.sha256(f"{self._endpoint or ''} {self._url}".encode()).hexdigest()[:16]
        folder = into or cache_folder() / "releases" / which / release.tag

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return self._objects.pieces(f"{release.tag}/{name}", start, sizes[name])

        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with Lock(folder.parent / f".{folder.name}.lock"):
            return fetch(folder, sizes, digests, pieces, place=self._url, progress=progress, select=select)

    def _look(self, name: str) -> tuple[Pointer | None, str | None]:
        """Return a pointer and its object's ETag for conditional writes; None, None if the object does not exist."""
        stored = self._objects.read(name)
        return (None, None) if stored is None else (_decode(stored.data, f"{self._url}/{name}"), stored.mark)

    def _swap(self, name: str, expected: str | None, new: Pointer) -> None:
        """Replace the pointer ``name`` by ``new`` if it names the release ``expected`` (None: if there is no pointer).

        Raises `StageError` if it names another release, or if `prune` removes the new one. Between the read and the
        conditional write of the pointer this looks for ``v….removed``. `hide` writes that object before it rewrites the
        pointer, so one of the two notices the other.
        """
        for _ in range(_TRIES):
            before, mark = self._look(name)
            if before == new:
                return  # the answer was lost on the way, or another process published the same
            if (before and before.tag) != expected:
                break
            hidden = self._objects.read(f"{new.tag}{_REMOVED}") is not None
            if (
                hidden or self._objects.read(f"{new.tag}/{MANIFEST}") is None
            ):  # in this order: `drop` deletes in the other
                raise _removed(self._url, new.tag)
            if self._objects.put_if(name, _encode(new), mark):
                return
        raise pointer_moved(self._url, name, None if before is None else before.tag, new.tag)

    def _require_own(self, release: Release, state: DestinationState) -> bool:
        """Return whether the release is finished here.

        Raises `StageError` if its tag belongs to another release, or if `prune` is removing it.
        """
        if release.tag in state.mark.hidden and release.tag not in state.mark.tags.values():
            raise _removed(self._url, release.tag)
        listed = state.find(release.tag)
        require_same(self._url, release.tag, None if listed is None else listed.revision, release.identity)
        return listed is not None and release.tag not in state.unfinished


@dataclass(frozen=True, slots=True)
class _Pointers:
    """The tags in the pointers, by object name (None: no pointer), and the tags that `prune` is removing."""

    tags: Mapping[str, str | None]
    hidden: frozenset[str]


def _removed(url: str, tag: str) -> StageError:
    return StageError(
        f"{url}: `quantmint release prune` is removing {tag}, or has removed it",
        hint="Wait for it; if it was interrupted, run it again. Then publish the recipe again.",
    )


def _listed(pointer: Pointer, *, current: bool = False, candidate: bool = False) -> ListedRelease:
    created, title = pointer.created, pointer.title
    return ListedRelease(pointer.tag, pointer.identity, created, title, current, candidate, pointer.size)


def _pointer(release: ListedRelease) -> Pointer:
    return Pointer(release.tag, release.revision, release.title, release.created, release.size or 0)


def _encode(pointer: Pointer, *, unique: bool = False) -> bytes:
    """Return a pointer as JSON; ``unique`` appends random blanks, which give the object a new ETag."""
    blanks = "".join(secrets.choice(" \t") for _ in range(64)) if unique else ""
    return (json.dumps(asdict(pointer), indent=1, sort_keys=True, ensure_ascii=False) + f"{blanks}\n").encode()


def _decode(data: bytes, what: str) -> Pointer:
    """Parse a pointer. Raises `DamagedError` for other bytes, which it calls ``what``."""
    try:
        return TypeAdapter(Pointer).validate_json(data)
    except ValidationError as error:
        raise DamagedError(
            f"{what} is no pointer to a release: {manifest.first_fault(error)}",
            hint="Was it written by something else than quantmint, or by a newer one?",
        ) from None
