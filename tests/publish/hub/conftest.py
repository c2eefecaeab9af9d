"""A place on the stand-in of the Hub, and what is asked of it beside the code that is tested."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.publish.destination import Publication
from quantmint.pipeline.publish.hub.destination import HubDestination
from quantmint.pipeline.publish.release import Release
from quantmint.pipeline.recipe.destinations import Hub
from tests.hub.standin import HubStandIn

REPO = "my-org/tiny"


class Told(PlainReporter):
    """What a person would see: the lines, and how far each bar came."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bars: list[list[int]] = []

    def _line(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        bar = [0, total]
        self.bars.append(bar)

        def advance(amount: int) -> None:
            assert amount >= 0
            bar[0] += amount

        yield advance


@dataclass
class Publisher:
    """One who runs the same command again and again; ``waits`` are the seconds that would have been waited."""

    hub: HubStandIn
    api: Any
    told: Told = field(default_factory=Told)
    waits: list[float] = field(default_factory=list)

    def target(self, repo: str = REPO, **section: object) -> HubDestination:
        return HubDestination(repo, Hub.model_validate({"repo": repo, **section}))

    def publish(self, release: Release, *, candidate: bool = False, repo: str = REPO, **section: object) -> Publication:
        return self.target(repo, **section).publish(release, candidate=candidate, progress=self.told)

    def files(self, revision: str = "main", repo: str = REPO) -> set[str]:
        return set(self.api.list_repo_files(repo, revision=revision)) - {".gitattributes"}

    def history(self, revision: str = "main", repo: str = REPO) -> list[str]:
        return [commit.title for commit in self.api.list_repo_commits(repo, revision=revision)]

    def tags(self, repo: str = REPO) -> dict[str, str]:
        return {tag.name: tag.target_commit for tag in self.api.list_repo_refs(repo).tags}

    def head(self, branch: str = "main", repo: str = REPO) -> str:
        heads = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo).branches}
        return str(heads[branch])

    def writes(self) -> list[tuple[str, str]]:
        """Requests so far that change something."""
        asked = ("/validate-yaml", "/preupload/", "/batch")
        return [
            (one.method, one.path)
            for one in self.hub.requests
            if one.method not in ("GET", "HEAD") and not any(part in one.path for part in asked)
        ]

    def sent(self) -> list[str]:
        """Large objects that came whole to the store so far, by SHA-256."""
        return [one.path.rpartition("/")[2] for one in self.hub.sent("PUT", "/storage/") if one.status == 200]

    def somebody_commits(self, name: str = "NOTES.md", *, revision: str = "main") -> None:
        """Another one writes to the repository."""
        self.api.upload_file(path_or_fileobj=b"by hand", path_in_repo=name, repo_id=REPO, revision=revision)


@pytest.fixture
def publisher(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import _http
    from tenacity import nap

    made = Publisher(hub, HfApi(endpoint=hub.url, token=hub.token))
    # The library tries some requests again by itself, and sleeps in between, as we do.
    monkeypatch.setattr(_http, "time", types.SimpleNamespace(sleep=made.waits.append))
    monkeypatch.setattr(nap, "time", types.SimpleNamespace(sleep=made.waits.append))
    return made
