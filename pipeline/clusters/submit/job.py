"""A run as a job: the request, the schedulers' protocol, and how a job is followed to its end.

    >>> from quantmint.pipeline.recipe.load import load_recipe
    >>> request = request_job(load_recipe("llama405b-fp8kv").recipe, "llama405b-fp8kv", store="store")
    >>> request.command("quantmint")
    ('quantmint', 'run', 'llama405b-fp8kv', '--json', '--store', 'store')

A command stays a list of words, which each scheduler quotes in its own way. No shell reads the text of a recipe.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from quantmint.pipeline.base.errors import SECRET, StageError, UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.recipe.schema import Recipe
from quantmint.pipeline.serving.planning.target import parse_target

BROKEN: Final = 5
"""Exit code of a job that ended without one of its own; submitted again, it goes on where it stopped."""
_POLL_S: Final = 3.0
_OUTAGE_S: Final = 600.0
"""Seconds that a scheduler may be unreachable before `follow` gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A run of ``recipe`` (as the user named it) on ``nodes`` machines with ``gpus`` accelerators each.

    ``store`` is relative to the working folder. ``cpus`` and ``memory_gb`` are per node, ``seconds`` for the whole run;
    None leaves them to the scheduler. ``arguments`` are further words of `quantmint run`.
    """

    name: str
    recipe: str
    store: str
    kind: Literal["rocm", "cuda", "cpu"]
    gpus: int
    nodes: int = 1
    cpus: int | None = None
    memory_gb: int | None = None
    seconds: float | None = None
    arguments: tuple[str, ...] = ()

    def command(self, *program: str) -> tuple[str, ...]:
        """Return the command as a list of words after ``program``; on several nodes with ``--on ray``."""
        spread = ("--on", "ray") if self.nodes > 1 and "--on" not in self.arguments else ()
        return (*program, "run", self.recipe, "--json", "--store", self.store, *spread, *self.arguments)


def request_job(recipe: Recipe, named: str, *, gpus: int | None = None, **options: Any) -> JobRequest:
    """Return the request for a recipe's run, named by the user as ``named``, on as many nodes as ``gpus`` fill.

    ``gpus`` counts those of all nodes (None: the target's). ``options`` are other fields of `JobRequest`, ``store``
    among them. Raises `UserError` when the GPUs are no whole number of nodes or the target is a CPU, and for words with
    line breaks or control characters.
    """
    for word in (named, options["store"], *options.get("arguments", ())):
        require_printable("an argument", word)
    target = recipe.target
    kind = hardware(target.hardware).kind
    total = target.gpus if gpus is None else gpus
    if kind == "cpu" and gpus:
        raise UserError(f"--gpus: found {gpus}, and the recipe's target is a CPU")
    nodes, per_node = 1, 0
    if kind != "cpu" and total:
        machines = parse_target(f"{target.hardware}:{total}")
        nodes, per_node = machines.nodes, machines.gpus
    return JobRequest(name=recipe.name, recipe=named, kind=kind, gpus=per_node, nodes=nodes, **options)


def quantmint_program() -> tuple[str, ...]:
    """Return the words that start this `quantmint` by its absolute path, which the nodes share."""
    script = Path(sys.executable).parent / "quantmint"
    return (str(script),) if script.is_file() else (sys.executable, "-P", "-m", "quantmint")


def render(template: Path, **values: Any) -> str:
    """Return a template file rendered with ``values``; an undefined name raises jinja2's UndefinedError."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(template.parent)
    environment = Environment(  # noqa: S701 - scripts, units and YAML; the templates quote
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
    environment.filters["quote"] = environment.globals["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template.name).render(values)


def refuse_secret(option: str, name: str, instead: str) -> None:
    """Raise `UserError` for a variable named like a secret: others can read its value; ``instead`` is the hint."""
    if SECRET.search(name):
        raise UserError(f"{option}: found {name}, which looks like the name of a secret", hint=instead)


def require_job_id(identifier: str, pattern: str, expected: str) -> str:
    """Return ``identifier`` if all of it matches the regular expression ``pattern``.

    Raises `UserError` otherwise, because a scheduler could take such text for several jobs or for a path; ``expected``
    is the form in its message.
    """
    if not re.fullmatch(pattern, identifier):
        raise UserError(f"found the job {identifier!r}, expected {expected}")
    return identifier


def require_printable(option: str, text: str) -> None:
    """Raise `UserError` for an empty text, line breaks and control characters; ``option`` is named in its message."""
    if not text.isprintable() or not text:
        raise UserError(f"{option}: found {text!r}, expected printable text on one line")


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job by its scheduler's identifier; ``log`` is a file, or the command that shows the log."""

    identifier: str
    log: str


@dataclass(frozen=True, slots=True)
class JobState:
    """The scheduler's ``status``, the run's ``exit_code`` (None until the end), and why a pending job ``waits``."""

    status: str
    exit_code: int | None = None
    waits: str | None = None


class Scheduler(ABC):
    """A client of a cluster. Raises `UserError` for a refusal and a transient `StageError` when it is unreachable."""

    def __init__(self) -> None:
        self._shown: Counter[str] = Counter()  # characters by log

    @abstractmethod
    def describe(self, request: JobRequest) -> str:
        """Return the text of exactly what `submit` sends."""

    @abstractmethod
    def submit(self, request: JobRequest) -> SubmittedJob:
        """Submit the job, and return its identifier and log."""

    @abstractmethod
    def state(self, identifier: str) -> JobState:
        """Return the job's state."""

    @abstractmethod
    def logs(self, identifier: str) -> Iterable[tuple[str, str]]:
        """Yield name and whole text of each log of the job."""

    def show_log(self, identifier: str, show: Callable[[str], None]) -> None:
        """Call ``show`` with the growth of each log since the last call; a log that became shorter is a new one."""
        for name, log in self.logs(identifier):
            show(log[self._shown[name] if self._shown[name] <= len(log) else 0 :])
            self._shown[name] = len(log)


def follow(
    scheduler: Scheduler, identifier: str, show: Callable[[str], None], watch: Callable[[JobState], None]
) -> JobState:
    """Show a job's log until the job ends, call ``watch`` with each state, and return the last one.

    Raises `StageError` when the scheduler stays unreachable for ten minutes, or no longer knows the job.
    """
    last_answer = time.monotonic()
    while True:
        try:
            state = scheduler.state(identifier)  # before the log, which may still grow after the last look at it
            watch(state)
            scheduler.show_log(identifier, show)
            if state.exit_code is not None:
                return state
            last_answer = time.monotonic()
        except UserError as error:
            message = f"{identifier}: the cluster no longer knows this job: {error.message}"
            raise StageError(message, hint=error.hint, transient=True) from error
        except StageError as error:
            if not error.transient or time.monotonic() - last_answer > _OUTAGE_S:
                raise
        time.sleep(_POLL_S)
