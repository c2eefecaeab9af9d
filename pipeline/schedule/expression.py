"""A cron expression taken apart, for schedulers that write times in another way, or know less than we do.

    >>> classic("0 3 * * sat")
    '0 3 * * 6'
    >>> shifted("30 1 * * 1", timedelta(hours=-5, minutes=-30))
    ('0 20 * * 0',)

cronsim also takes the last day of a month (L), its last working day (LW), the last Friday (5L) and the second Monday
(1#2), which no cron knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

from cronsim import CronSim

from pipeline.schedule.cron import parsed

WEEK = frozenset(range(7))
"""0 is Sunday."""
DAYS = frozenset(range(1, 32))
_WORKING, _FRIDAY = frozenset(range(1, 6)), frozenset({5})
_DAY = 24 * 60
# minute, hour, day of month, month, day of week
_BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))


class InexpressibleError(Exception):
    """A scheduler has no way to say it; the text says what."""


@dataclass(frozen=True, slots=True)
class DayRule:
    """Days that are one of `weekdays` and, at once, one of `days`, counted from the month's end with `from_end`."""

    weekdays: frozenset[int]
    days: frozenset[int]
    from_end: bool = False


def day_rules(expression: str) -> tuple[DayRule, ...]:
    """The days of an expression: those of any of the rules. InexpressibleError for what no such rule says."""
    sim = parsed(expression)
    of_month, of_week = tuple(_of_month(sim.days)), tuple(_of_week(sim.weekdays))
    if not sim.day_and:
        return tuple(dict.fromkeys((*of_month, *of_week)))
    both = (_both(first, second) for first in of_month for second in of_week)
    return tuple(dict.fromkeys(rule for rule in both if rule.weekdays and rule.days))


def _of_month(days: Collection[int]) -> Iterator[DayRule]:
    plain = frozenset(day for day in days if day > 0)
    if plain:
        yield DayRule(WEEK, plain)
    if CronSim.LAST in days:
        yield DayRule(WEEK, frozenset({1}), from_end=True)
    if CronSim.LAST_WEEKDAY in days:
        yield DayRule(_WORKING, frozenset({1}), from_end=True)
        # A month that ends on a weekend: its Friday is the last but one or two.
        yield DayRule(_FRIDAY, frozenset({2, 3}), from_end=True)


def _of_week(weekdays: Collection[int | tuple[int, int]]) -> Iterator[DayRule]:
    plain = frozenset(day % 7 for day in weekdays if isinstance(day, int))
    if plain:
        yield DayRule(plain, DAYS)
    for day, which in sorted(item for item in weekdays if isinstance(item, tuple)):
        if which == CronSim.LAST:
            yield DayRule(frozenset({day % 7}), frozenset(range(1, 8)), from_end=True)
        else:
            yield DayRule(frozenset({day % 7}), frozenset(range(7 * which - 6, 7 * which + 1)) & DAYS)


def _both(first: DayRule, second: DayRule) -> DayRule:
    weekdays = first.weekdays & second.weekdays
    for one, other in ((first, second), (second, first)):
        if one.days == DAYS and not one.from_end:
            return DayRule(weekdays, other.days, other.from_end)
    if first.from_end != second.from_end:
        raise InexpressibleError("days counted from the month's start and from its end at once")
    return DayRule(weekdays, first.days & second.days, first.from_end)


def classic(expression: str) -> str:
    """The same in what every cron reads: numbers, ``*``, ``*/n``, ``a-b``, ``a-b/n`` and lists; Sunday is 0.

    Stars stay stars, because they say more than all numbers do. InexpressibleError for L, LW and ``#``.
    """
    sim = parsed(expression)
    sets: tuple[Collection[object], ...] = (sim.minutes, sim.hours, sim.days, sim.months, sim.weekdays)
    fields = zip(expression.upper().split(), sets, _BOUNDS, strict=True)
    return " ".join(_classic(text, values, *bounds) for text, values, bounds in fields)


def _classic(text: str, values: Collection[object], lowest: int, highest: int) -> str:
    if any(not isinstance(value, int) or value < 0 for value in values):
        raise InexpressibleError(f"{text} (which is not cron's own)")
    if text.startswith("*") and "L" not in text:
        return text
    numbers = {value % 7 if highest == 6 else value for value in values if isinstance(value, int)}
    return as_list(numbers, highest)


def as_list(numbers: Collection[int], highest: int, *, width: int = 1, to: str = "-", every: str = "-{highest}") -> str:
    """Numbers as steps, runs and single ones. ``every`` stands between the start and the step of one that goes on."""
    given = sorted(numbers)
    steps = {later - former for former, later in pairwise(given)}
    if len(given) > 2 and steps != {1} and len(steps) == 1 and given[-1] + min(steps) > highest:
        return f"{given[0]:0{width}}{every.format(highest=highest)}/{min(steps)}"
    runs: list[list[int]] = []
    for number in given:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = (
        [f"{run[0]:0{width}}{to}{run[-1]:0{width}}"] if len(run) > 2 else [f"{number:0{width}}" for number in run]
        for run in runs
    )
    return ",".join(part for some in parts for part in some)


def shifted(expression: str, by: timedelta) -> tuple[str, ...]:
    """Expressions that together give the same times on a clock that shows `by` more; whole minutes, less than a day.

    InexpressibleError where a time moves to another day and the day of the month or the month is given: which day
    is before the first depends on the month.
    """
    same, minutes = classic(expression), round(by.total_seconds() / 60)
    if not minutes:
        return (same,)
    sim = parsed(expression)
    _, _, *days = same.split()
    found: dict[str, dict[int, set[int]]] = {}
    for time in sorted(hour * 60 + minute for hour in sim.hours for minute in sim.minutes):
        carry, moved = divmod(time + minutes, _DAY)
        hours = found.setdefault(" ".join(_moved(sim, days, carry)), {})
        hours.setdefault(moved // 60, set()).add(moved % 60)
    return tuple(line for day, hours in found.items() for line in _lines(hours, day))


def _moved(sim: CronSim, days: list[str], carry: int) -> list[str]:
    """Day of month, month and day of week, `carry` days later."""
    if not carry:
        return days
    if sim.days != DAYS or sim.months != frozenset(range(1, 13)) or not sim.day_and:
        raise InexpressibleError("a day of the month or a month, at a time that is another day there")
    weekdays = {(day + carry) % 7 for day in sim.weekdays if isinstance(day, int)}
    return [*days[:2], days[2] if weekdays == WEEK else as_list(weekdays, 6)]


def _lines(hours: dict[int, set[int]], days: str) -> Iterator[str]:
    alike: dict[frozenset[int], set[int]] = {}
    for hour, minutes in hours.items():
        alike.setdefault(frozenset(minutes), set()).add(hour)
    for past, together in sorted(alike.items(), key=lambda item: min(item[1])):
        every = "*" if len(together) == 24 else as_list(together, 23)
        yield f"{'*' if len(past) == 60 else as_list(past, 59)} {every} {days}"
