"""Cron expressions of five fields, with the meaning that Debian's cron gives them, also where clocks change.

    >>> from datetime import datetime, UTC
    >>> [time.isoformat() for time in next_times("30 3 * * 6", "Europe/Berlin", datetime(2027, 3, 25, tzinfo=UTC), 2)]
    ['2027-03-27T03:30:00+01:00', '2027-04-03T03:30:00+02:00']

The meaning is cronsim's: day of month and day of week are both fulfilled where either begins with a star, and one of
them is enough where neither does. An expression that names its hours and minutes runs once for each, whatever the
clocks do: a time that is skipped comes at the end of the gap, and one that occurs twice is the first. One whose minutes
or hours begin with a star follows the clock: what is skipped is skipped, and what occurs twice runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

if TYPE_CHECKING:
    from cronsim import CronSim

LATE_S: Final = 300
"""Seconds after which a time counts as missed; a cluster's controller looks every ten."""
_HORIZON = timedelta(days=5 * 366)
"""How far the changes of a zone's clock are looked at: rules of summer time do not reach further than their laws."""
_STEP = timedelta(hours=6)
_LONGEST_JUMP = timedelta(hours=3)
"""No zone's summer time is further from its winter time; Antarctica/Troll's is two hours."""


def fault_of(expression: str) -> str | None:
    """What is wrong with an expression, in a few words; None where nothing is."""
    from cronsim import CronSimError

    if len(expression.split()) != 5:
        return f"{len(expression.split())} fields"
    try:
        parsed(expression)
    except CronSimError as error:
        return str(error)
    return None


def parsed(expression: str) -> CronSim:
    """The expression taken apart: cronsim's sets of minutes, hours, days, months and weekdays."""
    from cronsim import CronSim

    return CronSim(expression, datetime(2026, 1, 1, tzinfo=UTC))


def next_times(expression: str, zone: str, after: datetime, n: int) -> tuple[datetime, ...]:
    """The `n` next times after a moment (of any zone), in the time zone `zone`; fewer where there are no more.

    A time is later than `after`, never equal. Where clocks go back, the offset tells the two apart.
    """
    return tuple(islice(times(expression, zone, after), n))


def times(expression: str, zone: str, after: datetime) -> Iterator[datetime]:
    """All times after a moment, in order; endless but for expressions whose day comes no more within 50 years."""
    from cronsim import CronSim

    # cronsim reads the second of two equal times as the first: it begins earlier, and what is not later is left out.
    last = after.astimezone(UTC)
    for time in CronSim(expression, (last - _LONGEST_JUMP).astimezone(ZoneInfo(zone))):
        moment = time.astimezone(UTC)
        if moment > last:
            last = moment
            yield time


def words(expression: str, zone: str) -> str:
    """The expression for people: ``At 03:00 on Saturday, Europe/Berlin``."""
    return f"{parsed(expression).explain()}, {zone}"


def follows_clock(expression: str) -> bool:
    """Whether minutes or hours begin with a star: such times are those of the clock on the wall, skipped or doubled."""
    minute, hour = expression.split()[:2]
    return minute.startswith("*") or hour.startswith("*")


@cache
def changes(zone: str, after: datetime) -> tuple[tuple[datetime, timedelta], ...]:
    """The changes of a zone's clock in the next five years: the moment in UTC, and by how much the clock then jumps."""
    here, found = ZoneInfo(zone), []
    moment, end = after.astimezone(UTC), after.astimezone(UTC) + _HORIZON
    while moment < end:
        jump = _offset(moment + _STEP, here) - _offset(moment, here)
        if jump:
            found.append((_change(moment, moment + _STEP, here), jump))
        moment += _STEP
    return tuple(found)


def skipped(expression: str, zone: str, after: datetime) -> datetime | None:
    """The first change within five years whose gap holds a time of the expression, as the moment of the change."""
    return next((moment for moment, jump in changes(zone, after) if _within(expression, zone, moment, jump)), None)


def doubled(expression: str, zone: str, after: datetime) -> datetime | None:
    """The first change within five years that makes a time of the expression occur twice, as its moment."""
    return next((moment for moment, jump in changes(zone, after) if _within(expression, zone, moment, -jump)), None)


def constant_offset(zone: str, after: datetime) -> timedelta | None:
    """The zone's distance from UTC, None where it changes within the next five years."""
    return None if changes(zone, after) else _offset(after, ZoneInfo(zone))


def _offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None  # noqa: S101 - a ZoneInfo always has one
    return offset


def _change(early: datetime, late: datetime, zone: ZoneInfo) -> datetime:
    """The first second of the new offset between two moments of which the earlier has another."""
    old = _offset(early, zone)
    while late - early > timedelta(seconds=1):
        middle = (early + (late - early) / 2).replace(microsecond=0)
        early, late = (middle, late) if _offset(middle, zone) == old else (early, middle)
    return late


def _within(expression: str, zone: str, moment: datetime, span: timedelta) -> bool:
    """Whether the clock on the wall, where nobody moves it, shows a time of the expression in `span` from a change on.

    ``span`` is positive for the kind of change that is asked about: a gap begins at what the old clock shows, and what
    occurs twice at what the new clock shows.
    """
    from cronsim import CronSim

    if span <= timedelta(0):
        return False
    before, since = _offset(moment - timedelta(seconds=1), ZoneInfo(zone)), _offset(moment, ZoneInfo(zone))
    begin = (moment + min(before, since)).replace(tzinfo=None)
    time = next(CronSim(expression, begin - timedelta(seconds=1)), None)
    return time is not None and time < begin + span
