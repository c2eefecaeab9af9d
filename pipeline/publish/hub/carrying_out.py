"""Carry out a plan: send, commit, compare, tag. Each step finds out by itself whether it was done."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pipeline.publish.hub.client import Client, MissingError
from pipeline.publish.hub.commit import commit, landed, require_same, tag
from pipeline.publish.hub.download import read
from pipeline.publish.hub.plan import Plan, by_request, plan
from pipeline.publish.hub.pull_request import close, merge, request
from pipeline.publish.hub.repository import MAIN, head
from pipeline.publish.hub.settings import changes, restrict, settle
from pipeline.publish.hub.tree import has_identity, some, tree
from pipeline.publish.hub.upload import upload
from pipeline.publish.manifest import ManifestError, decode
from pipeline.publish.release import MANIFEST, SIGNATURE, Release
from pipeline.publish.target import Published
from pipeline.recipe.sections import Hub


def publish(client: Client, release: Release, section: Hub | None, *, candidate: bool) -> Published:
    """See `pipeline.publish.target.Target.publish`."""
    todo = plan(client, release, section, candidate=candidate) or _create(client, release, section, candidate=candidate)
    restrict(client, todo.repository, section)
    revision = todo.tagged
    if not todo.done:
        made = todo.landed or _send(client, release, section, todo, candidate=candidate)
        require_same(client, made, release, "the commit")
        revision = tag(client, release, made)
    settle(client, todo.repository, section)
    current = has_identity(tree(client, head(client, MAIN)), release)
    return Published(client.repo, release.tag, str(revision), current, again=todo.done)


def _create(client: Client, release: Release, section: Hub | None, *, candidate: bool) -> Plan:
    """Make the repository; another publisher may do so at the same time."""
    changes(None, section)
    private = section is None or section.private
    client.call("create the repository", lambda: client.api.create_repo(client.repo, private=private, exist_ok=True))
    todo = plan(client, release, section, candidate=candidate)
    if todo is None:
        raise MissingError(f"{client.repo}: was created, and cannot be seen by this token", status=404)
    return todo


def _send(client: Client, release: Release, section: Hub | None, todo: Plan, *, candidate: bool) -> str:
    """The commit that holds the release, made now."""
    if not by_request(section):
        return _commit(client, release, todo)
    opened = todo.going_on
    if opened is None:
        if todo.opened is not None:
            close(client, todo.opened)
        opened = request(client, release, _changes(client, release, todo, by_request=True), todo.parent)
    return opened.revision if candidate else merge(client, release, opened)


def _commit(client: Client, release: Release, todo: Plan) -> str:
    sent = _changes(client, release, todo, by_request=False)
    if todo.base != todo.branch:
        client.call(
            f"create the branch {todo.branch}",
            lambda: client.api.create_branch(client.repo, branch=todo.branch, revision=todo.parent, exist_ok=True),
        )
    return commit(client, release, sent, todo.branch, todo.parent, found=lambda: landed(client, release, todo.branch))


def _changes(client: Client, release: Release, todo: Plan, *, by_request: bool) -> list[Any]:
    """The operations that make the parent's files those of the release; large files are on the Hub afterwards."""
    from huggingface_hub import CommitOperationDelete

    gone = sorted(todo.there.keys() - release.files.keys())
    _warn_of_foreign(client, todo, gone)
    return [
        *upload(client, release, todo.base, by_request=by_request),
        *(CommitOperationDelete(name, is_folder=False) for name in gone),
    ]


def _warn_of_foreign(client: Client, todo: Plan, gone: Sequence[str]) -> None:
    """Say which of the files that go were put there by somebody, and not by the release that is replaced."""
    if not gone or client.progress is None:
        return
    known: set[str] = {MANIFEST, SIGNATURE}
    if MANIFEST in todo.there:
        raw = read(client, todo.parent, MANIFEST, 0, todo.there[MANIFEST].size)
        with suppress(ManifestError):
            known |= decode(raw).files.keys()
    foreign = [name for name in gone if name not in known]
    if foreign:
        client.progress.warn(
            f"{client.repo}: {some(foreign)} came to {todo.base} by another way than a release: it is not in the new "
            "one, and stays in the history"
        )
