"""Releases in a bucket, or below any other URL that fsspec reaches.

    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52/model-00001-of-00030.safetensors, ...
    s3://bucket/models/llama70b-fp8kv/v20261121-3f1c0a52.json      written when the publication was over
    s3://bucket/models/llama70b-fp8kv/current.json                 what readers get
    s3://bucket/models/llama70b-fp8kv/candidate.json               what waits to be promoted

A release comes into being file by file under its own tag, where nobody looks before ``current.json`` names it; that
object is replaced as a whole, on the condition that it is still the one that was there when the publication began. So
a crash changes nothing for readers, and the same command sends only what is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from pipeline.errors import StageError, UserError
from pipeline.locks import Lock
from pipeline.progress import Progress
from pipeline.publish import manifest
from pipeline.publish.choosing import earlier, named, removable, waiting
from pipeline.publish.fetching import OtherBytesError, fetch
from pipeline.publish.listing import described, newest_first
from pipeline.publish.release import MANIFEST, SIGNATURE, TAG, File, Release, day_in
from pipeline.publish.storage.objects import Objects, open_objects
from pipeline.publish.storage.pointers import CANDIDATE, CHOSEN, CURRENT, LEFT, Pointer, decode, encode
from pipeline.publish.target import Listed, Operation, Published
from pipeline.publish.wholeness import DamagedError, require_whole
from pipeline.store.disk import disk_errors

_JSON: Final = ".json"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A pointer as it was found: what it names, and the mark of the object (None, None: it was not there)."""

    pointer: Pointer | None
    mark: str | None

    @property
    def tag(self) -> str | None:
        return None if self.pointer is None else self.pointer.tag


class StorageTarget:
    """``url/name``; see `pipeline.publish.target.Target`.

    ``endpoint`` is the address of an S3-compatible server (None: AWS, or what AWS_ENDPOINT_URL says).
    """

    def __init__(self, url: str, name: str, endpoint: str | None = None) -> None:
        self._place = f"{url.rstrip('/')}/{name}"
        self._endpoint = endpoint

    @cached_property
    def _objects(self) -> Objects:
        return open_objects(self._place, self._endpoint)

    @property
    def place(self) -> str:
        """The URL under which the releases lie."""
        return self._place

    def require_access(self) -> None:
        """Credentials, bucket, the rights to list and to write; and that the pointers are ours."""
        self._require_writable({})

    def preflight(self, release: Release) -> None:
        """The same, and S3's limits."""
        self._require_writable({f"{release.tag}/{name}": file.size for name, file in release.files.items()})
        self._record(release)

    def operations(self, release: Release, *, candidate: bool) -> Sequence[Operation]:
        """What would be uploaded and pointed. Of what is there the server is asked for sizes and digests."""
        current, waits = self._look(CURRENT), self._look(CANDIDATE)
        known = self._record(release) is not None
        strays, missing = self._compared(release, known)
        return (
            *(Operation("upload", name, release.files[name].size) for name in missing),
            *(Operation("remove", f"{release.tag}/{name}") for name in strays),
            *self._pointing(release.tag, current, waits, candidate=candidate, again=known),
        )

    def publish(self, release: Release, *, candidate: bool, progress: Progress) -> Published:
        """Upload what is not there, then point to it."""
        insecure = self._objects.insecure
        if insecure is not None:
            progress.warn(f"{insecure} is not encrypted: what is sent can be read on the way.")
        current, waits = self._look(CURRENT), self._look(CANDIDATE)
        known = self._record(release) is not None
        strays, missing = self._compared(release, known)
        with progress.bar(release.size, "B") as advance:
            advance(release.size - sum(release.files[name].size for name in missing))
            for name in missing:
                self._objects.send(f"{release.tag}/{name}", release.files[name], advance)
        for name in strays:
            progress.warn(f"{self._place}: {release.tag}/{name} is no file of the release and was removed.")
            self._objects.drop(f"{release.tag}/{name}")
        if missing:
            self._objects.tidy(release.tag)
        if known and not self._has_signature_of(release):
            progress.warn(f"{release.tag} is there with another signature, which stays: a release never changes.")
        pointer = _pointer(release)
        shown = current.tag
        todo = self._pointing(release.tag, current, waits, candidate=candidate, again=known)
        if todo and candidate:
            self._write(CANDIDATE, pointer, waits)
        elif todo:
            chosen = self._look(CHOSEN)
            if chosen.pointer is not None and chosen.tag != current.tag:  # somebody replaced it, and noted nothing
                self._leave(chosen.pointer)
            self._show(pointer, current, waits)
            shown = release.tag
        if not candidate and (todo or not known):
            self._write(CHOSEN, pointer, self._look(CHOSEN))
        if not known:
            self._write(f"{release.tag}{_JSON}", pointer, _Seen(None, None))
        return Published(self._place, release.tag, release.identity, shown == release.tag, again=known and not missing)

    def releases(self) -> Sequence[Listed]:
        """What was published to its end, and what is pointed to: of that only the record can be missing."""
        shown, waiting_there = self._look(CURRENT).pointer, self._look(CANDIDATE).pointer
        pointed = {pointer.tag: pointer for pointer in (waiting_there, shown) if pointer is not None}
        current, waits = shown and shown.tag, waiting_there and waiting_there.tag
        tags = {name.removesuffix(_JSON) for name in self._objects.names() if name.endswith(_JSON)}
        tags = {tag for tag in tags if TAG.fullmatch(tag)} | pointed.keys()
        found = (self._look(f"{tag}{_JSON}").pointer or pointed.get(tag) for tag in sorted(tags))
        return newest_first(
            Listed(
                tag=pointer.tag,
                revision=pointer.identity,
                created=pointer.created,
                title=pointer.title,
                current=pointer.tag == current,
                candidate=pointer.tag == waits != current,
                size=pointer.size,
            )
            for pointer in found
            if pointer is not None
        )

    def promote(self, tag: str | None, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Point to a candidate: one object is written."""
        current = self._look(CURRENT)
        return self._by_hand(waiting(self.releases(), tag, self._place), current, None, dry_run)

    def rollback(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Point to an earlier release: one object is written."""
        current = self._look(CURRENT)
        return self._by_hand(named(self.releases(), tag, self._place), current, current.pointer, dry_run)

    def chosen_by_run(self) -> bool:
        """Whether ``chosen.json`` names the current release."""
        current = self._look(CURRENT).tag
        return current is not None and self._look(CHOSEN).tag == current

    def bring_back(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Point to an earlier release, then note that a run did; one that was cut off between goes by a person's."""
        current, chosen = self._look(CURRENT), self._look(CHOSEN)
        release = earlier(self.releases(), tag)
        if release is None or current.tag is None or chosen.tag != current.tag or tag in self.left():
            return ()
        done = self._switch(release, current, dry_run)
        shown = self._look(f"{tag}{_JSON}").pointer
        if not dry_run and shown is not None:
            self._write(CHOSEN, shown, chosen)
        return done

    def left(self) -> frozenset[str]:
        """By the objects ``left.*``; and what a run made the current one, where ``chosen.json`` was left behind."""
        noted = {name.removeprefix(LEFT).removesuffix(_JSON) for name in self._objects.names() if name.startswith(LEFT)}
        chosen, current = self._look(CHOSEN).tag, self._look(CURRENT).tag
        return frozenset(noted if chosen is None else noted | {chosen}) - {current}

    def remove(self, tags: Collection[str], *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """Remove the files, and the record last: what was cut off is still listed, and removed by the same command."""
        gone = removable(self.releases(), tags, self._place)
        for release in () if dry_run else gone:
            removable(self.releases(), [release.tag], self._place)  # it takes minutes, and somebody may go back to one
            progress.say(f"removing {release.tag}")
            self._objects.clear(release.tag)
            self._objects.drop(f"{release.tag}{_JSON}")
        return tuple(Operation("remove", release.tag, release.size) for release in gone)

    def fetch(
        self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Callable[[str], bool] | None = None
    ) -> Path:
        """A copy whose digests were checked, in ``into`` or below XDG_CACHE_HOME; what is there is not sent again."""
        found = tag or self._look(CURRENT).tag
        if found is None:
            raise UserError(f"{self._place}: nothing is published there")
        release = named(self.releases(), found, self._place)
        present = self._objects.sizes(release.tag)
        raw = self._manifest(release, present)
        files = manifest.decode(raw, what=f"{self._place}/{release.tag}/{MANIFEST}").files
        sizes = {name: file.size for name, file in files.items()} | {MANIFEST: len(raw)}
        digests = {name: file.sha256 for name, file in files.items()} | {MANIFEST: release.revision}
        if SIGNATURE in present:
            sizes[SIGNATURE] = present[SIGNATURE]
        strays = [name for name in sorted(present.keys() - sizes.keys()) if wanted is None or wanted(name)]
        if strays:  # what serves straight from a bucket loads whatever weights lie there
            raise OtherBytesError(
                f"{self._place}: {release.tag}/{strays[0]} is no file of the release",
                hint="Publishing the release again removes it.",
            )
        folder = into or self._cache() / release.tag

        def pieces(name: str, start: int) -> Iterator[bytes]:
            return self._objects.pieces(f"{release.tag}/{name}", start, sizes[name])

        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with Lock(folder.parent / f".{folder.name}.lock"):
            return fetch(folder, sizes, digests, pieces, place=self._place, progress=progress, wanted=wanted)

    def _by_hand(
        self, release: Listed, current: _Seen, back_from: Pointer | None, dry_run: bool
    ) -> Sequence[Operation]:
        """What a person chose: no run replaces it by an earlier one, nor returns to what somebody went back from."""
        if not dry_run:
            if back_from is not None and not release.current:
                self._leave(back_from)
            for note in (f"{LEFT}{release.tag}{_JSON}", CHOSEN):
                if self._objects.read(note) is not None:
                    self._objects.drop(note)
        return self._switch(release, current, dry_run)

    def _leave(self, pointer: Pointer) -> None:
        name = f"{LEFT}{pointer.tag}{_JSON}"
        self._write(name, pointer, self._look(name))

    def _switch(self, release: Listed, current: _Seen, dry_run: bool) -> Sequence[Operation]:
        """Make a release the current one, if its files are there by name and size, and its manifest by its digest."""
        if release.current:
            return ()
        present = self._objects.sizes(release.tag)
        raw = self._manifest(release, present)
        require_whole(raw, release.tag, present, f"{self._place}/{release.tag}")
        record, waits = self._look(f"{release.tag}{_JSON}").pointer, self._look(CANDIDATE)
        done = self._pointing(release.tag, current, waits, candidate=False, again=False)
        chosen = record or waits.pointer
        if not dry_run and chosen is not None:
            self._record_of(chosen)
            self._show(chosen, current, waits)
        return done

    def _pointing(
        self, tag: str, current: _Seen, waits: _Seen, *, candidate: bool, again: bool
    ) -> tuple[Operation, ...]:
        """What remains of a publication once the files are there.

        Nothing for a release that was there: another may be current because somebody went back to it.
        """
        if again and (candidate or current.pointer is not None):
            return ()
        if candidate:
            there = tag in (current.tag, waits.tag)
            return () if there else (Operation("point", f"{self._place}/{CANDIDATE} to {tag}"),)
        ended = (Operation("remove", f"{self._place}/{CANDIDATE}"),) if _ends(waits.tag, tag, current.tag) else ()
        return () if current.tag == tag else (Operation("point", f"{self._place}/{CURRENT} to {tag}"), *ended)

    def _show(self, pointer: Pointer, current: _Seen, waits: _Seen) -> None:
        if current.pointer is not None:
            # Readers had it, so its publication is over: the command that was cut off must not bring it back.
            self._record_of(current.pointer)
        self._write(CURRENT, pointer, current)
        if _ends(waits.tag, pointer.tag, current.tag):
            self._objects.drop(CANDIDATE)

    def _record_of(self, pointer: Pointer) -> None:
        """Write the record of a release, where it is missing."""
        name = f"{pointer.tag}{_JSON}"
        if self._look(name).pointer is None:
            self._write(name, pointer, _Seen(None, None))

    def _write(self, name: str, pointer: Pointer, seen: _Seen) -> None:
        """Replace a pointer, unless somebody else did since it was seen."""
        data = encode(pointer)
        now = self._objects.read(name)
        if (None if now is None else now.mark) == seen.mark and self._objects.replace(name, data, seen.mark):
            return
        now = self._objects.read(name)
        if now is not None and now.data == data:
            return  # ours: the answer was lost on the way, or another process published the same
        there = "nothing" if now is None else decode(now.data, f"{self._place}/{name}").tag
        raise StageError(
            f"{self._place}: {name} named {seen.tag or 'nothing'} when this began and names {there} now: somebody else "
            "published. Nothing was overwritten.",
            hint=f"Look at `quantmint releases {self._place}`; the same command again makes {pointer.tag} the next.",
        )

    def _require_writable(self, sizes: Mapping[str, int]) -> None:
        self._objects.require_writable(sizes)
        self._look(CURRENT)
        self._look(CANDIDATE)

    def _look(self, name: str) -> _Seen:
        found = self._objects.read(name)
        if found is None:
            return _Seen(None, None)
        return _Seen(decode(found.data, f"{self._place}/{name}"), found.mark)

    def _record(self, release: Release) -> Pointer | None:
        """What was written when this release was published to its end; None where it was not."""
        found = self._look(f"{release.tag}{_JSON}").pointer
        if found is not None and found.identity != release.identity:
            raise StageError(f"{self._place}: {release.tag} is another release there, and a release never changes.")
        return found

    def _compared(self, release: Release, known: bool) -> tuple[list[str], list[str]]:
        """Names that the release does not have, and files that are not there as they should be, the manifest last.

        The signature of a release that was published to its end is not compared: it is the same whoever signed it.
        """
        present = self._objects.sizes(release.tag)
        ours: Mapping[str, File] = release.files
        strays = sorted(present.keys() - ours.keys() - {SIGNATURE})
        missing = [
            name
            for name, file in ours.items()
            if not (known and name == SIGNATURE)
            and (present.get(name) != file.size or not self._objects.holds(f"{release.tag}/{name}", file))
        ]
        return strays, sorted(missing, key=lambda name: (name == MANIFEST, name))

    def _has_signature_of(self, release: Release) -> bool:
        there = self._objects.read(f"{release.tag}/{SIGNATURE}")
        ours = release.files.get(SIGNATURE)
        return (None if there is None else hashlib.sha256(there.data).hexdigest()) == (ours and ours.sha256)

    def _manifest(self, release: Listed, present: Mapping[str, int]) -> bytes:
        """The bytes of a release's manifest, which are those that its record names."""
        found = (
            self._objects.read(f"{release.tag}/{MANIFEST}") if present.get(MANIFEST, 0) <= manifest.LARGEST else None
        )
        if found is None or manifest.identity(found.data) != release.revision:
            state = "missing" if found is None else "not the one that was published"
            raise DamagedError(
                f"{self._place}/{release.tag} is damaged: its {MANIFEST} is {state}",
                hint="What readers get stays as it is. Publish the release again, or choose another one.",
            )
        return found.data

    def _cache(self) -> Path:
        """A folder for copies of what this place holds."""
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        which = hashlib.sha256(f"{self._endpoint or ''} {self._place}".encode()).hexdigest()[:16]
        return root / "quantmint" / "releases" / which


def _ends(waits: str | None, shown: str, before: str | None) -> bool:
    """Whether a candidate is one no more: it is shown now, or was before, by a promotion that was cut off."""
    return waits is not None and waits in (shown, before)


def _pointer(release: Release) -> Pointer:
    said = described(release.files[MANIFEST].path.read_bytes())
    return Pointer(release.tag, release.identity, release.title, said.created or day_in(release.tag), release.size)
