"""The right to publish to a repository, checked before the first byte; and the repository's visibility and gating.

A change that restricts readers is made before the upload, a change that admits readers after its verification.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from quantmint.pipeline.base.errors import UserError, did_you_mean
from quantmint.pipeline.publish.hub.client import HubClient
from quantmint.pipeline.publish.hub.repository import Repository, look, tree
from quantmint.pipeline.publish.release import MANIFEST
from quantmint.pipeline.recipe.destinations import Hub

_WRITERS: Final = frozenset({"admin", "write", "contributor"})
"""Roles of an organisation's members that may create repositories (https://huggingface.co/docs/hub/organizations-security);
a contributor may write to repositories that it created."""
_TOKENS: Final = "https://huggingface.co/settings/tokens"
PUBLIC: Final = "public"
_SLUG: Final = re.compile(r"[^/\s]+/\S+-[0-9a-f]{24}")


def preflight(client: HubClient, section: Hub | None) -> Repository | None:
    """Check that a release can be published to the repository; return the repository, None if it would be created.

    Raises `UserError` for the first obstacle: rights of the account or token, visibility, a renamed repository, a
    foreign model in it, a missing collection. Raises the client's errors too.
    """
    account = client.call("ask whose token it is", client.api.whoami)
    repository = look(client)
    slug = None if section is None else section.collection
    namespace, exists = client.repo.split("/")[0], repository is not None
    reason = _of_member(account, namespace) or _of_token(
        account, namespace, client.repo, exists=exists, collection=slug is not None
    )
    if reason is not None:
        raise UserError(f"{client.repo}: {reason}")
    changes(repository, section)
    if repository is not None:
        if repository.name != client.repo:
            raise UserError(
                f"{client.repo} was renamed to {repository.name}", hint="Write the new name into the recipe."
            )
        files = tree(client, repository.head)
        if MANIFEST not in files and any(name.endswith((".safetensors", ".bin", ".gguf")) for name in files):
            raise UserError(
                f"{client.repo} holds a model that quantmint did not publish: it has weights, and no {MANIFEST}",
                hint="A release replaces all files. Name another repository, or remove the files that are there first.",
            )
    if slug is not None and _SLUG.fullmatch(slug):
        client.call(f"read the collection {slug}", lambda: client.api.get_collection(slug))
    return repository


def _of_member(account: Mapping[str, Any], namespace: str) -> str | None:
    name = str(account.get("name"))
    if name == namespace:
        return None
    roles = {str(membership["name"]): str(membership.get("roleInOrg", "")) for membership in account.get("orgs", ())}
    if namespace not in roles:
        return f"{name} is no member of {namespace}{did_you_mean(namespace, [name, *roles])}"
    if roles[namespace] and roles[namespace] not in _WRITERS:
        return f"{name} may not write in {namespace}: found the role {roles[namespace]}, expected contributor or above"
    return None


def _of_token(account: Mapping[str, Any], namespace: str, repo: str, *, exists: bool, collection: bool) -> str | None:
    token = (account.get("auth") or {}).get("accessToken") or {}
    label = f"the token {token['displayName']!r}" if token.get("displayName") else "the token"
    if token.get("role") == "read":
        return f"{label} may only read; create a token with write access at {_TOKENS}"
    if token.get("role") != "fineGrained":
        return None
    scoped = (token.get("fineGrained") or {}).get("scoped") or ()
    everywhere = set(_granted(scoped, {namespace}))
    here = everywhere | set(_granted(scoped, {repo}))
    if "repo.write" not in (here if exists else everywhere):
        what = f"write to {repo}" if exists else f"create repositories in {namespace}"
        return f"{label} is not allowed to {what}: it lacks repo.write; edit it at {_TOKENS}"
    if collection and "collection.write" not in everywhere:
        return f"{label} is not allowed to change collections of {namespace}: it lacks collection.write"
    return None


def _granted(scoped: Any, names: set[str]) -> Iterator[str]:
    for scope in scoped:
        if (scope.get("entity") or {}).get("name") in names:
            yield from scope.get("permissions") or ()


def changes(repository: Repository | None, section: Hub | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings to change before the upload, and those to change after it, as text.

    Both are empty without a recipe's ``section``. Raises `UserError` when the recipe says ``private: true`` and the
    repository is public.
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


def restrict(client: HubClient, repository: Repository, section: Hub | None) -> None:
    """Gate the repository if the recipe's ``section`` asks for it and it is not gated so."""
    before, _ = changes(repository, section)
    if section is not None and before:
        gated = section.gated
        client.call("make it gated", lambda: client.api.update_repo_settings(client.repo, gated=gated))


def settle(client: HubClient, repository: Repository, section: Hub | None) -> None:
    """Make the repository public if the recipe says so, and add it to the recipe's collection.

    A collection that is named by a title is created if it does not exist. Without a ``section`` nothing is done.
    """
    if section is None:
        return
    _, after = changes(repository, section)
    if after:
        client.call("make it public", lambda: client.api.update_repo_settings(client.repo, private=False))
    if section.collection is None:
        return
    slug, namespace = section.collection, section.repo.split("/")[0]
    if not _SLUG.fullmatch(slug):
        created = client.call(
            f"create the collection {slug!r}",
            lambda: client.api.create_collection(
                section.collection, namespace=namespace, private=section.private, exists_ok=True
            ),
        )
        slug = str(created.slug)
    client.call(
        f"add it to the collection {slug}",
        lambda: client.api.add_collection_item(slug, item_id=client.repo, item_type="model", exists_ok=True),
    )
