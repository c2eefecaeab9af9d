"""The release that a recipe is held against, wherever it lies: of a place only its ``quantmint.json`` is read.

It is the newest, by when its gate had judged.

Unlike `pipeline.publish.hub.client`, which has hours of work to save, nothing is tried twice here: who asks whether
something is due goes on with what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from pipeline.base.canonical import Json
from pipeline.base.errors import StageError
from pipeline.publish import manifest
from pipeline.publish.hub.client import Client, MissingError, connect
from pipeline.publish.hub.repository import MAIN
from pipeline.publish.manifest import Manifest, ManifestError
from pipeline.publish.place import Listed, Place
from pipeline.publish.release import MANIFEST, TAG, day_in, identity_in
from pipeline.recipe.schema import Recipe
from pipeline.store.files import DamagedError
from pipeline.store.runs import Run
from pipeline.store.tree import Store

STORE: Final = "the store"
TIMEOUT_S: Final = 5.0
"""Of one request to the Hub."""


@dataclass(frozen=True, slots=True)
class Released:
    """A release. ``place`` is what the target calls itself, "the store" for one that only its package tells of.

    ``shown`` is the tag that readers get there, None where they get none or nobody could be asked; it is another one
    after a rollback, and beside a candidate: then ``readers`` is its manifest, None where it has none. ``tags`` are all
    releases of the place.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None
    readers: Manifest | None = None
    tags: frozenset[str] = frozenset()

    @property
    def created(self) -> str:
        """When its gate had judged: ISO 8601 in UTC."""
        return self.manifest.created

    def as_shown(self) -> Released | None:
        """The release that readers get; None where that is this one, or is not known."""
        if self.shown is None or self.readers is None or self.shown == self.tag:
            return None
        return replace(self, tag=self.shown, manifest=self.readers, readers=None)

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
        found[folder.address] = partial(_newest, folder, here=True)
    if section.storage is not None:
        from pipeline.publish.bucket import BucketPlace

        bucket = BucketPlace(section.storage.url, name, endpoint=section.storage.endpoint)
        found[bucket.address] = partial(_newest, bucket, here=False)
    if section.hub is not None:
        found[section.hub.repo] = partial(_newest_on_hub, section.hub.repo)
    return found


def newest(found: Iterable[Released]) -> Released | None:
    """The newest of what several places hold; of one that lies in several, the first place's."""
    ordered = sorted(found, key=lambda one: (one.created, one.tag), reverse=True)  # stable
    return ordered[0] if ordered else None


def packaged(name: str, store: Store, runs: Sequence[Run]) -> Released | None:
    """The last release of a recipe that one of a store's ``runs`` published; None where there was none, or it is gone.

    ``runs`` are the newest first, as `pipeline.store.runs.list_runs` has them.
    """
    for run in runs:
        digest = dict(run.plan).get("package")
        if run.recipe != name or run.exit_code != 0 or digest is None:
            continue
        entry = store.find("package", digest)
        if entry is None:
            continue
        try:
            return Released(STORE, str(entry.record.result["tag"]), manifest.read(entry.file(MANIFEST)))
        except (ManifestError, KeyError):
            continue
    return None


class Silent:
    """A `pipeline.stages.stage.Progress` for files of some kilobytes, which many places are asked for at once."""

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Nothing."""
        yield lambda _: None

    def say(self, message: str) -> None:
        """Nothing."""

    def warn(self, message: str) -> None:
        """Nothing."""


# A folder or a bucket.


def _newest(target: Place, *, here: bool) -> Released | None:
    """``here``: its files lie on this machine, and each one's size is looked at too."""
    listed = target.releases()
    shown = next((release for release in listed if release.current), None)
    for release in listed:
        made = _manifest(target, release, here)
        if made is not None:
            readers = None if shown is None or shown is release else _manifest(target, shown, here)
            tag = None if shown is None else shown.tag
            return Released(target.address, release.tag, made, tag, readers, frozenset(one.tag for one in listed))
    return None


def _manifest(target: Place, release: Listed, here: bool) -> Manifest | None:
    """What a release was made from; None for one that was made before releases said so."""
    folder = target.fetch(None, tag=release.tag, progress=Silent(), wanted=lambda name: name == MANIFEST)
    path = folder / MANIFEST
    if not path.is_file():
        if TAG.fullmatch(release.tag):
            raise DamagedError(f"{folder} is damaged: its {MANIFEST} is missing")
        return None
    if here:
        sizes = {one.relative_to(folder).as_posix(): one.lstat().st_size for one in folder.rglob("*")}
        manifest.require_whole(path.read_bytes(), release.tag, sizes, str(folder))
    return manifest.read(path)


# The Hub.


def _newest_on_hub(repo: str) -> Released | None:
    """The release of a repository; None where it is not there, or has none.

    The day is in the tag, so of many releases only those of the last day are read: their manifests never change, and
    the Hub's cache keeps them. A tag that only looks like a release's hides none. Raises `QuantmintError`.
    """
    client = connect(repo, Silent(), tries=1)
    try:
        head, tags = _refs(client)
    except MissingError:
        if not _has_token():  # then it may be there all the same: the Hub shows a private one to nobody else
            raise
        return None
    shown = None if head is None else _shown(client, head, tags)
    for _, day in groupby(sorted(tags, reverse=True), key=day_in):
        found = [(made, tag) for tag in day if (made := _manifest_on_hub(client, tag, tags[tag])) is not None]
        if found:
            made, tag = max(found, key=lambda pair: (pair[0].created, pair[1]))
            other = None if shown in (None, tag) else _manifest_on_hub(client, str(shown), tags[str(shown)])
            return Released(repo, tag, made, shown, other, frozenset(tags))
    return None


def _manifest_on_hub(client: Client, tag: str, commit: str) -> Manifest | None:
    """What the release of a tag was made from; None for a tag that somebody else made."""
    raw = _raw(client, commit)
    if raw is None or not manifest.identity(raw).startswith(identity_in(tag)):
        return None
    return manifest.decode(raw, what=f"{client.repo}@{tag}/{MANIFEST}")


def _raw(client: Client, commit: str) -> bytes | None:
    try:
        return hub_file(client, commit, MANIFEST).read_bytes()
    except MissingError:
        return None


def _refs(client: Client) -> tuple[str | None, dict[str, str]]:
    """The commit of `main`, and those of release tags by their names. The client's own method knows no timeout."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def ask() -> Any:
        url = f"{client.api.endpoint}/api/models/{client.repo}/refs"
        response = get_session().get(url, headers=build_hf_headers(library_name="quantmint"), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
        return response.json()

    said = client.call("read its branches and tags", ask)
    heads = {str(ref["name"]): str(ref["targetCommit"]) for ref in said["branches"]}
    tags = {str(ref["name"]): str(ref["targetCommit"]) for ref in said["tags"] if TAG.fullmatch(str(ref["name"]))}
    return heads.get(MAIN), tags


def _shown(client: Client, head: str, tags: Mapping[str, str]) -> str | None:
    """The tag whose manifest `main` has: a release that was promoted or rolled back to is there by another commit."""
    raw = _raw(client, head)
    mark = "" if raw is None else manifest.identity(raw)
    return next((tag for tag in tags if mark.startswith(identity_in(tag))), None)


def hub_file(client: Client, commit: str, name: str) -> Path:
    """A small file of a repository at a commit, from the Hub's cache where it is there. Raises `QuantmintError`."""
    from huggingface_hub import hf_hub_download

    fetch: Callable[..., str] = hf_hub_download
    found = client.call(
        f"read {name} of {commit[:8]}",
        lambda: fetch(client.repo, name, revision=commit, endpoint=client.api.endpoint, etag_timeout=TIMEOUT_S),
    )
    path = Path(found)
    size = path.stat().st_size
    if size > manifest.LARGEST:
        raise StageError(f"{client.repo}: {name} has {size:,} bytes, expected at most {manifest.LARGEST:,}")
    return path


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
