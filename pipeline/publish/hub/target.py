"""A repository of the Hub as a `pipeline.publish.target.Target`.

    HubTarget("my-org/Llama-3.3-70B-FP8-KV", recipe.publish.hub).publish(release, candidate=False, progress=progress)

Order: the repository, what restricts it, bytes, one commit on top of the one that was read, its files compared, the
tag, what opens it. The next attempt finds each step done, so a run that was killed anywhere is finished by the same
command, and one that was finished does nothing. `main` goes from one release to the next in one commit, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.progress import Progress
from pipeline.publish.hub import releases
from pipeline.publish.hub.carrying_out import publish
from pipeline.publish.hub.client import Client, connect
from pipeline.publish.hub.download import download, revision_of
from pipeline.publish.hub.plan import by_request, operations, plan
from pipeline.publish.hub.preflight import preflight, require_access
from pipeline.publish.release import Release
from pipeline.publish.target import Listed, Operation, Published
from pipeline.recipe.sections import Hub


@dataclass(frozen=True, slots=True)
class HubTarget:
    """``section`` is what the recipe says of it; None where a person named it, and then no setting is touched."""

    repo: str
    section: Hub | None = None
    sleep: Callable[[float], None] = time.sleep

    @property
    def place(self) -> str:
        """organisation/name."""
        return self.repo

    def require_access(self) -> None:
        """Token, rights and visibility."""
        require_access(self._client(), self.section)

    def preflight(self, release: Release) -> None:
        """Token, rights, names, sizes, visibility and the card; see `pipeline.publish.hub.preflight`."""
        preflight(self._client(), release, self.section)

    def operations(self, release: Release, *, candidate: bool) -> Sequence[Operation]:
        """What `publish` would do now, also where the repository is not there yet."""
        client = self._client()
        todo = plan(client, release, self.section, candidate=candidate)
        return operations(client, todo, release, self.section, candidate=candidate)

    def publish(self, release: Release, *, candidate: bool, progress: Progress) -> Published:
        """Send, commit, compare, tag; or find that it was done."""
        return publish(self._client(progress), release, self.section, candidate=candidate)

    def releases(self) -> Sequence[Listed]:
        """The tagged releases, the newest first."""
        return releases.releases(self._client())

    def promote(self, tag: str | None, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """See `pipeline.publish.hub.releases`."""
        return releases.promote(self._client(progress), tag, dry_run=dry_run)

    def rollback(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """See `pipeline.publish.hub.releases`."""
        return releases.rollback(self._client(progress), tag, dry_run=dry_run)

    def chosen_by_run(self) -> bool:
        """By the commits of `main`. Never where the recipe goes by way of pull requests, which people merge too."""
        return not by_request(self.section) and releases.who_chose(self._client()).by_run

    def bring_back(self, tag: str, *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """See `pipeline.publish.hub.releases`."""
        return () if by_request(self.section) else releases.bring_back(self._client(progress), tag, dry_run=dry_run)

    def left(self) -> frozenset[str]:
        """By the commits of `main`."""
        return releases.who_chose(self._client()).left

    def remove(self, tags: Collection[str], *, dry_run: bool, progress: Progress) -> Sequence[Operation]:
        """See `pipeline.publish.hub.releases`."""
        return releases.remove(self._client(progress), tags, dry_run=dry_run)

    def fetch(
        self, into: Path | None, *, tag: str | None, progress: Progress, wanted: Callable[[str], bool] | None = None
    ) -> Path:
        """The files in ``into``, or in the Hub's cache; what is there already is not fetched again.

        ``into`` also gets `.cache/huggingface/`, by which the client knows what it has fetched.
        """
        client = self._client(progress)
        return download(client, revision_of(client, tag), into, wanted)

    def _client(self, progress: Progress | None = None) -> Client:
        return connect(self.repo, progress, sleep=self.sleep)
