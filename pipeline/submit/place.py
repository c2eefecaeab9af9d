"""What a place is to us: it takes a task, and says how the job is. The state is its own; nothing of it is kept here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.submit.task import Task
from pipeline.submit.waiting import Waiting

BROKEN: Final = 5
"""What a job counts as that ended without an exit code of its own: another submission goes on where it stopped."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job by the name that the place gave it; ``log`` is a file, or the command that shows it."""

    identifier: str
    log: str


@dataclass(frozen=True, slots=True)
class State:
    """``word`` is the place's own. ``exit_code`` is the run's, once it has ended, ``waits`` why it does not run yet."""

    word: str
    exit_code: int | None = None
    waits: Waiting | None = None

    @property
    def ended(self) -> bool:
        """Whether the place will not run it again."""
        return self.exit_code is not None


class Place(Protocol):
    """A cluster that takes jobs.

    Every method raises UserError where the place refuses what was asked, and a transient StageError where it cannot be
    reached.
    """

    def text(self, task: Task) -> str:
        """Exactly what would be sent."""

    def submit(self, task: Task) -> Submitted:
        """Send it."""

    def state(self, identifier: str) -> State:
        """How the job is now."""

    def lines(self, identifier: str, seen: Callable[[State], None] | None = None) -> Iterator[str]:
        """The job's log from its beginning, piece by piece, until it has ended; ``seen`` is told of looks meanwhile."""

    def cancel(self, identifier: str) -> None:
        """End it. What it finished stays in the store."""
