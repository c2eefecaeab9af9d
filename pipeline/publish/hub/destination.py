"""A repository of the Hugging Face Hub as a destination.

Readers get `main`, and a release is a tag that never moves. The upload comes first and is invisible. Then one commit on
top of the commit of the snapshot shows everything: on `main`, for a candidate on the branch `candidate`, or on a pull
request, which is verified and merged. The commit's files are compared with the release, and the tag comes last.
A switch to another release is one commit that gives `main` the tag's files; large files are copied on the server by
their SHA-256.

Nothing is lost: former states of `main` stay in its history, and the tags keep their files.
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
from quantmint.pipeline.store.files import Selection


class HubDestination(Destination):
    """A repository of the Hub.

    ``section`` is the recipe's section; None if a person typed the name, and then the settings are left alone.
    """

    @classmethod
    def of(cls, destination: Hub, name: str, home: Path, *, typed: bool = False) -> HubDestination:
        """Return the repository of a recipe's section, or of one ``typed`` on the command line, without any request."""
        return cls(destination.repo, None if typed else destination)

    def __init__(self, repo: str, section: Hub | None = None) -> None:
        self.repo = repo
        self.section = section
        self._progress: Progress | None = None
        self._by_request = section is not None and section.via == "pull-request"

    @property
    def address(self) -> str:
        """Return the repository's name, organisation/name."""
        return self.repo

    def preflight(self, release: Release | None) -> None:
        """Raise if the release (None: any) could not be published.

        Checks token, rights and visibility, see `pipeline.publish.hub.access`, and that the release's tag has no other
        files.
        """
        repository = access.preflight(self._client(), self.section)
        if release is not None and repository is not None:
            self._require_own(release, repository)

    def state(self) -> DestinationState:
        """Return the releases of all tags; an empty snapshot when there is no repository yet."""
        client = self._client()
        repository = hub.look(client)
        return (
            DestinationState()
            if repository is None
            else DestinationState(hub.releases(client, repository), mark=repository)
        )

    @contextmanager
    def exclusive(self, progress: Progress) -> Iterator[None]:
        """Let the client report its waits to ``progress``; the Hub has no locks."""
        self._progress = progress
        try:
            yield
        finally:
            self._progress = None

    def releases(self) -> tuple[ListedRelease, ...]:
        """Return the tagged releases, the newest first; raise `MissingError` when there is no repository."""
        client = self._client()
        return hub.releases(client, self._require_repository(client))

    def compare(
        self, release: Release, state: DestinationState, *, candidate: bool, progress: Progress | None
    ) -> Difference:
        """Return the differences of the future commit's parent from the release.

        There are none for a release that is tagged, or that an open pull request on top of `main` has. ``progress`` is
        not used.
        """
        repository: Repository | None = state.mark
        if repository is None:
            return Difference(sorted(release.files))
        opened = self._opened(release, repository)
        if self._require_own(release, repository) or (opened and self._starts_from(opened, repository.head)):
            return Difference()
        there = hub.tree(self._client(), self._base(repository, candidate)[1])
        names = hub.differing(there, release.files) if hub.differences(there, release) else []
        missing = [name for name in names if name in release.files]
        return Difference(missing, [name for name in names if name not in release.files])

    def upload(
        self, release: Release, diff: Difference, state: DestinationState, *, candidate: bool, progress: Progress
    ) -> str:
        """Create the repository if needed, upload, commit, compare the commit with the release, and return its id."""
        client = self._client()
        repository = state.mark or self._create(client)
        access.restrict(client, repository, self.section)
        branch, parent = self._base(repository, candidate)
        opened = self._opened(release, repository)
        if not diff:
            commit = opened or parent
        else:
            if opened is not None:
                self._close(client, repository, opened, f"`{MAIN}` has moved since: another one takes its place.")
            if candidate and not self._by_request and branch != CANDIDATE:
                client.call(
                    f"create the branch {CANDIDATE}",
                    lambda: client.api.create_branch(self.repo, branch=CANDIDATE, revision=parent, exist_ok=True),
                )
            target = CANDIDATE if candidate and not self._by_request else MAIN
            commit = self._commit(client, release, target, parent)
        hub.require_release(client, commit, release, "the commit")
        return commit

    def set_pointer(self, release: ListedRelease, state: DestinationState, why: str, *, candidate: bool) -> None:
        """Merge the release's pull request, or commit its files to `main`, unless `main` has them already.

        A candidate stays on the branch or the pull request that it was committed to.
        """
        if candidate:
            return
        client = self._client()
        repository = self._require_repository(client)
        files = hub.tree(client, release.revision)
        if hub.differing(hub.tree(client, repository.head), files):
            self._switch_main(client, repository, release, state, files, why)

    def withdraw(self, releases: Sequence[ListedRelease]) -> None:
        """Close the releases' open pull requests, and delete the branch ``candidate`` if it is at one of them."""
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
        """Return the creation, gating and change of visibility of the repository that the recipe asks for."""
        before, after = access.changes(state.mark, self.section)
        kind = "private" if self.section is None or self.section.private else "public"
        created = () if state.mark is not None else (Operation("create", f"{kind} repository {self.repo}"),)
        return (*created, *(Operation("set", change) for change in (*before, *after)))

    def _switch_main(
        self,
        client: HubClient,
        repository: Repository,
        release: ListedRelease,
        state: DestinationState,
        files: Tree,
        why: str,
    ) -> None:
        parent = state.mark.head if state.mark is not None else repository.head
        number = repository.request_of(release.revision)
        if number is not None and self._starts_from(release.revision, repository.head):
            self._merge(client, number, release.revision, files)
        elif number is not None and release.tag not in repository.tags:
            raise hub.moved(self.repo, MAIN)
        else:
            self._copy(client, release, parent, files, f"{why} {release.tag}")
        names = hub.differing(hub.tree(client, MAIN), files)
        if names:
            raise StageError(
                f"{self.repo}: {MAIN} has not become {release.tag}: {hub.some(names)} differs",
                hint="Somebody may have written there meanwhile; look, then run the same command again.",
            )

    def finish(self, release: ListedRelease) -> None:
        """Tag the commit, and apply the recipe's gating, visibility and collection."""
        client = self._client()
        repository = self._require_repository(client)
        if release.tag not in repository.tags:
            self.unhide(release)
        access.restrict(client, repository, self.section)
        access.settle(client, repository, self.section)

    def read(self, release: ListedRelease, name: str) -> bytes | None:
        """Return the bytes of a file at the release's commit, through the Hub's cache; None if it is absent."""
        client = self._client()
        with suppress(MissingError):
            download = partial(client.api.hf_hub_download, self.repo, name, revision=release.revision)
            return Path(client.call(f"read {name} of {release.revision[:12]}", download)).read_bytes()
        return None

    def sizes(self, release: ListedRelease) -> dict[str, int]:
        """Return the size in bytes of every file at the release's commit, by name."""
        return {name: remote.size for name, remote in hub.tree(self._client(), release.revision).items()}

    def is_in_use(self, release: ListedRelease) -> bool:
        """Return whether readers get the release or it is a candidate.

        That is: `main` has its manifest, or its commit is the head of the branch ``candidate`` or of an open pull
        request.
        """
        client = self._client()
        repository = self._require_repository(client)
        heads = {head for head, _ in repository.requests.values()} | {repository.branches.get(CANDIDATE)}
        current, tagged = (hub.tree(client, commit).get(MANIFEST) for commit in (repository.head, release.revision))
        return release.revision in heads or (current is not None and tagged is not None and current == tagged)

    def unhide(self, release: ListedRelease) -> None:
        """Tag the release's commit; do nothing if it has the tag."""
        client = self._client()
        client.call(
            f"tag {release.tag}",
            lambda: client.api.create_tag(self.repo, tag=release.tag, revision=release.revision, exist_ok=True),
        )

    def drop(self, release: ListedRelease) -> None:
        """Do nothing: the Hub keeps files to which the history refers, and only the owner can rewrite that."""

    def hide(self, release: ListedRelease) -> None:
        """Delete the release's tag."""
        client = self._client()
        with suppress(MissingError):  # the answer to an earlier try got lost
            client.call(f"delete the tag {release.tag}", lambda: client.api.delete_tag(self.repo, tag=release.tag))

    def fetch(self, into: Path | None, *, tag: str | None, progress: Progress, select: Selection = None) -> Path:
        """Download the release to ``into``, or to the Hub's cache, and return the folder.

        The client adds `.cache/huggingface/` to ``into``. Raises `UserError` for an unknown tag, and `MissingError` if
        there is no repository.
        """
        with self.exclusive(progress):
            return hub.download(self._client(), self.revision_of(tag), into, select)

    def revision_of(self, tag: str | None) -> str:
        """Return the commit of a release (None: the current one); raise `UserError` for an unknown tag."""
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
        """Create the repository, or take the one that another publisher created at the same time."""
        private = self.section is None or self.section.private
        client.call("create the repository", lambda: client.api.create_repo(self.repo, private=private, exist_ok=True))
        return self._require_repository(client)

    def _require_repository(self, client: HubClient) -> Repository:
        """Return a snapshot of the repository; `MissingError` if it does not exist or the token may not see it."""
        if (repository := hub.look(client)) is None:
            raise MissingError(
                f"{self.repo}: there is no such repository, or this token may not see it",
                hint="Check the name; a private one needs HF_TOKEN or `hf auth login`.",
            )
        return repository

    def _require_own(self, release: Release, repository: Repository) -> bool:
        """Return whether the release is tagged.

        Raises `UserError` if the tag has another manifest, and `StageError` if other files of it differ.
        """
        tagged = repository.tags.get(release.tag)
        if tagged is None:
            return False
        files = hub.tree(self._client(), tagged)
        wrong = hub.differences(files, release)
        if MANIFEST in wrong:
            raise UserError(
                f"{self.repo}: the tag {release.tag} is there, and the {MANIFEST} that it holds is another one",
                hint="Tags never move. Look at the tag on the Hub; one that nobody needs is deleted there.",
            )
        if wrong:
            raise StageError(f"{self.repo}: the release {release.tag} is damaged on the Hub: {hub.some(wrong)} differs")
        return True

    def _opened(self, release: Release, repository: Repository) -> str | None:
        """Return the head of the open pull request with the release that an earlier attempt left, or None."""
        titled = (head for head, title in repository.requests.values() if title == hub.title_of(release))
        return self._holding(titled, release) if self._by_request else None

    def _holding(self, commits: Iterable[str], release: Release) -> str | None:
        """Return the first of these commits that has the release's files, or None."""
        client = self._client()
        return next((commit for commit in commits if not hub.differences(hub.tree(client, commit), release)), None)

    def _starts_from(self, commit: str, parent: str) -> bool:
        """Return whether ``parent`` is the commit's parent, so that a merge gives exactly the commit's files."""
        return [str(entry.commit_id) for entry in hub.history(self._client(), commit)[1:2]] == [parent]

    def _commit(self, client: HubClient, release: Release, branch: str, parent: str) -> str:
        """Upload the release and make its files those of the branch in one commit; return its id."""
        from huggingface_hub import CommitOperationDelete

        def existing() -> str | None:
            now = self._require_repository(client)
            heads = [now.branches[branch]] if branch in now.branches else []
            return self._opened(release, now) if self._by_request else self._holding(heads, release)

        removed = sorted(hub.tree(client, parent).keys() - release.files.keys())
        planned_operations = [
            *hub.upload(client, release, branch, by_request=self._by_request),
            *(CommitOperationDelete(name, is_folder=False) for name in removed),
        ]
        return hub.commit(
            client,
            planned_operations,
            hub.title_of(release),
            branch,
            parent,
            find_existing=existing,
            by_request=self._by_request,
        )

    def _copy(self, client: HubClient, release: ListedRelease, parent: str, files: Tree, message: str) -> None:
        """Give `main` the release's files in one commit: large ones are copied on the server, small ones sent again."""
        from huggingface_hub import CommitOperationCopy, CommitOperationDelete

        names = hub.differing(hub.tree(client, parent), files)
        planned_operations: list[Any] = [
            CommitOperationCopy(name, name, src_revision=release.revision)
            if name in files
            else CommitOperationDelete(name, is_folder=False)
            for name in names
        ]

        def existing() -> str | None:
            return None if hub.differing(hub.tree(client, MAIN), files) else MAIN

        hub.commit(client, planned_operations, message, MAIN, parent, find_existing=existing)

    def _merge(self, client: HubClient, number: int, commit: str, files: Tree) -> None:
        def attempt() -> None:
            status = client.api.get_discussion_details(self.repo, number).status
            if status == "draft":
                client.api.change_discussion_status(self.repo, number, "open")
            if status != "merged":
                client.api.merge_pull_request(self.repo, number)

        try:
            client.call(f"merge pull request {number}", attempt)
        except RefusedError:
            if hub.differing(hub.tree(client, MAIN), files):  # else it was merged, and the answer got lost
                if not self._starts_from(commit, self._require_repository(client).head):
                    raise hub.moved(self.repo, MAIN) from None
                raise

    def _close(self, client: HubClient, repository: Repository, head: str, comment: str) -> None:
        number = repository.request_of(head)
        client.call(
            f"close pull request {number}",
            lambda: client.api.change_discussion_status(self.repo, number, "closed", comment=comment),
        )
