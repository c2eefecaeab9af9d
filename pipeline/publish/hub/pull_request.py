"""A release by way of a pull request: one commit on it, verified there, then merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import StageError
from pipeline.publish.hub.client import Client, RefusedError
from pipeline.publish.hub.commit import commit, landed, moved, require_same, title_of
from pipeline.publish.hub.repository import MAIN, head
from pipeline.publish.hub.tree import is_release, tree
from pipeline.publish.release import Release


@dataclass(frozen=True, slots=True)
class PullRequest:
    """An open one that holds the release: its number, its commit, and the commit of `main` that it starts from."""

    number: int
    revision: str
    parent: str | None


def find(client: Client, release: Release) -> PullRequest | None:
    """The open pull request that an earlier attempt left: its title names the release, its files are the release's."""
    opened = client.call(
        "list its pull requests",
        lambda: [
            int(found.num)
            for found in client.api.get_repo_discussions(
                client.repo, discussion_type="pull_request", discussion_status="open"
            )
            if found.title == title_of(release)
        ],
    )
    for number in opened:
        ref = f"refs/pr/{number}"
        if is_release(tree(client, ref), release):
            revision, *below = _history(client, ref)
            return PullRequest(number, revision, below[0] if below else None)
    return None


def request(client: Client, release: Release, operations: Sequence[Any], parent: str) -> PullRequest:
    """Open a pull request with one commit on top of ``parent``; its files are verified."""

    def found() -> str | None:
        earlier = find(client, release)
        return earlier.revision if earlier is not None else None

    revision = commit(client, release, operations, MAIN, parent, by_request=True, found=found)
    opened = find(client, release)
    if opened is None:
        require_same(client, revision, release, "the pull request's commit")
        raise StageError(
            f"{client.repo}: the pull request of {revision[:12]} is not open any more",
            hint="Somebody closed or merged it meanwhile; look, then run the same command again.",
        )
    return opened


def close(client: Client, opened: PullRequest) -> None:
    """Close a pull request that `main` has left behind."""

    def attempt() -> None:
        if client.api.get_discussion_details(client.repo, opened.number).status in {"open", "draft"}:
            comment = f"`{MAIN}` has moved since this was opened; another one takes its place."
            client.api.change_discussion_status(client.repo, opened.number, "closed", comment=comment)

    client.call(f"close pull request {opened.number}", attempt)


def merge(client: Client, release: Release, opened: PullRequest) -> str:
    """Merge it; returns the commit of `main` that holds the release.

    The Hub merges on top of whatever `main` is, so that is asked before, and the files of `main` are compared after.
    """
    if head(client, MAIN) != opened.parent:
        raise moved(client.repo, MAIN, opened.parent or "the start of its history")

    def attempt() -> None:
        status = client.api.get_discussion_details(client.repo, opened.number).status
        if status == "draft":
            client.api.change_discussion_status(client.repo, opened.number, "open")
        if status != "merged":
            client.api.merge_pull_request(client.repo, opened.number)

    try:
        client.call(f"merge pull request {opened.number}", attempt)
    except RefusedError as error:
        if error.status == 409:
            raise moved(client.repo, MAIN, opened.parent or "") from None
        raise
    merged = landed(client, release, MAIN)
    if merged is None:
        require_same(client, MAIN, release, "after the merge,")
        raise moved(client.repo, MAIN, opened.parent or "")
    return merged


def _history(client: Client, ref: str) -> list[str]:
    return client.call(
        f"read the history of {ref}",
        lambda: [str(one.commit_id) for one in client.api.list_repo_commits(client.repo, revision=ref)],
    )
