"""What a place is to us: it takes a task, says how the job is, and shows its log; and how a job is followed in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pipeline.base.errors import StageError, UserError
from pipeline.clusters.submit.task import Task

BROKEN: Final = 5
"""What a job counts as that ended without an exit code of its own: another submission goes on where it stopped."""
_PAUSE_S: Final = 3.0
_PATIENCE_S: Final = 600.0
"""How long a place may be away before a job that goes on is given up."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job by the name that the place gave it; ``log`` is a file, or the command that shows it."""

    identifier: str
    log: str


@dataclass(frozen=True, slots=True)
class State:
    """How a job is.

    ``word`` is the place's own. ``exit_code`` is the run's, once it has ended, ``waits`` why it does not run yet, in
    the place's own words.
    """

    word: str
    exit_code: int | None = None
    waits: str | None = None

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

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """Give ``show`` what the job's log has grown by since the last call, or while it grows."""

    def cancel(self, identifier: str) -> None:
        """End it. What it finished stays in the store."""


def follow(place: Place, identifier: str, show: Callable[[str], None], look: Callable[[State], None]) -> State:
    """Show a job's log until it has ended, and return its last state; ``look`` is told of each state before that.

    Raises the StageError of a place that is away for longer than ten minutes, and a transient one for a job that the
    place has forgotten.
    """
    heard = time.monotonic()
    while True:
        try:
            state = place.state(identifier)  # before the log: what comes after the last look would be lost
            look(state)
            place.show_log(identifier, show)
            if state.ended:
                return state
            heard = time.monotonic()
        except UserError as error:
            said = f"{identifier}: the cluster does not know it any more: {error.message}"
            raise StageError(said, hint=error.hint, transient=True) from error
        except StageError as error:
            if not error.transient or time.monotonic() - heard > _PATIENCE_S:
                raise
        time.sleep(_PAUSE_S)
