"""A task (`quantmint run RECIPE --json` on some machines), the places that take one, and how its job is followed.

    >>> task = task_for(load_recipe("llama405b-fp8kv").recipe, "llama405b-fp8kv", store="store")
    >>> task.words("quantmint")
    ('quantmint', 'run', 'llama405b-fp8kv', '--json', '--store', 'store')

Words stay words: each place quotes them in its own way, and no text of a recipe is ever read by a shell.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from quantmint.pipeline.base.errors import SECRET, StageError, UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.planning.target import parse_target

Kind = Literal["rocm", "cuda", "cpu"]
BROKEN: Final = 5
"""What a job counts as that ended without an exit code of its own: another submission goes on where it stopped."""
_PAUSE_S: Final = 3.0
_PATIENCE_S: Final = 600.0
"""How long a place may be away before a job that goes on is given up."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run of ``recipe``, as it was named, on ``nodes`` machines with ``gpus`` accelerators each.

    ``store`` is relative to the working folder unless it is absolute. ``cpus`` and ``memory_gb`` are of one node and
    ``seconds`` of the whole run; None leaves them to the place. ``arguments`` are further words of `quantmint run`.
    """

    name: str
    recipe: str
    store: str
    kind: Kind
    gpus: int
    nodes: int = 1
    cpus: int | None = None
    memory_gb: int | None = None
    seconds: float | None = None
    arguments: tuple[str, ...] = ()

    def words(self, *program: str) -> tuple[str, ...]:
        """The command, word by word; on several nodes it finds them as a Ray cluster."""
        spread = ("--on", "ray") if self.nodes > 1 and "--on" not in self.arguments else ()
        return (*program, "run", self.recipe, "--json", "--store", self.store, *spread, *self.arguments)


def task_for(
    recipe: Recipe,
    named: str,
    *,
    store: str,
    gpus: int | None = None,
    cpus: int | None = None,
    memory_gb: int | None = None,
    seconds: float | None = None,
    arguments: tuple[str, ...] = (),
) -> Task:
    """The task of a recipe on as many nodes as its GPUs fill. ``gpus`` are all of them (None: the target's).

    Raises UserError for GPUs that are no whole number of nodes, and for what cannot be a word of a command.
    """
    for word in (named, store, *arguments):
        require_plain("an argument", word)
    target = recipe.target
    kind = hardware(target.hardware).kind
    wanted = target.gpus if gpus is None else gpus
    if kind == "cpu" or wanted == 0:
        if gpus:
            raise UserError(f"--gpus: found {gpus}, and the recipe's target is a CPU")
        each, count = 0, 1
    else:
        machines = parse_target(f"{target.hardware}:{wanted}")
        each, count = machines.gpus, machines.nodes
    return Task(recipe.name, named, store, kind, each, count, cpus, memory_gb, seconds, arguments)


def program_here() -> tuple[str, ...]:
    """This `quantmint` by its absolute path, which the nodes have too."""
    script = Path(sys.executable).parent / "quantmint"
    return (str(script),) if script.is_file() else (sys.executable, "-P", "-m", "quantmint")


def require_no_secret(option: str, name: str, instead: str) -> None:
    """UserError for a variable whose value would stand where others read it; ``instead`` is where it belongs."""
    if SECRET.search(name):
        raise UserError(f"{option}: found {name}, which reads like the name of a secret", hint=instead)


def require_job(identifier: str, pattern: str, expected: str) -> str:
    """A job's name as a place gives it; UserError for text that may mean more than one job there, or another path."""
    if not re.fullmatch(pattern, identifier):
        raise UserError(f"found the job {identifier!r}, expected {expected}")
    return identifier


def require_plain(option: str, text: str) -> None:
    """UserError for text that no line of a job's description can hold."""
    if not text.isprintable() or not text:
        raise UserError(f"{option}: found {text!r}, expected printable text on one line")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job by the name that the place gave it; ``log`` is a file, or the command that shows it."""

    identifier: str
    log: str


@dataclass(frozen=True, slots=True)
class State:
    """How a job is: the place's own ``word``, the run's ``exit_code`` once it is over, why it ``waits`` to be run."""

    word: str
    exit_code: int | None = None
    waits: str | None = None


class Place(Protocol):
    """A cluster; UserError where it refuses what was asked, a transient StageError where it cannot be reached."""

    def text(self, task: Task) -> str:
        """Exactly what would be sent."""

    def submit(self, task: Task) -> Submitted:
        """Send it."""

    def state(self, identifier: str) -> State:
        """How the job is now."""

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """Give ``show`` what the job's log has grown by since the last call."""


class Log:
    """What of a log is new, where the place gives all of it each time."""

    def __init__(self) -> None:
        self._shown = 0  # characters

    def new(self, text: str) -> str:
        """What it has grown by; all of it where it is shorter than it was, and so another one."""
        start = self._shown if self._shown <= len(text) else 0
        self._shown = len(text)
        return text[start:]


def follow(place: Place, identifier: str, show: Callable[[str], None], look: Callable[[State], None]) -> State:
    """Show a job's log to its end, tell ``look`` each state, return the last; StageError where place or job is gone."""
    heard = time.monotonic()
    while True:
        try:
            state = place.state(identifier)  # before the log: what comes after the last look would be lost
            look(state)
            place.show_log(identifier, show)
            if state.exit_code is not None:
                return state
            heard = time.monotonic()
        except UserError as error:
            said = f"{identifier}: the cluster does not know it any more: {error.message}"
            raise StageError(said, hint=error.hint, transient=True) from error
        except StageError as error:
            if not error.transient or time.monotonic() - heard > _PATIENCE_S:
                raise
        time.sleep(_PAUSE_S)
