"""What is asked of the Hub to know whether a recipe is due: commits, a config.json, the newest release's manifest.

Unlike `pipeline.publish.hub.client`, which has hours of work to save, nothing is tried twice here: who asks whether
something is due goes on with what is known. What goes wrong is told as there, without secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from pipeline.errors import StageError
from pipeline.publish import manifest
from pipeline.publish.hub.choice import Choice, choice
from pipeline.publish.hub.client import Client, MissingError, connect
from pipeline.publish.hub.releases import is_edited
from pipeline.publish.hub.repository import CANDIDATE, MAIN
from pipeline.publish.hub.tree import tree
from pipeline.publish.manifest import Manifest, ManifestError
from pipeline.publish.release import MANIFEST, TAG, day_in, identity_in
from pipeline.publish.wholeness import DamagedError
from pipeline.refresh.release import Released, Silent, is_ahead

TIMEOUT_S: Final = 5.0
"""Of one request."""


def model_commit(repo: str, revision: str) -> str:
    """The commit of a model's revision. Raises `QuantmintError`."""
    client = connect(repo, Silent(), tries=1)
    found: Any = client.call(
        f"resolve {revision} to a commit",
        lambda: client.api.model_info(repo, revision=revision, timeout=TIMEOUT_S),
    )
    return str(found.sha)


def dataset_commit(repo: str, revision: str) -> str:
    """The commit of a dataset's revision. Raises `QuantmintError`."""
    client = connect(repo, Silent(), tries=1)
    found: Any = client.call(
        f"resolve the dataset's {revision} to a commit",
        lambda: client.api.dataset_info(repo, revision=revision, timeout=TIMEOUT_S),
    )
    return str(found.sha)


def model_config(repo: str, commit: str) -> Path:
    """The model's config.json at a commit, from the Hub's cache where it is there. Raises `QuantmintError`."""
    return _file(connect(repo, Silent(), tries=1), commit, "config.json")


def newest_on_hub(repo: str, *, by_request: bool = False) -> Released | None:
    """The release of a repository; None where it is not there, or has none; see `pipeline.refresh.release`.

    The day is in the tag, so of many releases only those of the last day are read: their manifests never change, and
    the Hub's cache keeps them. A tag that only looks like a release's hides none. ``by_request``: the recipe goes by
    way of pull requests, and who merged one is not known. Raises `QuantmintError`, of it `DamagedError` where every tag
    holds another manifest than its own.
    """
    client = connect(repo, Silent(), tries=1)
    try:
        heads, tags, requested = _refs(client)
    except MissingError:
        if not _has_token():  # then it may be there all the same: the Hub shows a private one to nobody else
            raise
        return None
    main, candidates = heads.get(MAIN), frozenset(tag for tag in tags if tags[tag] == heads.get(CANDIDATE))
    shown = None if main is None else _shown(client, main, tags)
    readers = None if shown is None else _manifest(client, shown, tags[shown])
    chosen = Choice(by_run=False, left=frozenset()) if main is None else _choice(client, main, shown, tags, candidates)
    by_run = readers is not None and not by_request and chosen.by_run
    asked = chosen.foreign & requested  # a pull request that was never merged; whether it is open does not matter
    left = {tag: _left(client, tag, tags) for tag in chosen.left - asked}
    newer = shown is not None and any(day_in(tag) >= day_in(shown) for tag in candidates)
    candidates |= asked
    if shown is not None and readers is not None and by_run and not newer:
        return Released(repo, shown, readers, shown, by_run, candidates=candidates, left=left)
    for _, day in groupby(_latest_first(tags), key=day_in):
        found = [(made, tag) for tag in day if (made := _manifest(client, tag, tags[tag])) is not None]
        if found:
            newest, tag = max(found, key=lambda pair: (pair[0].created, pair[1]))
            return Released(repo, tag, newest, shown, by_run, None if shown == tag else readers, candidates, left)
    _refuse_damaged(client, tags)
    return None


def _latest_first(tags: Iterable[str]) -> list[str]:
    """Tags by their days; those of days that are to come are last, for they were made by a clock that was wrong."""
    now = datetime.now(UTC)
    return sorted(tags, key=lambda tag: (not _is_to_come(tag, now), tag), reverse=True)


def _is_to_come(tag: str, now: datetime) -> bool:
    try:
        return is_ahead(day_in(tag), now)
    except ValueError:  # no day at all
        return True


def _manifest(client: Client, tag: str, commit: str) -> Manifest | None:
    """What the release of a tag was made from; None for a tag that somebody else made."""
    raw = _raw(client, commit)
    if raw is None or not manifest.identity(raw).startswith(identity_in(tag)):
        return None
    return manifest.decode(raw, what=f"{client.repo}@{tag}/{MANIFEST}")


def _left(client: Client, tag: str, tags: Mapping[str, str]) -> Manifest | None:
    try:
        return _manifest(client, tag, tags[tag]) if tag in tags else None
    except ManifestError:
        return None


def _raw(client: Client, commit: str) -> bytes | None:
    try:
        return _file(client, commit, MANIFEST).read_bytes()
    except MissingError:
        return None


def _refuse_damaged(client: Client, tags: Mapping[str, str]) -> None:
    """Of tags none of which is a release: raise for one that was."""
    for tag in _latest_first(tags):
        if _raw(client, tags[tag]) is not None:
            raise DamagedError(f"{client.repo} is damaged: the {MANIFEST} under {tag} is not that of {tag}")


def _refs(client: Client) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
    """Commits of branches and of release tags, by their names, and the tags that are heads of pull requests.

    The client's own method knows no timeout.
    """
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def ask() -> Any:
        url = f"{client.api.endpoint}/api/models/{client.repo}/refs"
        headers = build_hf_headers(library_name="quantmint")
        response = get_session().get(url, params={"include_prs": 1}, headers=headers, timeout=TIMEOUT_S)
        hf_raise_for_status(response)
        return response.json()

    said = client.call("read its branches and tags", ask)
    heads = {str(ref["name"]): str(ref["targetCommit"]) for ref in said["branches"]}
    tags = {str(ref["name"]): str(ref["targetCommit"]) for ref in said["tags"] if TAG.fullmatch(str(ref["name"]))}
    requested = {str(ref["targetCommit"]) for ref in said.get("pullRequests") or ()}
    return heads, tags, frozenset(tag for tag, commit in tags.items() if commit in requested)


def _shown(client: Client, head: str, tags: Mapping[str, str]) -> str | None:
    """The tag whose manifest `main` has: a release that was promoted or rolled back to is there by another commit."""
    raw = _raw(client, head)
    mark = "" if raw is None else manifest.identity(raw)
    return next((tag for tag in tags if mark.startswith(identity_in(tag))), None)


def _choice(
    client: Client, head: str, shown: str | None, tags: Mapping[str, str], candidates: Collection[str]
) -> Choice:
    """Who gave `main` the release that it has, and what somebody went back from; of the only one nobody is asked."""
    if list(tags.values()) == [head]:
        return Choice(by_run=True, left=frozenset())
    found = choice(_commits(client, head), shown, tags, candidates)
    if not found.by_run or shown is None or tags[shown] == head:
        return found
    return replace(found, by_run=not is_edited(tree(client, tags[shown]), tree(client, head)))


def _commits(client: Client, head: str) -> list[tuple[str, str]]:
    """Identifiers and first lines of the commits that led to one, the newest first."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    found: list[tuple[str, str]] = []
    url: str | None = f"{client.api.endpoint}/api/models/{client.repo}/commits/{head}"

    def ask() -> Any:
        response = get_session().get(str(url), headers=build_hf_headers(library_name="quantmint"), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
        return response.json(), response.links.get("next", {}).get("url")

    while url is not None:
        page, url = client.call(f"read its history of {MAIN}", ask)
        found += [(str(commit["id"]), str(commit["title"])) for commit in page]
    return found


def _file(client: Client, commit: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    fetch: Callable[..., str] = hf_hub_download
    found = client.call(
        f"read {name} of {commit[:8]}",
        lambda: fetch(client.repo, name, revision=commit, endpoint=client.api.endpoint, etag_timeout=TIMEOUT_S),
    )
    path = Path(found)
    if path.stat().st_size > manifest.LARGEST:
        raise StageError(
            f"{client.repo}: {name} has {path.stat().st_size:,} bytes, expected at most {manifest.LARGEST:,}"
        )
    return path


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
