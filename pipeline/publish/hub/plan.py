"""What a publication has to do, given what the Hub holds now: asked for, nothing changed.

The same plan is carried out by `publish` and printed by a dry run. It knows what an earlier attempt has done: a commit
without its tag, a pull request that was never merged, a tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import StageError, UserError
from pipeline.publish.hub.client import Client
from pipeline.publish.hub.commit import landed, title_of
from pipeline.publish.hub.pull_request import PullRequest, find
from pipeline.publish.hub.repository import CANDIDATE, MAIN, Repository, look
from pipeline.publish.hub.settings import changes, is_listed
from pipeline.publish.hub.tree import Remote, differences, has_identity, is_same, some, tree
from pipeline.publish.release import MANIFEST, Release
from pipeline.publish.target import Operation
from pipeline.recipe.sections import Hub


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is of a release in a repository, and what its commit would go on top of.

    ``branch`` is where the commit goes, ``parent`` the branch's head (of `main` where the branch is not there yet) and
    ``there`` its files. ``tagged`` is the commit of the release's tag, ``landed`` a commit of the branch that holds the
    release, ``opened`` a pull request that does. ``done``: nothing is to be sent or tagged.
    """

    repository: Repository
    branch: str
    parent: str
    there: Mapping[str, Remote]
    tagged: str | None = None
    landed: str | None = None
    opened: PullRequest | None = None
    done: bool = False

    @property
    def base(self) -> str:
        """The branch that ``parent`` is the head of."""
        return self.branch if self.branch in self.repository.branches else MAIN

    @property
    def going_on(self) -> PullRequest | None:
        """The pull request that an earlier attempt left, if it still starts from `main`."""
        return self.opened if self.opened is not None and self.opened.parent == self.parent else None


def by_request(section: Hub | None) -> bool:
    """Whether the recipe goes by way of a pull request."""
    return section is not None and section.via == "pull-request"


def plan(client: Client, release: Release, section: Hub | None, *, candidate: bool) -> Plan | None:
    """Ask the Hub; None where there is no repository yet.

    Raises `UserError` where the release's tag is taken, and the errors of the client.
    """
    repository = look(client)
    if repository is None:
        return None
    branch = CANDIDATE if candidate and not by_request(section) else MAIN
    tagged = repository.tags.get(release.tag)
    if tagged is not None:
        require_release(client, tagged, release)
    parent = repository.branches.get(branch, repository.head)
    there = tree(client, parent)
    if tagged is not None and (candidate or MANIFEST in there):
        return Plan(repository, branch, parent, there, tagged, tagged, done=True)
    found = landed(client, release, branch) if branch in repository.branches else None
    opened = find(client, release) if by_request(section) and found is None else None
    return Plan(repository, branch, parent, there, tagged, found, opened)


def require_release(client: Client, tagged: str, release: Release) -> None:
    """Raise where a tag does not hold the release that it names."""
    found = tree(client, tagged)
    if not has_identity(found, release):
        raise UserError(
            f"{client.repo}: the tag {release.tag} is there, and the {MANIFEST} that it holds is another one",
            hint="Tags never move. Look at the tag on the Hub; one that nobody needs is deleted there.",
        )
    if wrong := differences(found, release, signed=False):
        raise StageError(f"{client.repo}: the release {release.tag} is damaged on the Hub: {some(wrong)}")


def operations(
    client: Client, todo: Plan | None, release: Release, section: Hub | None, *, candidate: bool
) -> tuple[Operation, ...]:
    """The plan in words, in the order in which it is carried out."""
    before, after = changes(todo.repository if todo else None, section)
    steps = []
    if todo is None:
        private = section is None or section.private
        steps.append(Operation("create", f"{'private' if private else 'public'} repository {client.repo}"))
    steps += [Operation("set", change) for change in before]
    if todo is None or todo.landed is None:
        steps += _commit(todo, release, section, candidate=candidate)
    if todo is None or todo.tagged is None:
        steps.append(Operation("tag", release.tag))
    steps += [Operation("set", change) for change in after]
    if section is not None and section.collection is not None and (todo is None or not is_listed(client, section)):
        steps.append(Operation("add", f"{client.repo} to the collection {section.collection}"))
    return tuple(steps)


def _commit(todo: Plan | None, release: Release, section: Hub | None, *, candidate: bool) -> list[Operation]:
    asks = by_request(section)
    steps = []
    if todo is not None and todo.opened is not None and todo.going_on is None:
        steps.append(Operation("close", f"pull request {todo.opened.number}, which {MAIN} has left behind"))
    if todo is None or todo.going_on is None:
        there = todo.there if todo else {}
        steps += [
            Operation("upload", name, file.size)
            for name, file in sorted(release.files.items())
            if not is_same(there.get(name), file)
        ]
        if candidate and not asks and (todo is None or todo.base != todo.branch):
            steps.append(Operation("create", f"branch {CANDIDATE} from {MAIN}"))
        steps += [Operation("delete", name) for name in sorted(there.keys() - release.files.keys())]
        branch = CANDIDATE if candidate and not asks else MAIN
        where = f"a pull request against {branch}" if asks else branch
        steps.append(Operation("commit", f'"{title_of(release)}" on {where}'))
    if asks and not candidate:
        number = f"pull request {todo.going_on.number}" if todo and todo.going_on else "the pull request"
        steps.append(Operation("merge", f"{number} into {MAIN}"))
    return steps
