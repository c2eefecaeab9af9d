"""What a person or a log sees of a fleet: a table that lives on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pipeline.durations import duration
from pipeline.fleet.events import Event

_COLOURS = {"PASS": "green", "FAIL": "red", "INVALID": "red", "INCONCLUSIVE": "yellow"}


def line_of(event: Event) -> str | None:
    """An event as a line of a log; None for one that is none."""
    name = event.recipe
    match event.kind:
        case "queued":
            return f"{name}: queued: {event.reason}"
        case "waiting":
            return f"{name}: waits: {event.reason}"
        case "started":
            again = f", attempt {event.attempt}" if event.attempt > 1 else ""
            return f"{name}: started{again}"
        case "stage":
            return f"{name}: [{event.stage}]"
        case "retrying":
            return f"{name}: failed, tried again in {duration(event.wait_s or 0.0)}: {event.reason}"
    return f"{name}: {outcome(event)}"


def outcome(event: Event) -> str:
    """How a recipe left a round, in a phrase."""
    took = f" in {duration(event.duration_s)}" if event.attempt and event.duration_s is not None else ""
    word = event.verdict if event.state == "ran" and event.verdict else event.state
    if event.state == "failed":
        word = f"failed with exit code {event.exit_code}"
    release = f", released {event.tag}" if event.tag else ""
    reason = f": {event.reason}" if event.reason else ""
    log = f" (log: {event.log})" if event.state == "failed" and event.log else ""
    return f"{word}{took}{release}{reason}{log}"


@dataclass
class _Row:
    state: str
    note: str
    since: float
    running: bool = False
    ended: Event | None = None


class Board:
    """The rows of the live table; ``clock`` gives seconds. Rendered anew several times a second, by rich's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows: dict[str, _Row] = {}

    def hear(self, event: Event) -> None:
        """Note what an event changes."""
        row = self._rows.pop(event.recipe, None) or _Row("", "", self._clock())
        match event.kind:
            case "queued" | "waiting":
                row = _Row(event.kind, event.reason, self._clock())
            case "started":
                row = _Row("running", "starting", self._clock(), running=True)
            case "stage":
                row.note = event.stage or ""
            case "retrying":
                row = _Row("again later", event.reason, self._clock())
            case _:
                row = _Row("ended", outcome(event), self._clock(), ended=event)
        self._rows = {**self._rows, event.recipe: row}  # a new mapping: another thread may be reading the old one

    def __rich__(self) -> Table:
        made = Table(box=box.SIMPLE, pad_edge=False, expand=True)
        made.add_column("recipe", no_wrap=True)
        made.add_column("state", no_wrap=True)
        made.add_column("time", justify="right", no_wrap=True)
        made.add_column("what", overflow="ellipsis", no_wrap=True, ratio=1)  # what is left of the line
        ranks = {"running": 0, "again later": 1, "waiting": 2, "queued": 3}  # a low terminal cuts the end off
        for name, row in sorted(self._rows.items(), key=lambda item: ranks.get(item[1].state, 4)):
            colour = _COLOURS.get(row.ended.verdict or "", "") if row.ended else "cyan" if row.running else "dim"
            shown = row.ended.duration_s if row.ended else self._clock() - row.since
            style = f"[{colour}]" if colour else ""
            state = row.state if row.ended is None else row.ended.verdict or row.ended.state or ""
            made.add_row(name, f"{style}{escape(state)}", duration(shown or 0.0), escape(row.note))
        return made


@contextmanager
def shown(
    *, lines: bool, stream: TextIO | None = None
) -> Iterator[tuple[Callable[[Event], None], Callable[[str], None]]]:
    """Where events go, and warnings; ``lines`` or no terminal: a line each on standard error."""
    out = stream or sys.stderr
    if lines or not out.isatty():

        def write(text: str) -> None:
            with suppress(OSError):  # a log on a full disk, or who read it is gone: the recipes are not
                out.write(f"{text}\n")
                out.flush()

        def hear(event: Event) -> None:
            line = line_of(event)
            if line is not None:
                write(line)

        yield hear, lambda message: write(f"warning: {message}")
        return
    console, board = Console(file=out, highlight=False), Board()
    with Live(board, console=console, refresh_per_second=4, transient=True):
        yield board.hear, lambda message: console.print(f"[yellow]warning:[/] {escape(message)}")
