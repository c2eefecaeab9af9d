"""How much wall clock a sweep may take, starts of servers included.

The budget is the sweep's, not the process's: what its earlier runs spent on trials that are kept counts, so that the
same command with the same budget has the same end however often it was interrupted. Not counted are trials that
another sweep paid for, and the seconds of a trial that a kill cut off: nothing of it is left that could say how long
it took.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from pipeline.errors import UserError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MARGIN = 1.1  # how much longer than the longest so far the next trial may take


def parse_duration(text: str) -> float:
    """Seconds of ``90m``, ``2h``, ``1h30m``; UserError for anything else."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smhd])", text.lower())
    if not parts or re.sub(r"(\d+(?:\.\d+)?)\s*([smhd])", "", text.lower()).strip():
        raise UserError(f"found the duration {text!r}, expected one like 90m, 2h or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise UserError(f"found the duration {text!r}, expected more than nothing")
    return seconds


def duration(seconds: float) -> str:
    """A duration for readers: 45 s, 12 min, 1 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class Budget:
    """``seconds`` is None where there is no limit."""

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()
        self._earlier = 0.0
        self._longest = 0.0

    def begin(self) -> None:
        """Count from now: what came before, such as waiting for another sweep, was not measuring."""
        self._began = self._clock()

    def earlier(self, seconds: float) -> None:
        """Count what an earlier run of the sweep spent on a trial that is taken from the store."""
        self._earlier += seconds

    def seen(self, seconds: float) -> None:
        """Learn from a trial that ran to its end, whoever paid for it."""
        self._longest = max(self._longest, seconds)

    @property
    def spent(self) -> float:
        """Seconds spent by this sweep, in this run and before."""
        return self._earlier + self._clock() - self._began

    @property
    def left(self) -> float | None:
        """Seconds that are left, below zero where it was overdrawn; None without a limit."""
        return None if self.seconds is None else self.seconds - self.spent

    @property
    def expected(self) -> float:
        """Seconds that the next trial is expected to take; 0 before anything was seen."""
        return _MARGIN * self._longest

    def affords(self, trials: int = 1) -> bool:
        """Whether so many more trials are expected to end in time."""
        return self.left is None or (self.left > 0 and trials * self.expected <= self.left)
