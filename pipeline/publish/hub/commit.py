"""One commit that is the release, and its tag."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from pipeline.errors import StageError
from pipeline.publish.hub.client import Client, MovedError
from pipeline.publish.hub.tree import differences, is_release, some, tree
from pipeline.publish.release import Release

_TITLE: Final = 200
"""Characters that the Hub takes as the title of a discussion, and so of a pull request (`HfApi.create_discussion`)."""


def title_of(release: Release) -> str:
    """The first line of the commit; the listing of releases reads the title from it."""
    return f"{release.tag}: {release.title}"[:_TITLE]


def landed(client: Client, release: Release, branch: str) -> str | None:
    """The commit of a branch that holds exactly this release: its head, or one below that has its title."""
    history = client.call(
        f"read the history of {branch}", lambda: client.api.list_repo_commits(client.repo, revision=branch)
    )
    for number, commit in enumerate(history):
        ours = number == 0 or commit.title.startswith(release.tag)
        if ours and is_release(tree(client, commit.commit_id), release):
            return str(commit.commit_id)
    return None


def commit(
    client: Client,
    release: Release,
    operations: Sequence[Any],
    branch: str,
    parent: str,
    *,
    found: Callable[[], str | None],
    by_request: bool = False,
) -> str:
    """Make the commit on top of ``parent`` (``by_request``: on a new pull request against the branch); returns its id.

    ``found`` looks for the commit where it may be there already: its answer got lost, or another publisher made it of
    the same release at the same time. Raises `MovedError` where the branch moved meanwhile: nothing was overwritten.
    """
    tries = 0

    def attempt() -> str:
        nonlocal tries
        tries += 1
        if tries > 1 and (earlier := found()) is not None:
            return earlier
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on the card's metadata, which preflight has made
            made = client.api.create_commit(
                client.repo,
                list(operations),
                commit_message=title_of(release),
                revision=branch,
                parent_commit=parent,
                create_pr=by_request,
            )
        return str(made.oid)

    try:
        return client.call(f"commit to {branch}", attempt)
    except MovedError:
        earlier = found()
        if earlier is None:
            raise moved(client.repo, branch, parent) from None
        return earlier


def moved(repo: str, branch: str, parent: str) -> MovedError:
    """What is said where somebody else wrote to the branch."""
    return MovedError(
        f"{repo}: {branch} has moved since {parent[:12]}: somebody else wrote to it while this release was sent",
        hint="Nothing was overwritten, and what was sent is kept. Look at what is there, then run the same command "
        "again: it commits on top.",
    )


def tag(client: Client, release: Release, revision: str) -> str:
    """Tag a commit that holds the release; returns the tag's commit, which another publisher may have set."""
    client.call(
        f"tag {release.tag}",
        lambda: client.api.create_tag(client.repo, tag=release.tag, revision=revision, exist_ok=True),
    )
    require_same(client, release.tag, release, "the tag")
    refs = client.call("read its tags", lambda: client.api.list_repo_refs(client.repo))
    return str(next(ref.target_commit for ref in refs.tags if ref.name == release.tag))


def require_same(client: Client, revision: str, release: Release, what: str) -> None:
    """Raise `StageError` where the Hub does not hold exactly the files that were sent, by SHA-256 or git's hash."""
    wrong = differences(tree(client, revision), release, signed=False)
    if wrong:
        raise StageError(
            f"{client.repo}: {what} {revision[:20]} does not hold what was sent: {some(wrong)}",
            hint="Look at the files there, then run the same command again.",
        )
