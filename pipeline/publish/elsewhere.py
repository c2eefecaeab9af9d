"""A recipe's publish section, with other places than it names: what a command line says goes.

    elsewhere(recipe.publish, to="candidate", hub="my-org/name")

Places that are named replace all of the section's; what it says of a place of the same kind (private, gated, the
server's address) goes for the one that takes its part.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from pipeline.errors import UserError
from pipeline.recipe.sections import Hub, Publish, Storage


def elsewhere(
    section: Publish,
    *,
    to: str | None = None,
    hub: str | None = None,
    folder: str | None = None,
    storage: str | None = None,
) -> Publish:
    """The section with these places; the same section where nothing is given. Raises `UserError` for what is none."""
    changes: dict[str, Any] = {} if to is None else {"to": to}
    if (hub, folder, storage) != (None, None, None):
        changes |= {
            "hub": None if hub is None else _hub(section.hub, hub),
            "folder": folder,
            "storage": None if storage is None else _storage(section.storage, storage),
        }
    if not changes:
        return section
    try:
        return Publish.model_validate({**section.model_dump(), **changes})
    except ValidationError as error:
        raise UserError(_reason(error)) from None


def _hub(section: Hub | None, repo: str) -> dict[str, Any]:
    return {**({} if section is None else section.model_dump()), "repo": repo}


def _storage(section: Storage | None, url: str) -> dict[str, Any]:
    return {**({} if section is None else section.model_dump()), "url": url}


def _reason(error: ValidationError) -> str:
    """The first fault by the option that it stands in."""
    expected = {"hub": "org/name", "storage": "a URL such as s3://bucket/prefix", "folder": "the path of a folder"}
    fault = error.errors()[0]
    option = str(fault["loc"][0]) if fault["loc"] else "publish"
    return f"--{option}: found {fault['input']!r}, expected {expected.get(option, fault['msg'])}"
