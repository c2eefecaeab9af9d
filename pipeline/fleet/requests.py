"""What a fleet is asked for, and within which limits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.refresh.due import Due

Look = Callable[[Sequence[str]], "tuple[Due, ...]"]
"""Which of these recipes are due: `pipeline.refresh.due.look` with everything but the recipes given."""


@dataclass(frozen=True, slots=True)
class Request:
    """A recipe as somebody named it (a name or a file), and what made them: "asked", "schedule"."""

    recipe: str
    trigger: str = "asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a fleet works.

    ``store`` is the store's root. ``jobs`` is how many recipes run at a time at the most (None: one for each device,
    one where there are none). ``devices`` are numbers as this process's own variables leave them (None: all that are
    visible). ``retries`` is how often an attempt is repeated after a fault that passes. ``max_hours`` limits a round's
    wall clock, ``max_disk`` the bytes by which the store and the folders of releases grow in it. ``everything`` also
    runs what is not due, is held or rests; ``redo`` are stages that run again, which means the same. ``wait`` is
    whether a recipe that another fleet has is waited for. ``on`` is what `quantmint submit --ray` takes, a cluster that
    runs the recipes (None: this machine does): Ray places them by what their targets need, no device of this machine is
    taken, and without ``jobs`` all that are due are submitted at once. ``command`` is the start of a child's command
    line, which the recipe and the options of `quantmint run` follow, and ``submit_command`` of one with ``on``.
    ``grace_s`` is the time between SIGTERM and SIGKILL, and ``first_wait_s`` the wait before the first repetition,
    which doubles from then on.
    """

    store: Path
    jobs: int | None = None
    devices: tuple[int, ...] | None = None
    retries: int = 3
    max_hours: float | None = None
    max_disk: int | None = None
    everything: bool = False
    on: str | None = None
    redo: tuple[str, ...] = ()
    wait: bool = True
    vllm: str | None = None
    remote: str | None = None
    device: str = "auto"
    command: tuple[str, ...] = (sys.executable, "-m", "pipeline", "run")
    submit_command: tuple[str, ...] = (sys.executable, "-m", "pipeline", "submit")
    grace_s: float = 30.0
    first_wait_s: float = 60.0

    @property
    def runs_everything(self) -> bool:
        """Whether what is not due runs too."""
        return self.everything or bool(self.redo)

    def slots(self, devices: int) -> int:
        """How many recipes run at a time at the most where this machine has ``devices``."""
        return self.jobs or (sys.maxsize if self.on is not None else devices or 1)

    def command_line(self, recipe: str, redo: Iterable[str]) -> list[str]:
        """A child's command line; ``redo`` are the stages of `redo` that are left to be made again."""
        again = [word for stage in redo for word in ("--redo", stage)]
        vllm = [] if self.vllm is None else ["--vllm", self.vllm]
        remote = [] if self.remote is None else ["--remote-store", self.remote]
        told = ["--json", "--store", str(self.store)]
        what = ["--device", self.device, *vllm, *remote, *again]
        if self.on is None:
            return [*self.command, recipe, *told, *what]
        return [*self.submit_command, recipe, "--ray", self.on, "--attached", *told, "--", *what]

    def look(self) -> Look:
        """`pipeline.refresh.due.look` as these options want it."""
        from pipeline.refresh.due import look
        from pipeline.store.tree import Store

        return partial(look, store=Store(self.store), vllm=self.vllm, device=self.device)
