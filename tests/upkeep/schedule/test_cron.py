"""When a schedule's times come, also in the nights in which clocks change, and how an expression is written plainly."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from quantmint.pipeline.base.times import classic, fault_of, next_times, words

BERLIN = "Europe/Berlin"
SPRING, AUTUMN = datetime(2027, 3, 28, 1, tzinfo=UTC), datetime(2027, 10, 31, 1, tzinfo=UTC)


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


def test_a_skipped_time_comes_when_the_gap_is_over_and_once() -> None:
    assert in_utc("30 2 * * *", SPRING - timedelta(hours=12), 2) == ["28 01:00", "29 00:30"]
    assert in_utc("0,30 2 * * *", SPRING - timedelta(hours=12), 2) == ["28 01:00", "29 00:00"]


@pytest.mark.parametrize(
    ("expression", "plain"),
    [
        ("0 3 * * sat", "0 3 * * 6"),
        ("*/15 9-17 1,15 JAN-MAR mon-fri", "*/15 9-17 1,15 1-3 1-5"),
        ("5/20 0 * * 5-7", "5,25,45 0 * * 0,5-6"),
        ("0 12 */2 * 7", "0 12 */2 * 0"),
    ],
)
def test_a_classic_expression_means_the_same(expression: str, plain: str) -> None:
    assert fault_of(expression) is None
    assert classic(expression) == plain
    after = datetime(2027, 1, 30, 12, 34, tzinfo=UTC)
    assert next_times(plain, "UTC", after, 20) == next_times(expression, "UTC", after, 20)


@pytest.mark.parametrize("expression", ["0 0 L * *", "0 1 LW * *", "0 2 * * 5L", "15 3 * * 1#1,3#2", "0 4 1,L * *"])
def test_what_only_cronsim_knows(expression: str) -> None:
    assert fault_of(expression) == "L, LW and # are known to few schedulers"


def test_words_and_faults() -> None:
    assert words("0 3 * * 6", "UTC") == "At 03:00 on Saturday, UTC"
    assert fault_of("0 3 * *") == "4 fields"
    assert fault_of("61 3 * * *") is not None


def test_the_list(written: Callable[..., object], schedule: Callable[..., Any]) -> None:
    written("0 3 * * 6", BERLIN)
    written("0 4 * * *", name="other")
    told = schedule("list", "--json").json
    assert [(row["recipe"], row["words"]) for row in told] == [
        ("mine", "At 03:00 on Saturday, Europe/Berlin"),
        ("other", "At 04:00 every day, UTC"),
    ]
    for row in told:
        assert len(row["next"]) == 3
        for time in row["next"]:
            assert datetime.fromisoformat(time["local"]) == datetime.fromisoformat(time["utc"])
    text = schedule("list", "mine").out
    assert "At 03:00 on Saturday" in text
    assert "other" not in text
    lines = [line.split("\t") for line in text.splitlines()]
    assert [(len(fields), fields[0], fields[4]) for fields in lines] == [(5, "mine", "0 3 * * 6")] * 3, "one a time"
