"""Which times a resident scheduler waits for, and which it finds to have passed."""

from __future__ import annotations

import os
from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.cron import CronTrigger as LibraryTrigger
from cronsim import CronSim

from pipeline.schedule.fires import Fires, fires_path, newest_between, read_fires, sweep, write_fires
from pipeline.schedule.trigger import CronTrigger

BERLIN = ZoneInfo("Europe/Berlin")
# A day before a change: north and south, half an hour, at midnight, and none at all.
CHANGES = [
    ("Europe/Berlin", "2026-03-28"),
    ("Europe/Berlin", "2026-10-24"),
    ("America/New_York", "2026-10-31"),
    ("Australia/Lord_Howe", "2026-04-04"),
    ("Australia/Lord_Howe", "2026-10-03"),
    ("America/Santiago", "2026-09-05"),
    ("America/Havana", "2026-03-07"),
    ("Africa/Cairo", "2026-10-29"),
    ("Asia/Kolkata", "2026-03-28"),
]
EXPRESSIONS = ["30 2 * * *", "0 0 * * *", "15,45 0-3 * * *", "*/30 2 * * *", "0 * * * *", "*/20 * * * *", "5 1 * * 0,6"]


def cronsims(expression: str, zone: str, begin: datetime, end: datetime) -> list[datetime]:
    """Its own instants in order; ``begin`` is of a day on which no clock changes."""
    found: list[datetime] = []
    for local in CronSim(expression, begin.astimezone(ZoneInfo(zone))):
        moment = local.astimezone(UTC)
        if moment > end:
            break
        if not found or moment > found[-1]:
            found.append(moment)
    return found


@pytest.mark.parametrize(("zone", "day"), CHANGES)
def test_the_trigger_comes_when_cronsim_says_from_wherever_it_starts(zone: str, day: str) -> None:
    begin = datetime.fromisoformat(day).replace(tzinfo=UTC) - timedelta(days=1)
    for expression in EXPRESSIONS:
        trigger = CronTrigger(expression, zone)
        expected = cronsims(expression, zone, begin, begin + timedelta(days=9))
        previous, now = None, begin
        for wanted in islice(expected, 40):
            previous = trigger.get_next_fire_time(previous, now)
            assert previous is not None
            now = previous.astimezone(UTC)
            assert now == wanted
        for quarter in range(4 * 36):  # from every quarter of an hour around the change, also from a repeated one
            start = begin + timedelta(hours=18, minutes=15 * quarter + 7)
            found = trigger.get_next_fire_time(None, start)
            assert found is not None
            assert found.astimezone(UTC) == expected[bisect_right(expected, start)], (expression, start)


def local(trigger: object, begin: str, n: int) -> list[str]:
    previous, now, found = None, datetime.fromisoformat(begin).replace(tzinfo=BERLIN), []
    for _ in range(n):
        previous = now = trigger.get_next_fire_time(previous, now)  # type: ignore[attr-defined]
        found.append(now.astimezone(UTC).astimezone(BERLIN).strftime("%a %m-%d %H:%M %Z"))
    return found


@pytest.mark.parametrize(
    ("expression", "begin", "ours", "theirs"),
    [
        ("0 3 * * 0", "2026-01-01", ["Sun 01-04 03:00 CET"], ["Mon 01-05 03:00 CET"]),
        ("0 3 13 * 5", "2026-01-01", ["Fri 01-02 03:00 CET"], ["Sat 06-13 03:00 CEST"]),
        (
            "30 2 * * *",
            "2026-10-24T12:00",
            ["Sun 10-25 02:30 CEST", "Mon 10-26 02:30 CET"],
            ["Sun 10-25 02:30 CEST", "Sun 10-25 02:30 CET"],
        ),
        ("30 2 * * *", "2026-03-28T12:00", ["Sun 03-29 03:00 CEST"], ["Sun 03-29 03:30 CEST"]),
    ],
)
def test_the_librarys_own_trigger_is_not_used_for_a_reason(
    expression: str, begin: str, ours: list[str], theirs: list[str]
) -> None:
    assert local(CronTrigger(expression, "Europe/Berlin"), begin, len(ours)) == ours
    library = LibraryTrigger.from_crontab(expression, timezone=BERLIN)
    if "13" in expression:  # both the 13th and a Saturday, which is its 5
        assert local(library, begin, 1)[0].split()[1].endswith("-13")
    else:
        assert local(library, begin, len(theirs)) == theirs


def test_what_was_slept_through_is_one_time_and_a_clock_put_back_brings_none_again() -> None:
    trigger, noon = CronTrigger("* * * * *", "UTC"), datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert trigger.get_next_fire_time(noon - timedelta(days=3), noon) == noon + timedelta(minutes=1)
    assert trigger.get_next_fire_time(noon, noon - timedelta(hours=2)) == noon + timedelta(minutes=1)


@pytest.mark.parametrize("expression", ["*/7 * * * *", "30 2 * * *", "0 5 1 * *", "0 0 29 2 *"])
def test_the_newest_that_was_missed_is_the_last_of_all(expression: str) -> None:
    until = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)  # the second 02:10 of that day in Berlin
    everything = cronsims(expression, "Europe/Berlin", until - timedelta(days=100), until)
    for length in (timedelta(minutes=3), timedelta(minutes=90), timedelta(hours=30), timedelta(days=9), timedelta(99)):
        after = until - length
        expected = max((moment for moment in everything if moment > after), default=None)
        assert newest_between(expression, "Europe/Berlin", after, until) == expected


def test_who_was_away_for_years_does_not_count_their_minutes() -> None:
    now = datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)
    assert newest_between("* * * * *", "UTC", datetime(1990, 1, 1, tzinfo=UTC), now) == now.replace(second=0)
    assert newest_between("0 0 29 2 *", "UTC", datetime(1990, 1, 1, tzinfo=UTC), now) == datetime(
        2024, 2, 29, tzinfo=UTC
    )
    assert newest_between("0 0 * * *", "UTC", now, now) is None


def test_what_is_kept_comes_back_and_what_is_damaged_is_nothing(tmp_path: Path) -> None:
    moment = datetime(2026, 3, 29, 3, 0, 5, tzinfo=UTC)
    fires = Fires("a", since=moment - timedelta(days=1), fired=moment)
    assert read_fires(tmp_path, "a") is None
    write_fires(tmp_path, fires)
    assert read_fires(tmp_path, "a") == fires
    assert fires.unsettled
    for damage in ("", "{", "[]", '{"since": 3}', '{"since": null, "fired": null, "settled": null}', "\udce4"):
        fires_path(tmp_path, "a").write_bytes(damage.encode(errors="surrogateescape"))
        assert read_fires(tmp_path, "a") is None


def test_what_a_killed_scheduler_left_half_written_is_swept(tmp_path: Path) -> None:
    write_fires(tmp_path, Fires("a", since=datetime(2026, 1, 1, tzinfo=UTC)))
    old, fresh = (fires_path(tmp_path, "a").with_name(f"a.{name}.tmp") for name in ("host-1", "host-2"))
    for path in (old, fresh):
        path.touch()
    os.utime(old, (0, 0))
    sweep(tmp_path)
    assert {path.name for path in old.parent.iterdir()} == {"a.json", fresh.name}
