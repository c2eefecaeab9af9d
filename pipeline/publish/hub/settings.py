"""Who sees a repository, and which collection lists it: as the recipe says.

What closes it comes before the first byte, what opens it after the last one was verified.
"""

from __future__ import annotations

import re
from typing import Final

from pipeline.errors import UserError
from pipeline.publish.hub.client import Client
from pipeline.publish.hub.repository import Repository
from pipeline.recipe.sections import Hub

PUBLIC: Final = "public"
_SLUG: Final = re.compile(r"[^/\s]+/\S+-[0-9a-f]{24}")


def changes(repository: Repository | None, section: Hub | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What would be changed before the release is sent, and after it; nothing where there is no recipe.

    Raises `UserError` where the recipe says private of a repository that everybody sees.
    """
    if section is None:
        return (), ()
    if repository is not None and section.private and not repository.private:
        raise UserError(
            f"{section.repo} is public, and the recipe says private: true of it",
            hint="Write `private: false` under publish.hub, name another repository, or make this one private on the "
            "Hub.",
        )
    gated = repository.gated if repository is not None else None
    before = (f"gated: {section.gated}",) if section.gated is not None and section.gated != gated else ()
    after = (PUBLIC,) if repository is not None and repository.private and not section.private else ()
    return before, after


def restrict(client: Client, repository: Repository, section: Hub | None) -> None:
    """Let nobody in whom the recipe keeps out."""
    before, _ = changes(repository, section)
    if section is not None and before:
        gated = section.gated
        client.call("make it gated", lambda: client.api.update_repo_settings(client.repo, gated=gated))
    if section is not None and section.gated is None and repository.gated is not None and client.progress is not None:
        client.progress.warn(f"{client.repo} is gated ({repository.gated}), of which the recipe says nothing: left so")


def settle(client: Client, repository: Repository, section: Hub | None) -> None:
    """Open it where the recipe does, and have its collection list it."""
    if section is None:
        return
    _, after = changes(repository, section)
    if after:
        client.call("make it public", lambda: client.api.update_repo_settings(client.repo, private=False))
    if section.collection is not None:
        _list_it(client, section)


def is_listed(client: Client, section: Hub) -> bool:
    """Whether the recipe's collection lists the repository. Raises `MissingError` for a slug that there is none of."""
    slug = _slug(client, str(section.collection), section.repo.split("/")[0])
    return slug is not None and _lists(client, slug)


def _list_it(client: Client, section: Hub) -> None:
    title, namespace = str(section.collection), section.repo.split("/")[0]
    slug = _slug(client, title, namespace)
    if slug is None:
        made = client.call(
            f"create the collection {title!r}",
            lambda: client.api.create_collection(title, namespace=namespace, private=section.private, exists_ok=True),
        )
        slug = str(made.slug)
    if not _lists(client, slug):
        client.call(
            f"add it to the collection {slug}",
            lambda: client.api.add_collection_item(slug, item_id=client.repo, item_type="model", exists_ok=True),
        )


def _lists(client: Client, slug: str) -> bool:
    found = client.call(f"read the collection {slug}", lambda: client.api.get_collection(slug))
    return any(item.item_id == client.repo and item.item_type == "model" for item in found.items)


def _slug(client: Client, wanted: str, namespace: str) -> str | None:
    """What a collection is called on the Hub; None where none of the namespace has that title."""
    if _SLUG.fullmatch(wanted):
        return wanted
    found = client.call(
        f"list the collections of {namespace}", lambda: list(client.api.list_collections(owner=namespace))
    )
    return next((str(collection.slug) for collection in found if collection.title == wanted), None)
