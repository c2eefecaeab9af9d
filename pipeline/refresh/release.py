"""The newest release of a recipe, wherever it lies: of all that a place holds only ``quantmint.json`` is read.

Newest, and not current: a release that somebody went back from was made all the same, and making it again would bring
back what they went back from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from pipeline.canonical import Json
from pipeline.publish import manifest
from pipeline.publish.manifest import Manifest, ManifestError
from pipeline.publish.release import MANIFEST
from pipeline.publish.target import Target
from pipeline.recipe.schema import Recipe
from pipeline.store.runs import Run
from pipeline.store.tree import Store

STORE: Final = "the store"


@dataclass(frozen=True, slots=True)
class Released:
    """A release. ``place`` is what the target calls itself, "the store" for one that only its package tells of.

    ``shown`` is the tag that readers get there, None where they get none or nobody could be asked; it is another one
    after a rollback, and beside a candidate.
    """

    place: str
    tag: str
    manifest: Manifest
    shown: str | None = None

    @property
    def created(self) -> str:
        """When its gate had judged: ISO 8601 in UTC."""
        return self.manifest.created

    def to_json(self) -> dict[str, Json]:
        """What it is and where, without what it was made from."""
        return {"place": self.place, "tag": self.tag, "created": self.created, "shown": self.shown}


def places(recipe: Recipe, home: Path) -> Mapping[str, Callable[[], Released | None]]:
    """How each place of a recipe is asked for its newest release, by its name, the nearest first.

    ``home`` is what a folder is relative to. Nothing is asked before a value is called: it returns None where nothing
    was ever published, and raises whatever the place's client does.
    """
    section, name = recipe.publish, recipe.name
    found: dict[str, Callable[[], Released | None]] = {}
    if section.folder is not None:
        from pipeline.publish.folder import FolderTarget

        folder = FolderTarget((home / section.folder).resolve(), name)
        found[folder.place] = partial(_newest, folder)
    if section.storage is not None:
        from pipeline.publish.storage import StorageTarget

        bucket = StorageTarget(section.storage.url, name, endpoint=section.storage.endpoint)
        found[bucket.place] = partial(_newest, bucket)
    if section.hub is not None:
        found[section.hub.repo] = partial(_on_hub, section.hub.repo)
    return found


def newest(found: Iterable[Released]) -> Released | None:
    """The newest of what several places hold; of one that lies in several, the first place's."""
    ordered = sorted(found, key=lambda released: (released.created, released.tag), reverse=True)  # stable
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


def _newest(target: Target) -> Released | None:
    listed = target.releases()
    shown = next((release.tag for release in listed if release.current), None)
    for release in listed:
        folder = target.fetch(None, tag=release.tag, progress=Silent(), wanted=lambda name: name == MANIFEST)
        if (folder / MANIFEST).is_file():  # else it was made before releases had one, and says nothing of its inputs
            return Released(target.place, release.tag, manifest.read(folder / MANIFEST), shown)
    return None


def _on_hub(repo: str) -> Released | None:
    from pipeline.refresh.hub import newest_on_hub

    return newest_on_hub(repo)


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
