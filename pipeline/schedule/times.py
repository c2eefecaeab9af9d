"""The instants that a cron expression names in a time zone, each once, also where clocks change.

>>> from datetime import UTC, datetime
>>> next_after("0 3 * * 6", "Europe/Berlin", datetime(2026, 3, 28, 12, tzinfo=UTC)).isoformat()
'2026-04-04T01:00:00+00:00'

cronsim gives the local times, with Debian's meaning: a fixed time that a change of the clock leaves out comes at the
change, one that the clock shows twice comes the first time, and expressions that start with a star in minute or hour
follow the clock. What is added here: cronsim goes on from a local time without knowing which of two it is, so that from
within a repeated hour it leads back to an instant that has passed.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

_WINDOWS = tuple(timedelta(days=days) for days in (1 / 24, 1, 8, 32, 370))


def next_after(expression: str, zone: str, after: datetime) -> datetime | None:
    """The first instant strictly after another (both aware; the answer in UTC); None where there is none in 50 years.

    Raises `cronsim.CronSimError` for what is no expression.
    """
    from cronsim import CronSim

    for local in CronSim(expression, after.astimezone(ZoneInfo(zone))):
        instant = local.astimezone(UTC)
        if instant > after:
            return instant
    return None


def newest_between(expression: str, zone: str, after: datetime, until: datetime) -> datetime | None:
    """The last instant with ``after < instant <= until``; None where there is none.

    A scheduler that was away for years is not to count every minute of them, so short spans before ``until`` are looked
    at first.
    """
    for start in (*(until - window for window in _WINDOWS), after):
        newest = None
        instant = next_after(expression, zone, max(start, after))
        while instant is not None and instant <= until:
            newest, instant = instant, next_after(expression, zone, instant)
        if newest is not None or start <= after:
            return newest
    return None
