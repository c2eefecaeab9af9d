"""Expressions in what every cron reads, and on another clock."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from heapq import merge
from itertools import groupby, islice

import pytest

from pipeline.schedule.cron import times
from pipeline.schedule.expression import InexpressibleError, as_list, classic, shifted
from tests.schedule.expressions import CRONSIM_ONLY, expressions

_BEGIN = datetime(2027, 1, 30, 12, 34, tzinfo=UTC)
_COUNT = 12


def of(*lines: str, after: datetime = _BEGIN) -> list[datetime]:
    together = merge(*(times(line, "UTC", after) for line in lines))
    return [moment for moment, _ in islice(groupby(together), _COUNT)]


@pytest.mark.parametrize("expression", expressions(60, own=False))
def test_a_classic_expression_means_the_same(expression: str) -> None:
    plain = classic(expression)
    assert re.fullmatch(r"([0-9*,/-]+ ){4}[0-6*,/-]+", plain)
    assert not re.search(r"(?<![-\d])\d+/", plain), "a step begins at a range or a star"
    assert of(plain) == of(expression)
    stars = [field.startswith("*") for field in expression.split()]
    assert [field.startswith("*") for field in plain.split()] == stars, "stars say more than their numbers"


@pytest.mark.parametrize("expression", CRONSIM_ONLY)
def test_what_no_cron_knows(expression: str) -> None:
    with pytest.raises(InexpressibleError, match="not cron's own"):
        classic(expression)


@pytest.mark.parametrize("minutes", [-330, -60, 60, 345, 840])
def test_shifted_times_are_the_same_moments(minutes: int) -> None:
    by, said = timedelta(minutes=minutes), 0
    for expression in expressions(60, seed=minutes, own=False):
        try:
            lines = shifted(expression, by)
        except InexpressibleError:
            continue
        said += 1
        assert of(*lines) == [time + by for time in of(expression, after=_BEGIN - by)], (expression, lines)
    assert said > 20


def test_a_day_of_the_month_stays_on_its_day() -> None:
    assert shifted("0 12 1 * *", timedelta(hours=-1)) == ("0 11 1 * *",)
    assert shifted("0 3 * * sat", timedelta(hours=-5, minutes=-30)) == ("30 21 * * 5",)
    for expression in ("0 0 1 * *", "0 0 * 2 *", "0 0 1 * 1"):
        with pytest.raises(InexpressibleError, match="another day"):
            shifted(expression, timedelta(hours=-1))


def test_lists_are_short() -> None:
    assert as_list(range(0, 60, 15), 59) == "0-59/15"
    assert as_list({1, 2, 3, 7, 9, 10}, 23) == "1-3,7,9,10"
    assert as_list({1, 3, 5}, 23) == "1,3,5", "steps go on to the end"
