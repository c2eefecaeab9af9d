"""From what a person typed, or a recipe says, to the places that releases are published to.

    open_place("published/llama70b-fp8kv")           a folder
    open_place("s3://bucket/models/llama70b-fp8kv")  a bucket
    open_place("my-org/Llama-3.3-70B-FP8-KV")        a repository of the Hub, also as hf://my-org/...
    elsewhere(recipe.publish, hub="my-org/name")     a recipe's publish section with the places of a command line

Nothing is asked of a place before its methods are called, and only what speaks to that kind of place is imported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from quantmint.pipeline.base.argument import HUB_SCHEME, classify
from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.publish.folder import RELEASES, FolderPlace
from quantmint.pipeline.publish.place import Place
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.recipe.sections import Hub, Publish

_URL: Final = re.compile(
    r"(?P<base>(?!http|hf:)[a-z][a-z0-9+.-]*://[^\x00-\x1f@?#]*[^/\x00-\x1f@?#])/(?P<name>[^/\x00-\x1f@?#]+)/?"
)
_EXPECTED: Final = "a published folder (published/NAME), a bucket (s3://bucket/prefix/NAME) or a repository (org/name)"


def open_place(text: str) -> Place:
    """The place that a person names; raises `UserError` for what is none.

    A published folder that is there goes before a repository of the same name; ``hf://org/name`` always means the Hub.
    """
    found = classify(text)
    path = Path(text).absolute()
    releases = path.parent / RELEASES
    if path.name and (releases / path.name).is_dir():
        return FolderPlace(path.parent, path.name)
    meant = text.startswith(HUB_SCHEME) or not releases.is_dir()
    if found.kind == "repository" and found.revision is None and meant:
        return _repository(found.place.removeprefix(HUB_SCHEME))
    if url := _URL.fullmatch(text):
        return _bucket(url["base"], url["name"])
    known = releases.iterdir() if releases.is_dir() else ()
    near = did_you_mean(text, [str(Path(text).with_name(one.name)) for one in known])
    raise UserError(
        f"{text}: nothing was published there{near}; expected {_EXPECTED}",
        hint=f"{HUB_SCHEME}{text} is the repository of that name." if found.kind == "repository" else None,
    )


def published_folder(recipe: Recipe, home: Path) -> Path | None:
    """Where readers find a recipe's checkpoint here, relative to ``home``; None where it publishes to no folder."""
    folder = recipe.publish.folder
    return None if folder is None else (home / folder).resolve() / recipe.name


def places_of(recipe: Recipe, home: Path) -> tuple[Place, ...]:
    """The places of a recipe, in the order in which they are published to: what is nearest comes first."""
    section, name = recipe.publish, recipe.name
    found: list[Place] = []
    folder = published_folder(recipe, home)
    if folder is not None:
        found.append(FolderPlace(folder.parent, name))
    if section.storage is not None:
        found.append(_bucket(section.storage.url, name, section.storage.endpoint))
    if section.hub is not None:
        found.append(_repository(section.hub.repo, section.hub))
    return tuple(found)


def public_names(recipe: Recipe) -> tuple[str, ...]:
    """What it is called where others than the one who runs this read it; a folder is one's own."""
    section = recipe.publish
    repo = () if section.hub is None else (section.hub.repo,)
    return repo if section.storage is None else (*repo, recipe.name)


def serving_name(recipe: Recipe) -> str:
    """What a reader gives vLLM to serve what was published: a repository, else a bucket's URL, else a folder's name.

    It is printed in what goes out, and a release is the same one in whatever folder it lies.
    """
    section = recipe.publish
    if section.hub is not None:
        return section.hub.repo
    if section.storage is not None:
        return f"{section.storage.url.rstrip('/')}/{recipe.name}"
    return recipe.name


def elsewhere(
    section: Publish,
    *,
    to: str | None = None,
    hub: str | None = None,
    folder: str | None = None,
    storage: str | None = None,
) -> Publish:
    """The section with these places; the same where nothing is given. Raises `UserError` for what is none.

    They replace all of the section's; what it says of a place of the same kind goes for the one that takes its part.
    """
    old = section.model_dump()
    changes: dict[str, Any] = {} if to is None else {"to": to}
    if (hub, folder, storage) != (None, None, None):
        changes |= {
            "hub": None if hub is None else {**(old["hub"] or {}), "repo": hub},
            "folder": folder,
            "storage": None if storage is None else {**(old["storage"] or {}), "url": storage},
        }
    try:
        return Publish.model_validate({**old, **changes})
    except ValidationError as error:
        fault = error.errors()[0]
        option = str(fault["loc"][0])
        expected = {"hub": "org/name", "storage": "a URL such as s3://bucket/prefix", "folder": "the path of a folder"}
        raise UserError(f"--{option}: found {fault['input']!r}, expected {expected[option]}") from None


def _bucket(url: str, name: str, endpoint: str | None = None) -> Place:
    from quantmint.pipeline.publish.bucket import BucketPlace

    return BucketPlace(url, name, endpoint)


def _repository(repo: str, section: Hub | None = None) -> Place:
    from quantmint.pipeline.publish.hub.place import HubPlace

    return HubPlace(repo, section)
