"""Every kind of place with its stand-in, and the questions that tests ask of any of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish.bucket import BucketDestination
from quantmint.pipeline.publish.destination import Destination, Publication
from quantmint.pipeline.publish.folder import FolderDestination
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import Release
from quantmint.pipeline.recipe.destinations import Hub

KINDS = ("folder", "bucket", "file", "hub", "pull-request")
TOLD = PlainReporter(io.StringIO())
MakeDestination = Callable[[str], Destination]
"""Opens the place of a name, of one kind; two calls with one name are two publishers."""


def maker(kind: str, request: pytest.FixtureRequest, folder: Path) -> MakeDestination:
    """Return what opens places of a kind, below ``folder`` or on the stand-in that the kind needs."""
    match kind:
        case "folder":
            return lambda name: FolderDestination(folder / "published", name)
        case "bucket":
            return request.getfixturevalue("bucket").place  # type: ignore[no-any-return]
        case "file":
            return lambda name: BucketDestination(f"file://{folder}/models", name)
        case _:
            request.getfixturevalue("hub")
            via = "commit" if kind == "hub" else kind

            def repository(name: str) -> Destination:
                repo = f"my-org/{name}"
                return HubDestination(repo, Hub.model_validate({"repo": repo, "via": via}))

            return repository


def publish(place: Destination, release: Release, *, candidate: bool = False) -> Publication:
    return place.publish(release, candidate=candidate, progress=TOLD)


def states(place: Destination) -> dict[str, str]:
    """The tags, and which of them readers get."""
    return {one.tag: "current" if one.current else "candidate" if one.candidate else "" for one in place.releases()}


def read(place: Destination, into: Path, tag: str | None = None) -> dict[str, bytes]:
    """What a reader gets."""
    folder = place.fetch(into, tag=tag, progress=TOLD)
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: (folder / name).read_bytes() for name in found if not name.startswith(".cache/")}


def contents(release: Release) -> dict[str, bytes]:
    return {name: file.path.read_bytes() for name, file in release.files.items()}
