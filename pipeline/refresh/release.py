"""The release that a recipe is held against, wherever it lies: of a place only its ``quantmint.json`` is read.

It is what a run last made the current release. Where that is not recorded, or a person chose another one, or a newer
one waits as a candidate, it is the newest: a release that somebody went back from was made all the same, and making it
again would bring back what they went back from. Newest by when its gate had judged; a date that is more than a day
ahead of this machine's clock says nothing, and such a release counts as older than all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

from pipeline.canonical import Json
from pipeline.publish import manifest
from pipeline.publish.manifest import Manifest, ManifestError
from pipeline.publish.release import MANIFEST, TAG
from pipeline.publish.target import Listed, Target
from pipeline.publish.wholeness import DamagedError, require_whole
from pipeline.recipe.schema import Recipe
from pipeline.store.runs import Run
from pipeline.store.tree import Store

STORE: Final = "the store"
_AHEAD: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Released:
    """A release. ``place`` is what the target calls itself, "the store" for one that only its package tells of.

    ``shown`` is the tag that readers get there, None where they get none or nobody could be asked; it is another one
    after a rollback, and beside a candidate: then ``readers`` is its manifest, None where it has none. ``by_run`` says
    whether a run chose what readers get. ``candidates`` are tags that wait to be promoted, ``left`` those that no run
    returns to, with their manifests where they are there.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None
    by_run: bool = False
    readers: Manifest | None = None
    candidates: frozenset[str] = frozenset()
    left: Mapping[str, Manifest | None] = field(default_factory=dict)

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
        return {
            "place": self.place,
            "tag": self.tag,
            "created": self.created,
            "shown": self.shown,
            "chosen_by_run": self.by_run,
        }


def places(recipe: Recipe, home: Path) -> Mapping[str, Callable[[], Released | None]]:
    """How each place of a recipe is asked for its release, by its name, the nearest first.

    ``home`` is what a folder is relative to. Nothing is asked before a value is called: it returns None where nothing
    was ever published, raises `DamagedError` or `ManifestError` for a release that cannot be read, and else whatever
    the place's client does.
    """
    section, name = recipe.publish, recipe.name
    found: dict[str, Callable[[], Released | None]] = {}
    if section.folder is not None:
        from pipeline.publish.folder import FolderTarget

        folder = FolderTarget((home / section.folder).resolve(), name)
        found[folder.place] = partial(_newest, folder, here=True)
    if section.storage is not None:
        from pipeline.publish.storage import StorageTarget

        bucket = StorageTarget(section.storage.url, name, endpoint=section.storage.endpoint)
        found[bucket.place] = partial(_newest, bucket, here=False)
    if section.hub is not None:
        found[section.hub.repo] = partial(_on_hub, section.hub.repo, by_request=section.hub.via == "pull-request")
    return found


def newest(found: Iterable[Released]) -> Released | None:
    """The newest of what several places hold; of one that lies in several, the first place's."""
    now = datetime.now(UTC)
    ordered = sorted(found, key=lambda one: (not is_ahead(one.created, now), one.created, one.tag), reverse=True)
    return ordered[0] if ordered else None  # the sort is stable


def is_ahead(created: str, now: datetime) -> bool:
    """Whether a date cannot be: more than a day after ``now``, by a clock that was wrong."""
    return datetime.fromisoformat(created) > now + _AHEAD


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


def made_here(name: str, store: Store, runs: Sequence[Run]) -> frozenset[str]:
    """Tags of the releases of a recipe that a store's ``runs`` made, as far as it still has them."""
    digests = {dict(run.plan).get("package") for run in runs if run.recipe == name}
    entries = (store.find("package", digest) for digest in digests if digest is not None)
    return frozenset(str(entry.record.result.get("tag")) for entry in entries if entry is not None)


def _newest(target: Target, *, here: bool) -> Released | None:
    """``here``: its files lie on this machine, and each one's size is looked at too."""
    now = datetime.now(UTC)
    listed = sorted(target.releases(), key=lambda release: is_ahead(release.created, now))  # stable
    shown = next((release for release in listed if release.current), None)
    by_run = shown is not None and target.chosen_by_run()
    candidates = frozenset(release.tag for release in listed if release.candidate)
    left = {tag: _left(target, tag, listed) for tag in target.left()} if listed else {}
    newer = takewhile(lambda release: release is not shown, listed)
    if shown is not None and by_run and not any(release.candidate for release in newer):
        listed = [shown, *(release for release in listed if release is not shown)]
    for release in listed:
        made = _manifest(target, release, here)
        if made is not None:
            other = _manifest(target, shown, here) if shown is not None and shown is not release else None
            tag = None if shown is None else shown.tag
            return Released(target.place, release.tag, made, tag, by_run, other, candidates, left)
    return None


def _left(target: Target, tag: str, listed: Sequence[Listed]) -> Manifest | None:
    """What a release was made from that a person went back from; None where it is gone, or damaged."""
    found = next((release for release in listed if release.tag == tag), None)
    try:
        return None if found is None else _manifest(target, found, here=False)
    except (DamagedError, ManifestError):
        return None


def _manifest(target: Target, release: Listed, here: bool) -> Manifest | None:
    """What a release was made from; None for one that was made before releases said so."""
    folder = target.fetch(None, tag=release.tag, progress=Silent(), wanted=lambda name: name == MANIFEST)
    path = folder / MANIFEST
    if not path.is_file():
        if TAG.fullmatch(release.tag):
            raise DamagedError(f"{folder} is damaged: its {MANIFEST} is missing")
        return None
    if here:
        sizes = {one.relative_to(folder).as_posix(): one.lstat().st_size for one in folder.rglob("*")}
        require_whole(path.read_bytes(), release.tag, sizes, str(folder))
    return manifest.read(path)


def _on_hub(repo: str, *, by_request: bool) -> Released | None:
    from pipeline.refresh.hub import newest_on_hub

    return newest_on_hub(repo, by_request=by_request)


class Silent:
    """A `pipeline.stage.Progress` for files of some kilobytes, which many places are asked for at once."""

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Nothing."""
        yield lambda _: None

    def say(self, message: str) -> None:
        """Nothing."""

    def warn(self, message: str) -> None:
        """Nothing."""
