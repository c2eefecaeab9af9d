"""How much of a core the load generator uses.

`vllm bench serve` is one asyncio thread: where it uses all of a core, answers wait for it, and what is measured is the
client. Its CPU time is read from /proc, of the processes below the one that was started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WINDOW_S = 5.0
"""Seconds that a share is taken over. Sending the first requests fills some tenths of a second, and holds up nobody."""
_PROC = Path("/proc")
_TICK = os.sysconf("SC_CLK_TCK")
_SEARCH_EVERY = 5


class Used(NamedTuple):
    """CPU seconds used up to a moment of the monotonic clock."""

    at: float
    cpu: float


class Processes:
    """The CPU time of everything below a process, itself left out."""

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._pid, self._proc = pid, proc
        self._known: list[int] = []
        self._looks = 0

    def cpu_seconds(self) -> float | None:
        """Seconds that they, and those of their children that have ended, used; None where none can be seen.

        The tree is searched for now and then only: that reads every process of the machine.
        """
        if not self._known or self._looks % _SEARCH_EVERY == 0:
            self._known = self._below()
        self._looks += 1
        ticks = [found.ticks for pid in self._known if (found := _stat(self._proc, pid)) is not None]
        return sum(ticks) / _TICK if ticks else None

    def _below(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit() and (found := _stat(self._proc, int(entry.name))) is not None:
                children.setdefault(found.parent, []).append(int(entry.name))
        below, pending = list[int](), [self._pid]
        while pending:
            found_here = children.get(pending.pop(), [])
            below += found_here
            pending += found_here
        return below


class _Stat(NamedTuple):
    parent: int
    ticks: int


def _stat(proc: Path, pid: int) -> _Stat | None:
    """The name in brackets may hold blanks and brackets: fields are counted from its last bracket (proc(5))."""
    try:
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return _Stat(int(fields[1]), sum(map(int, fields[11:15])))
    except (OSError, ValueError, IndexError):
        return None


def busiest(used: Sequence[Used], window: float = WINDOW_S) -> float | None:
    """The largest share of one core over any `window` seconds, or over all of it where that is less.

    None for fewer than two looks. CPU time that falls, because a process ended unseen, counts as none.
    """
    if len(used) < 2:
        return None
    shares = []
    for first, start in enumerate(used):
        end = next((look for look in used[first + 1 :] if look.at - start.at >= window), None)
        if end is not None:
            shares.append(_share(start, end))
    return max(shares) if shares else _share(used[0], used[-1])


def _share(start: Used, end: Used) -> float:
    return max(0.0, end.cpu - start.cpu) / (end.at - start.at)
