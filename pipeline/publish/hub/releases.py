"""The releases of a repository: which there are, and which one readers get.

`main` is what readers get, and a release is a tag that never moves. So going from one release to another is one commit
on `main` that gives it the tag's files: those of large files are named again by their SHA-256 and sent by nobody. A
candidate waits on the branch `candidate` or on an open pull request; a pull request that still starts from `main` is
merged. Afterwards the tree of `main` is compared with the tag's, file by file.

Nothing is lost by any of it: what `main` was stays in its history, and the tags keep what they name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from pipeline.errors import StageError, UserError
from pipeline.publish.choosing import earlier, named, removable, waiting
from pipeline.publish.hub.choice import BROUGHT_BACK, BY_HAND, Choice, choice
from pipeline.publish.hub.client import Client, MissingError, MovedError, RefusedError
from pipeline.publish.hub.download import read
from pipeline.publish.hub.history import History, Tree, commits_of, differing, look
from pipeline.publish.hub.repository import CANDIDATE, MAIN
from pipeline.publish.hub.tree import tree
from pipeline.publish.manifest import identity
from pipeline.publish.release import CARD, MANIFEST, identity_in
from pipeline.publish.target import Listed, Operation

_SHOWN: Final = 3


def releases(client: Client) -> tuple[Listed, ...]:
    """The releases of a repository, the newest first."""
    return look(client).releases


def promote(client: Client, tag: str | None, *, dry_run: bool) -> tuple[Operation, ...]:
    """Give `main` the files of a candidate, by merging its pull request or by one commit; see `Target.promote`."""
    known = look(client)
    chosen = waiting(known.releases, tag, client.repo)
    number = next((number for number, head in known.refs.pull_requests.items() if head == chosen.revision), None)
    done: list[Operation] = []
    if not chosen.current:
        if number is not None and _starts_from(client, chosen.revision, known.refs.main):
            _require_its_own(client, chosen, known.trees[chosen.tag])
            done.append(Operation("merge", f"pull request {number} into {MAIN}"))
            if not dry_run:
                _merge(client, number, chosen.tag, known.trees[chosen.tag])
            number = None
        else:
            done += _give(client, known, chosen, f"{BY_HAND[0]} {chosen.tag}", dry_run=dry_run)
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


def rollback(client: Client, tag: str, *, dry_run: bool) -> tuple[Operation, ...]:
    """Give `main` the files of an earlier release by one commit; see `Target.rollback`."""
    known = look(client)
    chosen = named(known.releases, tag, client.repo)
    if chosen.candidate and not chosen.current:
        raise UserError(
            f"{tag} of {client.repo} is a candidate that was never a release",
            hint=f"`quantmint promote {client.repo} {tag}` makes it one.",
        )
    return tuple(_give(client, known, chosen, f"{BY_HAND[1]} {tag}", dry_run=dry_run))


def who_chose(client: Client, known: History | None = None) -> Choice:
    """Who made the current release that; see `Target.chosen_by_run` and `Target.left`."""
    known = known or look(client)
    shown = next((release.tag for release in known.releases if release.current), None)
    commits = [(one.commit_id, one.title) for one in commits_of(client, known.refs.main)]
    waits = [release.tag for release in known.releases if release.candidate]
    found = choice(commits, shown, known.refs.tags, waits)
    if found.by_run and shown is not None and is_edited(known.trees[shown], tree(client, known.refs.main)):
        return replace(found, by_run=False)
    return found


def is_edited(released: Tree, there: Tree) -> bool:
    """Whether files of a release were changed on `main`, and not its card alone: readers get what somebody chose."""
    return not {CARD}.issuperset(released.keys() & set(differing(released, there)))


def bring_back(client: Client, tag: str, *, dry_run: bool) -> tuple[Operation, ...]:
    """Give `main` the files of an earlier release by one commit, if a run chose what it has."""
    try:
        known = look(client)
    except MissingError:
        return ()
    release = earlier(known.releases, tag)
    if release is None:
        return ()
    found = who_chose(client, known)
    if tag in found.left or not found.by_run:
        return ()
    return tuple(_give(client, known, release, f"{BROUGHT_BACK} {tag}", dry_run=dry_run))


def remove(client: Client, tags: Collection[str], *, dry_run: bool) -> tuple[Operation, ...]:
    """Delete tags, never of the current release or a candidate; see `Target.remove`.

    The files stay on the Hub as long as its history refers to them, which only its owner can rewrite.
    """
    chosen = removable(look(client).releases, tags, client.repo)
    for tag in [] if dry_run else [release.tag for release in chosen]:
        with suppress(MissingError):
            client.call(f"delete the tag {tag}", lambda tag=tag: client.api.delete_tag(client.repo, tag=tag))  # type: ignore[misc]
    kept = "the Hub keeps the files that its history refers to"
    return tuple(Operation("delete", f"tag {release.tag}; {kept}") for release in chosen)


def _starts_from(client: Client, commit: str, parent: str) -> bool:
    """Whether a commit is the next one after ``parent``, so that merging it gives exactly its files."""
    return [found.commit_id for found in commits_of(client, commit)][1:2] == [parent]


def _merge(client: Client, number: int, tag: str, wanted: Tree) -> None:
    api, repo = client.api, client.repo
    try:
        client.call(
            f"merge pull request {number}", lambda: api.merge_pull_request(repo, number, comment=f"Promoted: {tag}.")
        )
    except RefusedError:
        if differing(tree(client, MAIN), wanted):  # else it was merged, and the answer got lost
            raise
    _require_equal(client, MAIN, wanted, tag)


def _close(client: Client, number: int, tag: str) -> None:
    api, repo = client.api, client.repo
    comment = f"Promoted by a commit on {MAIN}, which had moved since: {tag}."
    client.call(
        f"close pull request {number}",
        lambda: api.change_discussion_status(repo, number, "closed", comment=comment),
    )


def _give(client: Client, known: History, release: Listed, message: str, *, dry_run: bool) -> list[Operation]:
    """One commit that makes the tree of `main` that of a release; nothing where it is that already."""
    there, wanted = tree(client, known.refs.main), known.trees[release.tag]
    names = differing(there, wanted)
    if not names:
        return []
    _require_its_own(client, release, wanted)
    _warn_of_edits(client, known, there)
    copies = [name for name in names if name in wanted]
    gone = [name for name in names if name not in wanted]
    if not dry_run:
        _commit(client, known.refs.main, release, copies, gone, message, wanted)
    return [
        *(Operation("copy", f"{name} from {release.tag}", wanted[name].size) for name in copies),
        *(Operation("delete", f"{name}, which {release.tag} does not have") for name in gone),
        Operation("commit", f'"{message}" on {MAIN}, after {known.refs.main[:8]}'),
    ]


def _require_its_own(client: Client, release: Listed, wanted: Tree) -> None:
    """Raise `StageError` where a tag was set anew, on a commit that is not the release whose identity it carries."""
    raw = read(client, release.revision, MANIFEST, 0, wanted[MANIFEST].size) if MANIFEST in wanted else b""
    if not identity(raw).startswith(identity_in(release.tag)):
        raise StageError(
            f"{client.repo}: the {MANIFEST} under {release.tag} is not that of {release.tag}: the tag was moved",
            hint="What readers get stays as it is. Publish the release again, or choose another one.",
        )


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
        if differing(tree(client, MAIN), wanted):  # else the commit was made, and its answer got lost
            raise
    _require_equal(client, MAIN, wanted, release.tag)


def _warn_of_edits(client: Client, known: History, there: Tree) -> None:
    """Say which files of `main` are not those of the release that it shows: somebody edited them there."""
    current = next((release.tag for release in known.releases if release.current), None)
    if current is None:
        return
    names = differing(there, known.trees[current])
    if names and client.progress is not None:
        client.progress.warn(
            f"{MAIN} was edited after {current}: {_few(names)}; what was written there stays in its history"
        )


def _require_equal(client: Client, revision: str, wanted: Tree, tag: str) -> None:
    names = differing(tree(client, revision), wanted)
    if names:
        raise StageError(
            f"{client.repo}: {MAIN} has not become {tag}: {_few(names)} differs",
            hint="Somebody may have written there meanwhile; look, then run the same command again.",
        )


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
