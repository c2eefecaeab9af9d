"""What a repository holds of releases, by its tags, branches, open pull requests and commits; nothing is changed.

A release is a tag that never moves. It is the current one where `main` has its manifest, whichever commit brought that
there: a release that was promoted or rolled back to is on `main` by another commit than the tagged one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING

from pipeline.publish.hub.client import Client, MissingError, unseen
from pipeline.publish.hub.repository import CANDIDATE, MAIN
from pipeline.publish.hub.tree import Remote, tree
from pipeline.publish.release import MANIFEST, TAG
from pipeline.publish.target import Listed

if TYPE_CHECKING:
    from huggingface_hub.hf_api import GitCommitInfo

Tree = Mapping[str, Remote]


@dataclass(frozen=True, slots=True)
class Refs:
    """Where everything points: commits by tag, the heads of `main` and of the candidate branch, open pull requests."""

    main: str
    tags: Mapping[str, str]
    candidate: str | None
    pull_requests: Mapping[int, str]

    @property
    def waiting(self) -> frozenset[str]:
        """Commits of what waits to be promoted."""
        heads = set(self.pull_requests.values())
        return frozenset(heads if self.candidate is None else heads | {self.candidate})


@dataclass(frozen=True, slots=True)
class History:
    """A repository as it was found; ``trees`` are the files of each tag, ``releases`` the newest first."""

    refs: Refs
    trees: Mapping[str, Tree]
    releases: tuple[Listed, ...]


def look(client: Client) -> History:
    """Everything about the releases of a repository; raises the errors of `Client.call`."""
    refs = _refs(client)
    trees = {tag: tree(client, commit) for tag, commit in refs.tags.items()}
    commits = _commits(client, refs)
    manifest = tree(client, refs.main).get(MANIFEST) if refs.tags else None
    found = [
        Listed(
            tag=tag,
            revision=commit,
            created=commits[commit].created_at.astimezone(UTC).isoformat(timespec="seconds"),
            title=_title(commits[commit].title, tag),
            current=manifest is not None and MANIFEST in trees[tag] and _oid(trees[tag][MANIFEST]) == _oid(manifest),
            candidate=commit in refs.waiting and commit != refs.main,
            size=sum(file.size for file in trees[tag].values()),
        )
        for tag, commit in refs.tags.items()
    ]
    return History(refs, trees, tuple(sorted(found, key=lambda release: (release.created, release.tag), reverse=True)))


def _refs(client: Client) -> Refs:
    api, repo = client.api, client.repo
    try:
        found = client.call("read its branches and tags", lambda: api.list_repo_refs(repo, include_pull_requests=True))
    except MissingError:
        raise unseen(repo) from None
    heads = {branch.name: branch.target_commit for branch in found.branches}
    tags = {tag.name: tag.target_commit for tag in found.tags if TAG.fullmatch(tag.name)}
    requested = {
        int(ref.ref.rpartition("/")[2]): ref.target_commit
        for ref in found.pull_requests or ()
        if ref.target_commit in tags.values()
    }
    if requested:  # a merged or closed one keeps its ref
        opened = client.call(
            "list its pull requests",
            lambda: [
                discussion.num
                for discussion in api.get_repo_discussions(
                    repo, discussion_type="pull_request", discussion_status="open"
                )
            ],
        )
        requested = {number: commit for number, commit in requested.items() if number in opened}
    return Refs(heads[MAIN], tags, heads.get(CANDIDATE), requested)


def _commits(client: Client, refs: Refs) -> dict[str, GitCommitInfo]:
    """The commits of the tags: most are in the history of `main`, those of old candidates are asked for one by one."""
    found: dict[str, GitCommitInfo] = {}
    for revision in (refs.main, *refs.waiting, *refs.tags.values()):
        if refs.tags and revision not in found:
            found |= {commit.commit_id: commit for commit in commits_of(client, revision)}
    return found


def commits_of(client: Client, revision: str) -> list[GitCommitInfo]:
    """The commits that led to a revision, the newest first."""
    api, repo = client.api, client.repo
    found: list[GitCommitInfo] = client.call(
        f"read the history of {revision}", lambda: api.list_repo_commits(repo, revision=revision)
    )
    return found


def _oid(file: Remote) -> str:
    """What names a file's bytes: the SHA-256 of a large one, git's own hash of a small one."""
    return file.blob if file.sha256 is None else f"sha256:{file.sha256}"


def _title(message: str, tag: str) -> str:
    """A commit's first line without the tag, which has a column of its own."""
    return message.removeprefix(f"{tag}: ")


def differing(one: Tree, other: Tree) -> list[str]:
    """Names of the files that two trees do not share, sorted."""
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or _oid(one[name]) != _oid(other[name])]
