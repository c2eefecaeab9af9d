"""What is asked of the Hub to know whether a recipe is due: commits, a config.json, the newest release's manifest.

Unlike `pipeline.publish.hub.client`, which has hours of work to save, nothing is tried twice here: who asks whether
something is due goes on with what is known. What goes wrong is told as there, without secrets.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from pipeline.errors import StageError
from pipeline.publish import manifest
from pipeline.publish.hub.client import Client, MissingError, connect
from pipeline.publish.manifest import Manifest
from pipeline.publish.release import MANIFEST, TAG, identity_in
from pipeline.refresh.release import Released, Silent

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


def newest_on_hub(repo: str) -> Released | None:
    """The newest release of a repository; None where it is not there, or has none.

    The day is in the tag, so of many releases only those of the last day are read: their manifests never change, and
    the Hub's cache keeps them. A tag that only looks like a release's hides none. Raises `QuantmintError`.
    """
    client = connect(repo, Silent(), tries=1)
    try:
        heads, tags = _refs(client)
    except MissingError:
        if not _has_token():  # then it may be there all the same: the Hub shows a private one to nobody else
            raise
        return None
    for _, day in groupby(sorted(tags, reverse=True), key=lambda tag: tag[:9]):
        found = [(made, tag) for tag in day if (made := _manifest(client, tag, tags[tag])) is not None]
        if found:
            newest, tag = max(found, key=lambda pair: (pair[0].created, pair[1]))
            return Released(repo, tag, newest, _shown(client, heads.get("main"), tags))
    return None


def _manifest(client: Client, tag: str, commit: str) -> Manifest | None:
    """What the release of a tag was made from; None for a tag that somebody else made."""
    try:
        raw = _file(client, commit, MANIFEST).read_bytes()
    except MissingError:
        return None
    if not manifest.identity(raw).startswith(identity_in(tag)):
        return None
    return manifest.decode(raw, what=f"{client.repo}@{tag}/{MANIFEST}")


def _refs(client: Client) -> tuple[dict[str, str], dict[str, str]]:
    """Commits of branches and of release tags, by their names. The client's own method knows no timeout."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def ask() -> Any:
        url = f"{client.api.endpoint}/api/models/{client.repo}/refs"
        response = get_session().get(url, headers=build_hf_headers(library_name="quantmint"), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
        return response.json()

    said = client.call("read its branches and tags", ask)
    heads = {str(ref["name"]): str(ref["targetCommit"]) for ref in said["branches"]}
    tags = {str(ref["name"]): str(ref["targetCommit"]) for ref in said["tags"] if TAG.fullmatch(str(ref["name"]))}
    return heads, tags


def _shown(client: Client, head: str | None, tags: dict[str, str]) -> str | None:
    """The tag whose manifest `main` has: a release that was promoted or rolled back to is there by another commit."""
    if head is None:
        return None
    tagged = next((tag for tag, commit in tags.items() if commit == head), None)
    if tagged is not None:
        return tagged
    try:
        mark = manifest.identity(_file(client, head, MANIFEST).read_bytes())
    except MissingError:
        return None
    return next((tag for tag in tags if mark.startswith(identity_in(tag))), None)


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
