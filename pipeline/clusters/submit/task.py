"""What another place is asked to run: `quantmint run RECIPE --json`, with the machines that the target calls for.

    >>> task = task_for(load_recipe("llama405b-fp8kv").recipe, "llama405b-fp8kv", store="store")
    >>> task.words("quantmint")
    ('quantmint', 'run', 'llama405b-fp8kv', '--json', '--store', 'store')

Pure. Words stay words: each place quotes them in its own way, and no text of a recipe is ever read by a shell.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pipeline.base.errors import UserError
from pipeline.base.hardware import hardware
from pipeline.base.processes import SECRET
from pipeline.recipe.schema import Recipe
from pipeline.serving.planning.target import parse_target

Kind = Literal["rocm", "cuda", "cpu"]


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
    nodes: int | None = None,
    cpus: int | None = None,
    memory_gb: int | None = None,
    seconds: float | None = None,
    arguments: tuple[str, ...] = (),
) -> Task:
    """The task of a recipe. ``gpus`` are all of them (None: the target's), ``nodes`` None: as many as they fill.

    Raises UserError for GPUs that are no whole number a node, and for what cannot be a word of a command.
    """
    for word in (named, store, *arguments):
        require_plain("an argument", word)
    target = recipe.target
    kind = hardware(target.hardware).kind
    if kind == "cpu":
        if gpus:
            raise UserError(f"--gpus: found {gpus}, and the recipe's target is a CPU")
        each, count = 0, nodes or 1
    elif gpus == 0:
        each, count = 0, nodes or 1
    else:
        wanted = target.gpus if gpus is None else gpus
        text = f"{target.hardware}:{wanted}"
        if nodes is not None:
            if wanted % nodes:
                raise UserError(f"--nodes: {wanted} GPUs are no whole number on each of {nodes} nodes")
            text = f"{target.hardware}:{wanted // nodes}x{nodes}"
        machines = parse_target(text)
        each, count = machines.gpus, machines.nodes
    return Task(recipe.name, named, store, kind, each, count, cpus, memory_gb, seconds, arguments)


def program_here(venv: str | None) -> tuple[str, ...]:
    """This `quantmint` by its absolute path, or that of another virtual environment on the shared filesystem."""
    if venv is not None:
        require_plain("--venv", venv)
        if not PurePosixPath(venv).is_absolute():
            raise UserError(f"--venv: found {venv!r}, expected an absolute path: it is looked for on another machine")
        return (str(PurePosixPath(venv) / "bin" / "quantmint"),)
    script = Path(sys.executable).parent / "quantmint"
    return (str(script),) if script.is_file() else (sys.executable, "-m", "pipeline")


def require_no_secret(option: str, name: str, instead: str) -> None:
    """UserError for a variable whose value would stand where others read it; ``instead`` is where it belongs."""
    if SECRET.search(name):
        raise UserError(f"{option}: found {name}, which reads like the name of a secret", hint=instead)


def require_plain(option: str, text: str) -> None:
    """UserError for text that no line of a job's description can hold."""
    if not text.isprintable() or not text:
        raise UserError(f"{option}: found {text!r}, expected printable text on one line")
