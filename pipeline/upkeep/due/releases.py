"""The release that a recipe is held against, wherever it lies: of a place only its ``quantmint.json`` is read.

It is the newest, by when its gate had judged.

Unlike `pipeline.publish.hub.client`, which has hours of work to save, nothing is tried twice here: who asks whether
something is due goes on with what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

from pipeline.base.canonical import Json
from pipeline.publish import manifest
from pipeline.publish.hub.client import Client, MissingError, connect
from pipeline.publish.hub.repository import MAIN
from pipeline.publish.manifest import Manifest
from pipeline.publish.place import Place
from pipeline.publish.release import MANIFEST, TAG, day_in, identity_in
from pipeline.recipe.schema import Recipe

TIMEOUT_S: Final = 5.0
"""Of one request to the Hub."""


@dataclass(frozen=True, slots=True)
class Released:
    """A release. ``place`` is what the target calls itself.

    ``shown`` is the tag that readers get there, None where they get none: another one after a rollback, and beside a
    candidate. ``tags`` are all releases of the place.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None
    tags: frozenset[str] = frozenset()

    @property
    def created(self) -> str:
        """When its gate had judged: ISO 8601 in UTC."""
        return self.manifest.created

    def to_json(self) -> dict[str, Json]:
        """What it is and where, without what it was made from."""
        return {"place": self.place, "tag": self.tag, "created": self.created, "shown": self.shown}


def places(recipe: Recipe, home: Path) -> Mapping[str, Callable[[], Released | None]]:
    """How each place of a recipe is asked for its release, by its name, the nearest first.

    ``home`` is what a folder is relative to. Nothing is asked before a value is called: it returns None where nothing
    was ever published, raises `DamagedError` or `ManifestError` for a release that cannot be read, and else whatever
    the place's client does.
    """
    section, name = recipe.publish, recipe.name
    found: dict[str, Callable[[], Released | None]] = {}
    if section.folder is not None:
        from pipeline.publish.folder import FolderPlace

        folder = FolderPlace((home / section.folder).resolve(), name)
        found[folder.address] = partial(_newest, folder)
    if section.storage is not None:
        from pipeline.publish.bucket import BucketPlace

        bucket = BucketPlace(section.storage.url, name, endpoint=section.storage.endpoint)
        found[bucket.address] = partial(_newest, bucket)
    if section.hub is not None:
        found[section.hub.repo] = partial(_newest_on_hub, section.hub.repo)
    return found


def newest(found: Iterable[Released]) -> Released | None:
    """The newest of what several places hold; of one that lies in several, the first place's."""
    ordered = sorted(found, key=lambda one: (one.created, one.tag), reverse=True)  # stable
    return ordered[0] if ordered else None


# A folder or a bucket.


def _newest(target: Place) -> Released | None:
    """Its files' sizes are looked at too."""
    listed = target.releases()
    if not listed:
        return None
    tag, raw = listed[0].tag, target.manifest_of(listed[0])
    where = f"{target.address}: {tag}"
    manifest.require_whole(raw, tag, target.sizes(listed[0]), where)
    made = manifest.decode(raw, what=f"{where}/{MANIFEST}")
    shown = next((release.tag for release in listed if release.current), None)
    return Released(target.address, tag, made, shown, frozenset(one.tag for one in listed))


# The Hub.


def _newest_on_hub(repo: str) -> Released | None:
    """The release of a repository; None where it is not there, or has none.

    The day is in the tag, so of many releases only those of the last day are read: their manifests never change, and
    the Hub's cache keeps them. A tag that only looks like a release's hides none. Raises `QuantmintError`.
    """
    from huggingface_hub import get_token

    client = connect(repo, tries=1)
    try:
        refs = client.call("read its branches and tags", lambda: client.api.list_repo_refs(repo))
    except MissingError:
        if get_token() is None:  # then it may be there all the same: the Hub shows a private one to nobody else
            raise
        return None
    tags = {str(ref.name): str(ref.target_commit) for ref in refs.tags if TAG.fullmatch(ref.name)}
    head = next((_raw(client, str(ref.target_commit)) for ref in refs.branches if ref.name == MAIN), None)
    # What was promoted or rolled back to is on `main` by another commit than the tagged one.
    shown = next((tag for tag in tags if head is not None and _is_of(head, tag)), None)
    for _, day in groupby(sorted(tags, reverse=True), key=day_in):
        raws = {tag: raw for tag in day if (raw := _raw(client, tags[tag])) is not None and _is_of(raw, tag)}
        found = [(manifest.decode(raw, what=f"{repo}@{tag}/{MANIFEST}"), tag) for tag, raw in raws.items()]
        if found:
            made, tag = max(found, key=lambda pair: (pair[0].created, pair[1]))
            return Released(repo, tag, made, shown, frozenset(tags))
    return None


def _is_of(raw: bytes, tag: str) -> bool:
    return manifest.identity(raw).startswith(identity_in(tag))


def _raw(client: Client, commit: str) -> bytes | None:
    try:
        return hub_file(client, commit, MANIFEST).read_bytes()
    except MissingError:
        return None


def hub_file(client: Client, commit: str, name: str) -> Path:
    """A small file of a repository at a commit, from the Hub's cache where it is there. Raises `QuantmintError`."""
    from huggingface_hub import hf_hub_download

    fetch: Callable[..., str] = hf_hub_download
    found = client.call(
        f"read {name} of {commit[:8]}",
        lambda: fetch(client.repo, name, revision=commit, endpoint=client.api.endpoint, etag_timeout=TIMEOUT_S),
    )
    return Path(found)
