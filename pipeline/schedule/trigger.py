"""APScheduler's triggers with cron's own meaning.

APScheduler has a cron trigger, which is not used because it answers otherwise than cron does:

- it numbers the days of the week from Monday, so that its ``0 3 * * 0`` is a Monday and cron's a Sunday;
- where day of month and day of week are both given, it wants both, and cron either;
- a fixed time in an hour that the clock shows twice comes twice, and in cron once; one in an hour that is left out
  comes up to an hour after the change, and in cron at the change.

::

    scheduler.add_job(fire, CronTrigger("0 3 * * 6", "Europe/Berlin"), coalesce=True, misfire_grace_time=None)
"""

from __future__ import annotations

from datetime import UTC, datetime

from apscheduler.triggers.base import BaseTrigger

from pipeline.schedule.cron import next_times


class CronTrigger(BaseTrigger):  # type: ignore[misc]  # APScheduler has no types that mypy could follow
    """Fires at the instants of an expression; those that passed unseen are one."""

    __slots__ = ("expression", "zone")

    def __init__(self, expression: str, zone: str) -> None:
        self.expression = expression
        self.zone = zone

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime | None:
        """The first instant after both, in UTC: a clock that was put back does not bring a time again that was done.

        After a long sleep there is one time to catch up with, not one for every instant that was slept through.
        """
        # Two times of one zone are compared by their clocks' faces (PEP 495), which an hour that comes twice defeats.
        after = max(moment.astimezone(UTC) for moment in (previous_fire_time or now, now))
        later = next_times(self.expression, self.zone, after, 1)
        return later[0].astimezone(UTC) if later else None

    def __str__(self) -> str:
        return f"{self.expression} ({self.zone})"
