"""When a schedule's times come, also in the nights in which clocks change."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from pipeline.schedule.cron import changes, constant_offset, doubled, next_times, skipped, words

BERLIN = "Europe/Berlin"
SPRING, AUTUMN = datetime(2027, 3, 28, 1, tzinfo=UTC), datetime(2027, 10, 31, 1, tzinfo=UTC)
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def in_utc(expression: str, after: datetime, n: int, zone: str = BERLIN) -> list[str]:
    return [time.astimezone(UTC).strftime("%d %H:%M") for time in next_times(expression, zone, after, n)]


def test_times_have_the_zones_offset() -> None:
    first, second = next_times("30 3 * * 6", BERLIN, SPRING - timedelta(days=2), 2)
    assert (first.isoformat(), second.isoformat()) == ("2027-03-27T03:30:00+01:00", "2027-04-03T03:30:00+02:00")


def test_a_time_is_later_than_the_moment() -> None:
    assert in_utc("0 3 * * *", datetime(2027, 1, 1, 3, tzinfo=UTC), 1, "UTC") == ["02 03:00"]
    assert in_utc("0 3 * * *", datetime(2027, 1, 1, 2, 59, 59, tzinfo=UTC), 1, "UTC") == ["01 03:00"]


def test_either_day_is_enough_where_both_are_given() -> None:
    assert in_utc("0 3 2 * 6", datetime(2026, 11, 28, 12, tzinfo=UTC), 3, "UTC") == ["02 03:00", "05 03:00", "12 03:00"]


def test_a_skipped_time_comes_when_the_gap_is_over() -> None:
    assert in_utc("30 2 * * *", SPRING - timedelta(hours=12), 2) == ["28 01:00", "29 00:30"]
    # ... once, also where two times are skipped, or one stands at the end of the gap.
    assert in_utc("0,30 2 * * *", SPRING - timedelta(hours=12), 2) == ["28 01:00", "29 00:00"]
    assert in_utc("0 2,3 * * *", SPRING - timedelta(hours=12), 2) == ["28 01:00", "29 00:00"]


def test_a_doubled_time_is_the_first_of_the_two() -> None:
    for minutes in range(0, 200, 20):
        after = AUTUMN - timedelta(hours=2) + timedelta(minutes=minutes)
        first = ["31 00:30"] if after < AUTUMN - timedelta(minutes=30) else []
        assert in_utc("30 2 * * *", after, 2) == [*first, "01 01:30", "02 01:30"][:2], after


def test_every_hour_is_every_hour() -> None:
    for change in (SPRING, AUTUMN):
        for minutes in range(-120, 120, 20):
            after = change + timedelta(minutes=minutes)
            first, second = next_times("30 * * * *", BERLIN, after, 2)
            assert second.astimezone(UTC) - first.astimezone(UTC) == timedelta(hours=1)
            assert timedelta(0) < first.astimezone(UTC) - after <= timedelta(hours=1)


def test_what_a_clock_change_meets() -> None:
    assert skipped("30 2 * * *", BERLIN, NOW) == SPRING
    assert doubled("30 2 * * *", BERLIN, NOW) == AUTUMN
    assert doubled("0 * * * *", BERLIN, NOW) == AUTUMN
    for expression in ("0 3 * * *", "59 1 * * *", "30 2 * * 6", "30 2 1-24 * *"):
        assert skipped(expression, BERLIN, NOW) is None
        assert doubled(expression, BERLIN, NOW) is None
    # Half an hour, at two in the morning, on the other half of the earth.
    assert skipped("15 2 * * 0", "Australia/Lord_Howe", NOW) == datetime(2027, 10, 2, 15, 30, tzinfo=UTC)
    assert skipped("45 2 * * 0", "Australia/Lord_Howe", NOW) is None


def test_how_far_a_zone_is_from_utc() -> None:
    assert constant_offset("Asia/Kolkata", NOW) == timedelta(hours=5, minutes=30)
    assert constant_offset("Etc/GMT+5", NOW) == timedelta(hours=-5)
    assert constant_offset(BERLIN, NOW) is None
    assert [moment for moment, _ in changes(BERLIN, NOW)][:2] == [SPRING, AUTUMN]


@pytest.mark.parametrize(
    ("expression", "said"),
    [("0 3 * * 6", "At 03:00 on Saturday, UTC"), ("0 0 LW * *", "At 00:00 on the last weekday of every month, UTC")],
)
def test_words(expression: str, said: str) -> None:
    assert words(expression, "UTC") == said


def test_a_day_that_never_comes() -> None:
    assert next_times("0 0 31 2 1-5", "UTC", NOW, 1), "a weekday is enough"
    assert next_times("0 0 30 2 1,2", BERLIN, NOW, 1), "a weekday is enough"


def test_the_list(written: Callable[..., object], schedule: Callable[..., object]) -> None:
    written("0 3 * * 6", BERLIN)
    written("0 4 * * *", name="other", missed="skip")
    told = schedule("list", "--json").json  # type: ignore[attr-defined]
    assert [(row["recipe"], row["words"], row["missed"]) for row in told] == [
        ("mine", "At 03:00 on Saturday, Europe/Berlin", "run"),
        ("other", "At 04:00 every day, UTC", "skip"),
    ]
    for row in told:
        assert len(row["next"]) == 3
        for time in row["next"]:
            assert datetime.fromisoformat(time["local"]) == datetime.fromisoformat(time["utc"])
    text = schedule("list", "mine").out  # type: ignore[attr-defined]
    assert "At 03:00 on Saturday" in text
    assert "other" not in text
