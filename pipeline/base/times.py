"""Times that people type: durations, and cron expressions with the meaning that Debian's cron gives them.


    >>> from datetime import datetime, UTC
    >>> [time.isoformat() for time in next_times("30 3 * * 6", "Europe/Berlin", datetime(2027, 3, 25, tzinfo=UTC), 2)]
    ['2027-03-27T03:30:00+01:00', '2027-04-03T03:30:00+02:00']

The meaning is cronsim's: day of month and day of week are both fulfilled where either begins with a star, and one of
them is enough where neither does. An expression that names its hours and minutes runs once for each, whatever the
clocks do: a time that is skipped comes at the end of the gap, and one that occurs twice is the first. One whose minutes
or hours begin with a star follows the clock: what is skipped is skipped, and what occurs twice runs twice.

What cronsim takes beyond that (the last day of a month, the second Monday: L, LW, 1#2) no other scheduler knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

from quantmint.pipeline.base.errors import UserError

if TYPE_CHECKING:
    from cronsim import CronSim

_LONGEST_JUMP: Final = timedelta(hours=3)
"""No zone's summer time is further from its winter time; Antarctica/Troll's is two hours."""
_PART: Final = r"(\d+(?:\.\d+)?)\s*([smhd])"
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as ``90m``, ``2h`` or ``1h30m``. Raises `UserError` for any other text."""
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text.lower()))
    if seconds <= 0 or re.sub(_PART, "", text.lower()).strip():
        raise UserError(f"found the duration {text!r}, expected one like 90m, 2h or 1h30m")
    return seconds


def fault_of(expression: str) -> str | None:
    """Return why a cron expression is invalid, in a few words; None for a valid one."""
    from cronsim import CronSimError

    if len(expression.split()) != 5:
        return f"{len(expression.split())} fields"
    try:
        sim = parsed(expression)
    except CronSimError as error:
        return str(error)
    classic = all(isinstance(day, int) and day >= 0 for day in (*sim.days, *sim.weekdays))
    return None if classic else "L, LW and # are known to few schedulers"


def parsed(expression: str) -> CronSim:
    """Return the cron expression parsed by cronsim: sets of minutes, hours, days, months and weekdays."""
    from cronsim import CronSim

    return CronSim(expression, datetime(2026, 1, 1, tzinfo=UTC))


def next_times(expression: str, zone: str, after: datetime, n: int) -> tuple[datetime, ...]:
    """Return up to `n` times of a cron expression after a moment, in the time zone `zone`.

    Every time is later than `after`, which may be in any zone. Where clocks go back, the offset tells equal times
    apart.
    """
    from cronsim import CronSim

    times: list[datetime] = []
    # cronsim reads the second of two equal times as the first: it begins earlier, and what is not later is left out.
    last = after.astimezone(UTC)
    for time in CronSim(expression, (last - _LONGEST_JUMP).astimezone(ZoneInfo(zone))):
        if len(times) == n:
            break
        if time.astimezone(UTC) > last:
            last = time.astimezone(UTC)
            times.append(time)
    return tuple(times)


def words(expression: str, zone: str) -> str:
    """Return the expression in English: ``At 03:00 on Saturday, Europe/Berlin``."""
    return f"{parsed(expression).explain()}, {zone}"


def classic(expression: str) -> str:
    """Return the expression in the numbers that every cron reads: ``*``, ``*/n``, ``a-b`` and lists; Sunday is 0.

    Stars are kept, since they say more than all numbers do.
    """
    sim = parsed(expression)
    sets = (sim.minutes, sim.hours, sim.days, sim.months, weekdays(sim))
    fields = zip(expression.split(), sets, strict=True)
    return " ".join(text if text.startswith("*") else ranges(numbers) for text, numbers in fields)


def weekdays(sim: CronSim) -> set[int]:
    """Return the weekdays of a parsed cron expression; 0 is Sunday."""
    return {day % 7 for day in sim.weekdays if isinstance(day, int)}


def ranges(numbers: Collection[int], *, to: str = "-", width: int = 1) -> str:
    """Return numbers as a list of singles and ranges, ``1-3,7``; ``to`` joins a range, ``width`` pads with zeros."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]:0{width}}{to}{run[-1]:0{width}}" if run[1:] else f"{run[0]:0{width}}" for run in runs)
