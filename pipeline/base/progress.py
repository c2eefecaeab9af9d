"""Report the progress of a run to a person, a log or a program."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Colours and other escape sequences, and whatever else moves a cursor: messages quote the logs of other programs.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_HEARTBEAT_S = 60.0


class Progress(Protocol):
    """The protocol by which a stage reports its progress."""

    def bar(self, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
        """Show a bar over ``total`` units ("B", "samples", ...).

        Call the context's value with the units done since its last call.
        """

    def say(self, message: str) -> None:
        """Print a line about the current work."""

    def warn(self, message: str) -> None:
        """Print a warning."""


class Reporter(Progress, Protocol):
    """The protocol by which the runner reports stages."""

    def started(self, key: str, number: int, total: int) -> None:
        """Report that a stage begins."""

    def cached(self, key: str, number: int, total: int, summary: str) -> None:
        """Report that the store already has a stage's entry."""

    def finished(self, key: str, number: int, total: int, seconds: float, summary: str) -> None:
        """Report that a stage's entry was committed."""


class PlainReporter:
    """A reporter of plain lines without control characters, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def _line(self, text: str) -> None:
        self._stream.write(CONTROL.sub("", text) + "\n")
        self._stream.flush()

    def started(self, key: str, number: int, total: int) -> None:
        """Print that a stage begins."""
        self._line(f"[{number}/{total}] {key}: started")

    def cached(self, key: str, number: int, total: int, summary: str) -> None:
        """Print that the store already has a stage's entry, with its ``summary``."""
        self._line(f"[{number}/{total}] {key}: cached: {summary}")

    def finished(self, key: str, number: int, total: int, seconds: float, summary: str) -> None:
        """Print that a stage's entry was committed."""
        self._line(f"[{number}/{total}] {key}: done in {seconds:.1f} s: {summary}")

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Print a line a minute and one at the end.

        Call the context's value with the units done since its last call.
        """
        done, reported = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, reported
            now = time.monotonic()
            done += count
            if reported < math.inf and (done >= total or now - reported >= _HEARTBEAT_S):
                reported = math.inf if done >= total else now
                self._line(f"    {100 * done // total if total else 100} % of {total:,} {unit}")

        yield advance

    def say(self, message: str) -> None:
        """Print a line about the current work."""
        self._line(f"    {message}")

    def warn(self, message: str) -> None:
        """Print a warning."""
        self._line(f"    warning: {message}")


class RichReporter:
    """A reporter with marks, colours and bars, for a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True, highlight=False)

    def started(self, key: str, number: int, total: int) -> None:
        """Print that a stage begins."""
        self._console.print(f"[dim]{number:>2}/{total}[/] [bold]{key}[/]")

    def cached(self, key: str, number: int, total: int, summary: str) -> None:
        """Print that the store already has a stage's entry, with its ``summary``."""
        self._console.print(f"[dim]{number:>2}/{total}[/] {key} [cyan]cached[/] [dim]{_quoted(summary)}[/]")

    def finished(self, key: str, number: int, total: int, seconds: float, summary: str) -> None:
        """Print that a stage's entry was committed."""
        self._console.print(f"      [green]done[/] in {seconds:.1f} s [dim]{_quoted(summary)}[/]")

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Draw a bar over ``total`` units: bytes come with their speed, other units with their count."""
        from rich import progress as rich

        amount = (
            (rich.DownloadColumn(), rich.TransferSpeedColumn())
            if unit == "B"
            else (rich.MofNCompleteColumn(), rich.TextColumn(unit))
        )
        columns = (
            rich.TextColumn("     "),
            rich.BarColumn(),
            *amount,
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
        )
        with rich.Progress(*columns, console=self._console, transient=True) as shown:
            task = shown.add_task("", total=total)
            yield lambda count: shown.advance(task, count)

    def say(self, message: str) -> None:
        """Print a line about the current work."""
        self._console.print(f"      [dim]{_quoted(message)}[/]")

    def warn(self, message: str) -> None:
        """Print a warning."""
        self._console.print(f"      [yellow]warning:[/] {_quoted(message)}")


def _quoted(text: str) -> str:
    from rich.markup import escape

    return escape(CONTROL.sub("", text))


def reporter_for(*, json: bool) -> Reporter:
    """Return a reporter: bars on a terminal, plain lines elsewhere and with ``--json``."""
    return PlainReporter() if json or not sys.stderr.isatty() else RichReporter()
