"""The releases of a repository: which there are, and which one readers get.

`main` is what readers get, and a release is a tag that never moves. So going from one release to another is one commit
on `main` that gives it the tag's files: those of large files are named again by their SHA-256 and sent by nobody. A
candidate waits on the branch `candidate` or on an open pull request; a pull request that still starts from `main` is
merged. Afterwards the tree of `main` is compared with the tag's, file by file.

Nothing is lost by any of it: what `main` was stays in its history, and the tags keep what they name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Final

from pipeline.errors import StageError, UserError
from pipeline.publish.choosing import named, waiting
from pipeline.publish.hub.client import Client, MissingError, MovedError, RefusedError
from pipeline.publish.release import MANIFEST
from pipeline.publish.target import Listed, Operation
from pipeline.stage import Progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import GitCommitInfo, RepoFile

MAIN: Final = "main"
CANDIDATE: Final = "candidate"
TAG: Final = re.compile(r"v\d{8}-[0-9a-f]{8}")
_GIT_ATTRIBUTES: Final = ".gitattributes"
"""How git stores the repository's files: the server's own business, and no part of a release."""
_SHOWN: Final = 3

Tree = Mapping[str, "RepoFile"]


@dataclass(frozen=True, slots=True)
class _Refs:
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
class _Known:
    """A repository as it was found."""

    refs: _Refs
    trees: Mapping[str, Tree]
    releases: tuple[Listed, ...]


def releases(client: Client) -> tuple[Listed, ...]:
    """The releases of a repository, the newest first."""
    return _look(client).releases


def promote(client: Client, tag: str | None, *, dry_run: bool, progress: Progress) -> tuple[Operation, ...]:
    """Give `main` the files of a candidate, by merging its pull request or by one commit; see `Target.promote`."""
    known = _look(client)
    chosen = waiting(known.releases, tag, client.repo)
    number = next((number for number, head in known.refs.pull_requests.items() if head == chosen.revision), None)
    done: list[Operation] = []
    if not chosen.current:
        if number is not None and _starts_from(client, chosen.revision, known.refs.main):
            done.append(Operation("merge", f"pull request {number} into {MAIN}"))
            if not dry_run:
                _merge(client, number, chosen.tag, known.trees[chosen.tag])
            number = None
        else:
            done += _give(client, known, chosen, f"Promote {chosen.tag}", dry_run=dry_run, progress=progress)
    if number is not None:
        done.append(Operation("close", f"pull request {number}, whose files {MAIN} has"))
        if not dry_run:
            _close(client, number, chosen.tag)
    if known.refs.candidate == chosen.revision:
        done.append(Operation("delete", f"branch {CANDIDATE}, whose files {MAIN} has"))
        if not dry_run:
            with suppress(MissingError):
                client.call(
                    f"delete the branch {CANDIDATE}", lambda: client.api.delete_branch(client.repo, branch=CANDIDATE)
                )
    return tuple(done)


def rollback(client: Client, tag: str, *, dry_run: bool, progress: Progress) -> tuple[Operation, ...]:
    """Give `main` the files of an earlier release by one commit; see `Target.rollback`."""
    known = _look(client)
    chosen = named(known.releases, tag, client.repo)
    if chosen.candidate and not chosen.current:
        raise UserError(
            f"{tag} of {client.repo} is a candidate that was never a release",
            hint=f"`quantmint promote {client.repo} {tag}` makes it one.",
        )
    return tuple(_give(client, known, chosen, f"Roll back to {tag}", dry_run=dry_run, progress=progress))


def remove(client: Client, tags: Collection[str], *, dry_run: bool, progress: Progress) -> tuple[Operation, ...]:
    """Delete tags, never of the current release or a candidate; see `Target.remove`.

    The files stay on the Hub as long as its history refers to them, which only its owner can rewrite.
    """
    known = _look(client)
    chosen = [named(known.releases, tag, client.repo) for tag in tags]
    for release in chosen:
        if release.current or release.candidate:
            what = "the current release" if release.current else "a candidate"
            raise UserError(f"{release.tag} is {what} of {client.repo}, expected an earlier release to remove")
    for tag in [] if dry_run else [release.tag for release in chosen]:
        with suppress(MissingError):
            client.call(f"delete the tag {tag}", lambda tag=tag: client.api.delete_tag(client.repo, tag=tag))  # type: ignore[misc]
        progress.say(f"{tag} is no release of {client.repo} any more")
    kept = "the Hub keeps the files that its history refers to"
    return tuple(Operation("delete", f"tag {release.tag}; {kept}") for release in chosen)


def _look(client: Client) -> _Known:
    refs = _refs(client)
    trees = {tag: _tree(client, commit) for tag, commit in refs.tags.items()}
    commits = _commits(client, refs)
    manifest = _tree(client, refs.main).get(MANIFEST) if refs.tags else None
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
    return _Known(refs, trees, tuple(sorted(found, key=lambda release: (release.created, release.tag), reverse=True)))


def _refs(client: Client) -> _Refs:
    api, repo = client.api, client.repo
    found = client.call("read its branches and tags", lambda: api.list_repo_refs(repo, include_pull_requests=True))
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
    return _Refs(heads[MAIN], tags, heads.get(CANDIDATE), requested)


def _commits(client: Client, refs: _Refs) -> dict[str, GitCommitInfo]:
    """The commits of the tags: most are in the history of `main`, those of old candidates are asked for one by one."""
    found: dict[str, GitCommitInfo] = {}
    for revision in (refs.main, *refs.waiting, *refs.tags.values()):
        if refs.tags and revision not in found:
            found |= {commit.commit_id: commit for commit in _history(client, revision)}
    return found


def _history(client: Client, revision: str) -> list[GitCommitInfo]:
    api, repo = client.api, client.repo
    found: list[GitCommitInfo] = client.call(
        f"read the history of {revision}", lambda: api.list_repo_commits(repo, revision=revision)
    )
    return found


def _tree(client: Client, revision: str) -> Tree:
    from huggingface_hub.hf_api import RepoFile

    api, repo = client.api, client.repo
    listed = client.call(
        f"list the files of {revision}", lambda: list(api.list_repo_tree(repo, revision=revision, recursive=True))
    )
    return {item.path: item for item in listed if isinstance(item, RepoFile) and item.path != _GIT_ATTRIBUTES}


def _oid(file: RepoFile) -> str:
    """What names a file's bytes: the SHA-256 of a large one, git's own hash of a small one."""
    return file.blob_id if file.lfs is None else f"sha256:{file.lfs.sha256}"


def _title(message: str, tag: str) -> str:
    """A commit's first line without the tag, which has a column of its own."""
    return message.removeprefix(tag).lstrip(": ")


def _starts_from(client: Client, commit: str, parent: str) -> bool:
    """Whether a commit is the next one after ``parent``, so that merging it gives exactly its files."""
    return [found.commit_id for found in _history(client, commit)][1:2] == [parent]


def _merge(client: Client, number: int, tag: str, wanted: Tree) -> None:
    api, repo = client.api, client.repo
    try:
        client.call(
            f"merge pull request {number}", lambda: api.merge_pull_request(repo, number, comment=f"Promoted: {tag}.")
        )
    except RefusedError:
        if _differing(_tree(client, MAIN), wanted):  # else it was merged, and the answer got lost
            raise
    _require_equal(client, MAIN, wanted, tag)


def _close(client: Client, number: int, tag: str) -> None:
    api, repo = client.api, client.repo
    comment = f"Promoted by a commit on {MAIN}, which had moved since: {tag}."
    client.call(
        f"close pull request {number}",
        lambda: api.change_discussion_status(repo, number, "closed", comment=comment),
    )


def _give(
    client: Client, known: _Known, release: Listed, message: str, *, dry_run: bool, progress: Progress
) -> list[Operation]:
    """One commit that makes the tree of `main` that of a release; nothing where it is that already."""
    there, wanted = _tree(client, known.refs.main), known.trees[release.tag]
    names = _differing(there, wanted)
    if not names:
        return []
    _warn_of_edits(known, there, progress)
    copies = [name for name in names if name in wanted]
    gone = [name for name in names if name not in wanted]
    if not dry_run:
        _commit(client, known.refs.main, release, copies, gone, message, wanted)
    return [
        *(Operation("copy", f"{name} from {release.tag}", wanted[name].size) for name in copies),
        *(Operation("delete", f"{name}, which {release.tag} does not have") for name in gone),
        Operation("commit", f'"{message}" on {MAIN}, after {known.refs.main[:8]}'),
    ]


def _commit(
    client: Client,
    parent: str,
    release: Listed,
    copies: Sequence[str],
    gone: Sequence[str],
    message: str,
    wanted: Tree,
) -> None:
    """Large files are named by their SHA-256 and not sent; the client sends small ones again."""
    from huggingface_hub import CommitOperationCopy, CommitOperationDelete

    api, repo = client.api, client.repo
    operations = [
        *(CommitOperationCopy(name, name, src_revision=release.revision) for name in copies),
        *(CommitOperationDelete(name) for name in gone),
    ]
    try:
        client.call(
            f"give {MAIN} the files of {release.tag}",
            lambda: api.create_commit(
                repo, operations=operations, commit_message=message, revision=MAIN, parent_commit=parent
            ),
        )
    except MovedError:
        if _differing(_tree(client, MAIN), wanted):  # else the commit was made, and its answer got lost
            raise
    _require_equal(client, MAIN, wanted, release.tag)


def _warn_of_edits(known: _Known, there: Tree, progress: Progress) -> None:
    """Say which files of `main` are not those of the release that it shows: somebody edited them there."""
    current = next((release.tag for release in known.releases if release.current), None)
    if current is None:
        return
    names = _differing(there, known.trees[current])
    if names:
        progress.warn(f"{MAIN} was edited after {current}: {_few(names)}; what was written there stays in its history")


def _require_equal(client: Client, revision: str, wanted: Tree, tag: str) -> None:
    names = _differing(_tree(client, revision), wanted)
    if names:
        raise StageError(
            f"{client.repo}: {MAIN} has not become {tag}: {_few(names)} differs",
            hint="Somebody may have written there meanwhile; look, then run the same command again.",
        )


def _differing(one: Tree, other: Tree) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or _oid(one[name]) != _oid(other[name])]


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
