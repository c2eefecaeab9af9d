"""The newest release at a destination, read by few requests and without a second try: its tag and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from quantmint.pipeline.base.canonical import Json
from quantmint.pipeline.publish import manifest
from quantmint.pipeline.publish.destination import Destination, ListedRelease
from quantmint.pipeline.publish.hub.client import HubClient, MissingError, connect
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.hub.repository import MAIN
from quantmint.pipeline.publish.manifest import Manifest
from quantmint.pipeline.publish.release import MANIFEST, TAG, day_in, identity_in

TIMEOUT_S: Final = 5.0
"""Of one request to the Hub."""


@dataclass(frozen=True, slots=True)
class NewestRelease:
    """The newest release at a destination. ``place`` is the destination's address.

    ``shown`` is the tag of the release that readers get there: another one after a rollback or beside a candidate, None
    if readers get none. ``tags`` are the tags of all releases at the destination.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None
    tags: frozenset[str] = frozenset()

    @property
    def created(self) -> str:
        """Return the time of the gate's judgement in ISO 8601, UTC."""
        return self.manifest.created

    def to_json(self) -> dict[str, Json]:
        """Return destination, tags and time as plain data, without the manifest."""
        return {"place": self.place, "tag": self.tag, "created": self.created, "shown": self.shown}


def newest_release(target: Destination) -> NewestRelease | None:
    """Return the newest release at a destination; None if there is none.

    Raises `DamagedError` or `ManifestError` for a release that cannot be read, `QuantmintError` for a destination that
    does not answer.
    """
    if isinstance(target, HubDestination):
        return _newest_on_hub(target.repo)
    listed = target.releases()
    if not listed:
        return None
    newest, shown = listed[0], next((release for release in listed if release.current), None)
    # The one that readers get is read too: one with a damaged manifest has lost its place in the order.
    manifests = [_manifest(target, release) for release in dict.fromkeys((newest, shown or newest))]
    tags = frozenset(release.tag for release in listed)
    return NewestRelease(target.address, newest.tag, manifests[0], None if shown is None else shown.tag, tags)


def _manifest(target: Destination, release: ListedRelease) -> Manifest:
    raw, where = target.manifest_of(release), f"{target.address}: {release.tag}"
    manifest.require_sizes(raw, target.sizes(release), where)
    return manifest.decode(raw, what=f"{where}/{MANIFEST}")


def _newest_on_hub(repo: str) -> NewestRelease | None:
    """Return the newest release of a repository; None if the repository does not exist or has no release.

    The day is in the tag, so of many releases only those of the last day are read: their manifests never change, and
    the Hub's cache keeps them. A tag that only looks like a release's is skipped.
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
    similar = (tag for tag in tags if head is not None and _is_of(head, tag))  # by 8 of the manifest's 64 hex digits
    shown = next((tag for tag in similar if _raw(client, tags[tag]) == head), None)
    for _, day in groupby(sorted(tags, reverse=True), key=day_in):
        raws = {tag: raw for tag in day if (raw := _raw(client, tags[tag])) is not None and _is_of(raw, tag)}
        releases = [(manifest.decode(raw, what=f"{repo}@{tag}/{MANIFEST}"), tag) for tag, raw in raws.items()]
        if releases:
            newest, tag = max(releases, key=lambda pair: (pair[0].created, pair[1]))
            return NewestRelease(repo, tag, newest, shown, frozenset(tags))
    return None


def _is_of(raw: bytes, tag: str) -> bool:
    return manifest.identity(raw).startswith(identity_in(tag))


def _raw(client: HubClient, commit: str) -> bytes | None:
    try:
        return hub_file(client, commit, MANIFEST).read_bytes()
    except MissingError:
        return None


def hub_file(client: HubClient, commit: str, name: str) -> Path:
    """Return the path of a small file of a repository at a commit, in the Hub's cache. Raises `QuantmintError`."""
    from huggingface_hub import hf_hub_download

    where = {"revision": commit, "endpoint": client.api.endpoint, "etag_timeout": TIMEOUT_S}
    path: Any = client.call(f"read {name} of {commit[:8]}", lambda: hf_hub_download(client.repo, name, **where))
    return Path(path)
