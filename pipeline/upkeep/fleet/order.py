"""Which recipe goes next: a pure function of what waits, what is free and what is left.

By priority, then by name. One that has waited for an hour counts a point more, for each hour: recipes of a low priority
have their turn where others come without end. One that needs more devices than are free keeps what is free for itself:
smaller ones that come after it would otherwise take them again and again. What needs no device passes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_AGING_S = 3600.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A recipe in the queue; times are seconds of one monotonic clock.

    ``devices`` is how many it takes, ``since`` when it was queued, ``ready`` the soonest that it may begin, and
    ``expected_s`` how long it took the last time, 0 where nobody knows.
    """

    name: str
    priority: int = 0
    devices: int = 0
    since: float = 0.0
    ready: float = 0.0
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """What there is for another recipe: ``slots`` of it, ``free`` devices by number, what is left (None: no limit)."""

    now: float
    slots: int
    free: tuple[int, ...] = ()
    left_s: float | None = None
    left_bytes: int | None = None


def ordered(waiting: Iterable[Waiting], now: float) -> list[Waiting]:
    """The queue, the next one first."""

    def place(one: Waiting) -> tuple[float, str]:
        return -(one.priority + max(0.0, now - one.since) // _AGING_S), one.name

    return sorted(waiting, key=place)


def next_begin(waiting: Iterable[Waiting], room: Room) -> tuple[str, tuple[int, ...]] | None:
    """The name of the recipe that begins now, and the numbers of its devices; None where none may."""
    if room.slots < 1:
        return None
    free = sorted(room.free)
    for one in ordered(waiting, room.now):
        if one.ready > room.now or unaffordable(one, room) is not None:
            continue
        if one.devices <= len(free):
            return one.name, tuple(free[: one.devices])
        free = []  # kept for this one
    return None


def unaffordable(one: Waiting, room: Room) -> str | None:
    """Why a recipe is not begun any more in this round, now or later; None where it may be."""
    if room.left_bytes is not None and room.left_bytes <= 0:
        return "the round's disk is used up"
    if room.left_s is None:
        return None
    left = room.left_s - max(0.0, one.ready - room.now)
    if left <= 0:
        return "the round's time is used up"
    if one.expected_s > left:
        return f"it took {_hours(one.expected_s)} the last time, and {_hours(left)} are left"
    return None


def _hours(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"
