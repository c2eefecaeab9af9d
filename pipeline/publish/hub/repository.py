"""What a repository of the Hub is now: who sees it, and where its branches and tags are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.publish.hub.client import Client, MissingError

MAIN: Final = "main"
"""The branch that readers get."""
CANDIDATE: Final = "candidate"
"""The branch of a release that waits to be promoted."""


@dataclass(frozen=True, slots=True)
class Repository:
    """``name`` differs from the name that was asked for where it was renamed; commits are 40 hex digits."""

    name: str
    private: bool
    gated: str | None
    disabled: bool
    branches: Mapping[str, str]
    tags: Mapping[str, str]

    @property
    def head(self) -> str:
        """The commit of ``main``."""
        return self.branches[MAIN]


def look(client: Client) -> Repository | None:
    """The repository; None where there is none, or none that this token may see."""
    try:
        info = client.call("read the repository", lambda: client.api.model_info(client.repo))
        refs = client.call("read its branches and tags", lambda: client.api.list_repo_refs(client.repo))
    except MissingError:
        return None
    return Repository(
        name=str(info.id),
        private=bool(info.private),
        gated=info.gated or None,
        disabled=bool(info.disabled),
        branches={ref.name: ref.target_commit for ref in refs.branches},
        tags={ref.name: ref.target_commit for ref in refs.tags},
    )


def head(client: Client, branch: str) -> str:
    """The commit of a branch now."""
    refs = client.call("read its branches", lambda: client.api.list_repo_refs(client.repo))
    found = next((str(ref.target_commit) for ref in refs.branches if ref.name == branch), None)
    if found is None:
        raise MissingError(f"{client.repo}: the branch {branch} is gone", status=404)
    return found
