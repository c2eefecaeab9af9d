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
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Final

from pipeline.errors import StageError, UserError
from pipeline.publish.choosing import named, waiting
from pipeline.publish.release import MANIFEST
from pipeline.publish.target import Listed, Operation
from pipeline.stage import Progress

if TYPE_CHECKING:
    from huggingface_hub import HfApi
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


def releases(api: HfApi, repo: str) -> tuple[Listed, ...]:
    """The releases of a repository, the newest first."""
    return _look(api, repo).releases


def promote(api: HfApi, repo: str, tag: str | None, *, dry_run: bool, progress: Progress) -> tuple[Operation, ...]:
    """Give `main` the files of a candidate, by merging its pull request or by one commit; see `Target.promote`."""
    known = _look(api, repo)
    chosen = waiting(known.releases, tag, repo)
    number = next((number for number, head in known.refs.pull_requests.items() if head == chosen.revision), None)
    on_branch = known.refs.candidate == chosen.revision
    done: list[Operation] = []
    if not chosen.current:
        if number is not None and _starts_from(api, repo, chosen.revision, known.refs.main):
            done.append(Operation("merge", f"pull request {number} into {MAIN}"))
            if not dry_run:
                api.merge_pull_request(repo, number, comment=f"Promoted: {chosen.tag}.")
                _require_equal(api, repo, MAIN, known.trees[chosen.tag], chosen.tag)
            number = None
        else:
            done += _give(api, repo, known, chosen, f"Promote {chosen.tag}", dry_run=dry_run, progress=progress)
    if number is not None:
        done.append(Operation("close", f"pull request {number}, whose files {MAIN} has"))
        if not dry_run:
            comment = f"Promoted by a commit on {MAIN}, which had moved since: {chosen.tag}."
            api.change_discussion_status(repo, number, "closed", comment=comment)
    if on_branch:
        done.append(Operation("delete", f"branch {CANDIDATE}, whose files {MAIN} has"))
        if not dry_run:
            api.delete_branch(repo, branch=CANDIDATE)
    return tuple(done)


def rollback(api: HfApi, repo: str, tag: str, *, dry_run: bool, progress: Progress) -> tuple[Operation, ...]:
    """Give `main` the files of an earlier release by one commit; see `Target.rollback`."""
    known = _look(api, repo)
    chosen = named(known.releases, tag, repo)
    if chosen.candidate and not chosen.current:
        raise UserError(
            f"{tag} of {repo} is a candidate that was never a release",
            hint=f"`quantmint promote {repo} {tag}` makes it one.",
        )
    return tuple(_give(api, repo, known, chosen, f"Roll back to {tag}", dry_run=dry_run, progress=progress))


def remove(api: HfApi, repo: str, tags: Collection[str], *, dry_run: bool, progress: Progress) -> tuple[Operation, ...]:
    """Delete tags, never of the current release or a candidate; see `Target.remove`.

    The files stay on the Hub as long as its history refers to them, which only its owner can rewrite.
    """
    known = _look(api, repo)
    chosen = [named(known.releases, tag, repo) for tag in tags]
    for release in chosen:
        if release.current or release.candidate:
            what = "the current release" if release.current else "a candidate"
            raise UserError(f"{release.tag} is {what} of {repo}, expected an earlier release to remove")
    done: list[Operation] = []
    for release in chosen:
        done.append(Operation("delete", f"tag {release.tag}; the Hub keeps the files that its history refers to"))
        if not dry_run:
            api.delete_tag(repo, tag=release.tag)
            progress.say(f"{release.tag} is no release of {repo} any more")
    return tuple(done)


def _look(api: HfApi, repo: str) -> _Known:
    refs = _refs(api, repo)
    trees = {tag: _tree(api, repo, commit) for tag, commit in refs.tags.items()}
    commits = _commits(api, repo, refs)
    manifest = _tree(api, repo, refs.main).get(MANIFEST)
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


def _refs(api: HfApi, repo: str) -> _Refs:
    found = api.list_repo_refs(repo, include_pull_requests=True)
    heads = {branch.name: branch.target_commit for branch in found.branches}
    tags = {tag.name: tag.target_commit for tag in found.tags if TAG.fullmatch(tag.name)}
    requested = {
        int(ref.ref.rpartition("/")[2]): ref.target_commit
        for ref in found.pull_requests or ()
        if ref.target_commit in tags.values()
    }
    if requested:  # a merged or closed one keeps its ref
        opened = api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
        numbers = {discussion.num for discussion in opened}
        requested = {number: commit for number, commit in requested.items() if number in numbers}
    return _Refs(heads[MAIN], tags, heads.get(CANDIDATE), requested)


def _commits(api: HfApi, repo: str, refs: _Refs) -> dict[str, GitCommitInfo]:
    """The commits of the tags: most are in the history of `main`, those of old candidates are asked for one by one."""
    found: dict[str, GitCommitInfo] = {}
    for revision in (refs.main, *refs.waiting, *refs.tags.values()):
        if revision not in found:
            found |= {commit.commit_id: commit for commit in api.list_repo_commits(repo, revision=revision)}
    return found


def _tree(api: HfApi, repo: str, revision: str) -> Tree:
    from huggingface_hub.hf_api import RepoFile

    listed = api.list_repo_tree(repo, revision=revision, recursive=True)
    return {item.path: item for item in listed if isinstance(item, RepoFile) and item.path != _GIT_ATTRIBUTES}


def _oid(file: RepoFile) -> str:
    """What names a file's bytes: the SHA-256 of a large one, git's own hash of a small one."""
    return file.blob_id if file.lfs is None else f"sha256:{file.lfs.sha256}"


def _title(message: str, tag: str) -> str:
    """A commit's first line without the tag, which has a column of its own."""
    return message.removeprefix(tag).lstrip(": ")


def _starts_from(api: HfApi, repo: str, commit: str, parent: str) -> bool:
    """Whether a commit is the next one after ``parent``, so that merging it gives exactly its files."""
    history = [found.commit_id for found in api.list_repo_commits(repo, revision=commit)]
    return history[1:2] == [parent]


def _give(
    api: HfApi, repo: str, known: _Known, release: Listed, message: str, *, dry_run: bool, progress: Progress
) -> list[Operation]:
    """One commit that makes the tree of `main` that of a release; nothing where it is that already."""
    from huggingface_hub import CommitOperationCopy, CommitOperationDelete

    there, wanted = _tree(api, repo, known.refs.main), known.trees[release.tag]
    copies = [name for name, file in wanted.items() if name not in there or _oid(there[name]) != _oid(file)]
    gone = sorted(there.keys() - wanted.keys())
    if not copies and not gone:
        return []
    _warn_of_edits(known, there, progress)
    done = [Operation("copy", f"{name} from {release.tag}", wanted[name].size) for name in copies]
    done += [Operation("delete", f"{name}, which {release.tag} does not have") for name in gone]
    done.append(Operation("commit", f'"{message}" on {MAIN}, after {known.refs.main[:8]}'))
    if not dry_run:
        made = api.create_commit(
            repo,
            operations=[
                *(CommitOperationCopy(name, name, src_revision=release.revision) for name in copies),
                *(CommitOperationDelete(name) for name in gone),
            ],
            commit_message=message,
            revision=MAIN,
            parent_commit=known.refs.main,
        )
        _require_equal(api, repo, made.oid, wanted, release.tag)
    return done


def _warn_of_edits(known: _Known, there: Tree, progress: Progress) -> None:
    """Say which files of `main` are not those of the release that it shows: somebody edited them there."""
    current = next((release.tag for release in known.releases if release.current), None)
    if current is None:
        return
    names = _differing(there, known.trees[current])
    if names:
        progress.warn(f"{MAIN} was edited after {current}: {_few(names)}; what was written there stays in its history")


def _require_equal(api: HfApi, repo: str, revision: str, wanted: Tree, tag: str) -> None:
    names = _differing(_tree(api, repo, revision), wanted)
    if names:
        raise StageError(
            f"{repo}: {MAIN} has not become {tag}: {_few(names)} differs",
            hint="Somebody may have written there meanwhile; look, then run the same command again.",
        )


def _differing(one: Tree, other: Tree) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [name for name in names if name not in one or name not in other or _oid(one[name]) != _oid(other[name])]


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
