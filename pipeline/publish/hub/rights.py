"""Whether a token may write to a repository, judged by what ``whoami-v2`` answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pipeline.recipe.faults import did_you_mean

_WRITERS: Final = frozenset({"admin", "write", "contributor"})
"""Roles of an organisation's members that may create repositories (https://huggingface.co/docs/hub/organizations-security);
a contributor writes to what it created."""
_TOKENS: Final = "https://huggingface.co/settings/tokens"


def refusal(who: Mapping[str, Any], repo: str, *, exists: bool, collection: bool) -> str | None:
    """Why this token cannot publish there, in a sentence; None where nothing speaks against it."""
    namespace = repo.split("/")[0]
    return _of_member(who, namespace) or _of_token(who, namespace, repo, exists=exists, collection=collection)


def _of_member(who: Mapping[str, Any], namespace: str) -> str | None:
    name = str(who.get("name"))
    if name == namespace:
        return None
    roles = {str(found["name"]): str(found.get("roleInOrg", "")) for found in who.get("orgs", ())}
    if namespace not in roles:
        return f"{name} is no member of {namespace}{did_you_mean(namespace, [name, *roles])}"
    if roles[namespace] and roles[namespace] not in _WRITERS:
        return f"{name} may not write in {namespace}: found the role {roles[namespace]}, expected contributor or above"
    return None


def _of_token(who: Mapping[str, Any], namespace: str, repo: str, *, exists: bool, collection: bool) -> str | None:
    token = (who.get("auth") or {}).get("accessToken") or {}
    label = f"the token {token['displayName']!r}" if token.get("displayName") else "the token"
    if token.get("role") == "read":
        return f"{label} may only read; a token that may write is made at {_TOKENS}"
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
