"""A repository of the Hugging Face Hub as a place to publish to.

`main` is what readers get, and a release is a tag that never moves. Bytes go up first, where nobody sees them; then
everything becomes visible in one commit on top of the one that was looked at: on `main`, or for a candidate on the
branch `candidate`, or on a pull request, which is verified and merged. Its files are compared, and last comes the tag.
Going from one release to another is one commit that gives `main` the tag's files: large ones are named again by their
SHA-256 and sent by nobody.

Nothing is lost by any of it: what `main` was stays in its history, and the tags keep what they name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.errors import StageError, UserError
from quantmint.pipeline.base.progress import Progress
from quantmint.pipeline.publish.destination import (
    Destination,
    DestinationState,
    Difference,
    ListedRelease,
    Operation,
    find_release,
)
from quantmint.pipeline.publish.hub import access
from quantmint.pipeline.publish.hub import repository as hub
from quantmint.pipeline.publish.hub.client import HubClient, MissingError, RefusedError, connect
from quantmint.pipeline.publish.hub.repository import CANDIDATE, MAIN, Repository, Tree
from quantmint.pipeline.publish.release import MANIFEST, Release
from quantmint.pipeline.recipe.destinations import Hub
from quantmint.pipeline.store.files import Wanted


class HubDestination(Destination):
    """``section`` is what the recipe says of it; None where a person named it, and then no setting is touched."""

    @classmethod
    def of(cls, destination: Hub, name: str, home: Path, *, typed: bool = False) -> HubDestination:
        """See `Destination.of`."""
        return cls(destination.repo, None if typed else destination)

    def __init__(self, repo: str, section: Hub | None = None) -> None:
        self.repo = repo
        self.section = section
        self._progress: Progress | None = None
        self._by_request = section is not None and section.via == "pull-request"

    @property
    def address(self) -> str:
        """organisation/name."""
        return self.repo

    def preflight(self, release: Release | None) -> None:
        """Token, rights and visibility; see `pipeline.publish.hub.access`."""
        repository = access.preflight(self._client(), self.section)
        if release is not None and repository is not None:
            self._require_own(release, repository)

    def state(self) -> DestinationState:
        """Refs and files of every tag; nothing where there is no repository yet."""
        client = self._client()
        repository = hub.look(client)
        return (
            DestinationState()
            if repository is None
            else DestinationState(hub.releases(client, repository), mark=repository)
        )

    @contextmanager
    def exclusive(self, progress: Progress) -> Iterator[None]:
        """Nobody is kept out; the client tells this progress what it waits for."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = None

    def releases(self) -> tuple[ListedRelease, ...]:
        """The tagged releases, the newest first; raises `MissingError` where there is no repository."""
        client = self._client()
        return hub.releases(client, self._require_repository(client))

    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """With what the commit would go on top of, unless the release is tagged, or a pull request holds it."""
        repository: Repository | None = state.mark
        if repository is None:
            return Difference(sorted(release.files))
        opened = self._opened(release, repository)
        if self._require_own(release, repository) or (opened and self._starts_from(opened, repository.head)):
            return Difference()
        there = hub.tree(self._client(), self._base(repository, candidate)[1])
        other = hub.differing(there, release.files) if hub.differences(there, release) else []
        missing = [name for name in other if name in release.files]
        return Difference(missing, [name for name in other if name not in release.files])

    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Make the repository where there is none, send, commit, and compare; returns the commit."""
        client = self._client()
        repository = state.mark or self._create(client)
        access.restrict(client, repository, self.section)
        branch, parent = self._base(repository, candidate)
        opened = self._opened(release, repository)
        if not diff:
            made = opened or parent
        else:
            if opened is not None:
                self._close(client, repository, opened, f"`{MAIN}` has moved since: another one takes its place.")
            if candidate and not self._by_request and branch != CANDIDATE:
                client.call(
                    f"create the branch {CANDIDATE}",
                    lambda: client.api.create_branch(self.repo, branch=CANDIDATE, revision=parent, exist_ok=True),
                )
            target = CANDIDATE if candidate and not self._by_request else MAIN
            made = self._commit(client, release, target, parent)
        hub.require_release(client, made, release, "the commit")
        return made

    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Nothing where `main` holds it; else its pull request is merged, or `main` is given its files by a commit.

        A candidate waits on the branch or the pull request that it was committed to.
        """
        if candidate:
            return
        client = self._client()
        repository = self._require_repository(client)
        wanted = hub.tree(client, release.revision)
        if hub.differing(hub.tree(client, repository.head), wanted):
            self._give(client, repository, release, state, wanted, why)

    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Close their open pull requests, and delete the branch ``candidate`` where it is at one of them."""
        client = self._client()
        repository = self._require_repository(client)
        for release in releases:
            if repository.request_of(release.revision) is not None:
                comment = f"Promoted by a commit on {MAIN}, which had moved since."
                self._close(client, repository, release.revision, comment)
        if repository.branches.get(CANDIDATE) in {release.revision for release in releases}:
            with suppress(MissingError):
                client.call(
                    f"delete the branch {CANDIDATE}", lambda: client.api.delete_branch(self.repo, branch=CANDIDATE)
                )

    def setup_operations(self, state: DestinationState) -> Sequence[Operation]:
        """Make it, gate it, open it."""
        before, after = access.changes(state.mark, self.section)
        kind = "private" if self.section is None or self.section.private else "public"
        created = () if state.mark is not None else (Operation("create", f"{kind} repository {self.repo}"),)
        return (*created, *(Operation("set", change) for change in (*before, *after)))

    def _give(
        self,
        client: HubClient,
        repository: Repository,
        release: ListedRelease,
        state: DestinationState,
        wanted: Tree,
        why: str,
    ) -> None:
        parent = state.mark.head if state.mark is not None else repository.head
        number = repository.request_of(release.revision)
        if number is not None and self._starts_from(release.revision, repository.head):
            self._merge(client, number, release.revision, wanted)
        elif number is not None and release.tag not in repository.tags:
            raise hub.moved(self.repo, MAIN)
        else:
            self._copy(client, release, parent, wanted, f"{why} {release.tag}")
        names = hub.differing(hub.tree(client, MAIN), wanted)
        if names:
            raise StageError(
                f"{self.repo}: {MAIN} has not become {release.tag}: {hub.some(names)} differs",
                hint="Somebody may have written there meanwhile; look, then run the same command again.",
            )

    def finish(self, release: ListedRelease) -> None:
        """Tag it, where it is not tagged; open the repository and have its collection list it, as the recipe says."""
        client = self._client()
        repository = self._require_repository(client)
        if release.tag not in repository.tags:
            self.unhide(release)
        access.restrict(client, repository, self.section)
        access.settle(client, repository, self.section)

    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """A file at the release's commit, by way of the Hub's cache."""
        client = self._client()
        with suppress(MissingError):
            found = partial(client.api.hf_hub_download, self.repo, name, revision=release.revision)
            return Path(client.call(f"read {name} of {release.revision[:12]}", found)).read_bytes()
        return None

    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """By the Hub's list."""
        return {name: remote.size for name, remote in hub.tree(self._client(), release.revision).items()}

    def is_in_use(self, release: ListedRelease) -> bool:
        """By the manifest on `main`, the branch ``candidate`` and the open pull requests."""
        client = self._client()
        repository = self._require_repository(client)
        heads = {head for head, _ in repository.requests.values()} | {repository.branches.get(CANDIDATE)}
        shown, tagged = (hub.tree(client, commit).get(MANIFEST) for commit in (repository.head, release.revision))
        return release.revision in heads or (shown is not None and tagged is not None and shown == tagged)

    def unhide(self, release: ListedRelease) -> None:
        """Tag its commit."""
        client = self._client()
        client.call(
            f"tag {release.tag}",
            lambda: client.api.create_tag(self.repo, tag=release.tag, revision=release.revision, exist_ok=True),
        )

    def drop(self, release: ListedRelease) -> None:
        """Do nothing: files stay as long as the history refers to them, which only its owner can rewrite."""

    def hide(self, release: ListedRelease) -> None:
        """Delete the tag."""
        client = self._client()
        with suppress(MissingError):  # the answer to an earlier try got lost
            client.call(f"delete the tag {release.tag}", lambda: client.api.delete_tag(self.repo, tag=release.tag))

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Wanted = None) -> Path:
        """The files in ``into`` (with `.cache/huggingface/`, the client's books) or in the Hub's cache; none twice."""
        with self.exclusive(progress):
            return hub.download(self._client(), self.revision_of(tag), into, wanted)

    def revision_of(self, tag: str | None) -> str:
        """The commit of a release (None: the current one); raises `UserError` where there is none."""
        client = self._client()
        repository = self._require_repository(client)
        return (
            repository.head if tag is None else find_release(hub.releases(client, repository), tag, self.repo).revision
        )

    def _client(self) -> HubClient:
        return connect(self.repo, self._progress)

    def _base(self, repository: Repository, candidate: bool) -> tuple[str, str]:
        branch = CANDIDATE if candidate and not self._by_request and CANDIDATE in repository.branches else MAIN
        return branch, repository.branches[branch]

    def _create(self, client: HubClient) -> Repository:
        """Make the repository; another publisher may do so at the same time."""
        private = self.section is None or self.section.private
        client.call("create the repository", lambda: client.api.create_repo(self.repo, private=private, exist_ok=True))
        return self._require_repository(client)

    def _require_repository(self, client: HubClient) -> Repository:
        """The repository; raises `MissingError`: the Hub says the same of one that a token may not see."""
        if (repository := hub.look(client)) is None:
            raise MissingError(
                f"{self.repo}: there is no such repository, or this token may not see it",
                hint="Check the name; a private one needs HF_TOKEN or `hf auth login`.",
            )
        return repository

    def _require_own(self, release: Release, repository: Repository) -> bool:
        """Whether the release is tagged; raises where its tag does not hold it."""
        tagged = repository.tags.get(release.tag)
        if tagged is None:
            return False
        found = hub.tree(self._client(), tagged)
        wrong = hub.differences(found, release)
        if MANIFEST in wrong:
            raise UserError(
                f"{self.repo}: the tag {release.tag} is there, and the {MANIFEST} that it holds is another one",
                hint="Tags never move. Look at the tag on the Hub; one that nobody needs is deleted there.",
            )
        if wrong:
            raise StageError(f"{self.repo}: the release {release.tag} is damaged on the Hub: {hub.some(wrong)} differs")
        return True

    def _opened(self, release: Release, repository: Repository) -> str | None:
        """The head of the open pull request that an earlier attempt left, where it holds the release."""
        titled = (head for head, title in repository.requests.values() if title == hub.title_of(release))
        return self._holding(titled, release) if self._by_request else None

    def _holding(self, commits: Iterable[str], release: Release) -> str | None:
        """The first of these commits that has the release's files."""
        client = self._client()
        return next((one for one in commits if not hub.differences(hub.tree(client, one), release)), None)

    def _starts_from(self, commit: str, parent: str) -> bool:
        """Whether a commit is the next one after ``parent``, so that merging it gives exactly its files."""
        return [str(one.commit_id) for one in hub.history(self._client(), commit)[1:2]] == [parent]

    def _commit(self, client: HubClient, release: Release, branch: str, parent: str) -> str:
        """The operations that make the parent's files those of the release, in one commit."""
        from huggingface_hub import CommitOperationDelete

        def found() -> str | None:
            now = self._require_repository(client)
            heads = [now.branches[branch]] if branch in now.branches else []
            return self._opened(release, now) if self._by_request else self._holding(heads, release)

        gone = sorted(hub.tree(client, parent).keys() - release.files.keys())
        planned_operations = [
            *hub.upload(client, release, branch, by_request=self._by_request),
            *(CommitOperationDelete(name, is_folder=False) for name in gone),
        ]
        return hub.commit(
            client, planned_operations, hub.title_of(release), branch, parent, found=found, by_request=self._by_request
        )

    def _copy(self, client: HubClient, release: ListedRelease, parent: str, wanted: Tree, message: str) -> None:
        """One commit; large files are named by their SHA-256 and not sent, small ones the client sends again."""
        from huggingface_hub import CommitOperationCopy, CommitOperationDelete

        names = hub.differing(hub.tree(client, parent), wanted)
        planned_operations: list[Any] = [
            CommitOperationCopy(name, name, src_revision=release.revision)
            if name in wanted
            else CommitOperationDelete(name, is_folder=False)
            for name in names
        ]

        def found() -> str | None:
            return None if hub.differing(hub.tree(client, MAIN), wanted) else MAIN

        hub.commit(client, planned_operations, message, MAIN, parent, found=found)

    def _merge(self, client: HubClient, number: int, commit: str, wanted: Tree) -> None:
        def attempt() -> None:
            status = client.api.get_discussion_details(self.repo, number).status
            if status == "draft":
                client.api.change_discussion_status(self.repo, number, "open")
            if status != "merged":
                client.api.merge_pull_request(self.repo, number)

        try:
            client.call(f"merge pull request {number}", attempt)
        except RefusedError:
            if hub.differing(hub.tree(client, MAIN), wanted):  # else it was merged, and the answer got lost
                if not self._starts_from(commit, self._require_repository(client).head):
                    raise hub.moved(self.repo, MAIN) from None
                raise

    def _close(self, client: HubClient, repository: Repository, head: str, comment: str) -> None:
        number = repository.request_of(head)
        client.call(
            f"close pull request {number}",
            lambda: client.api.change_discussion_status(self.repo, number, "closed", comment=comment),
        )
