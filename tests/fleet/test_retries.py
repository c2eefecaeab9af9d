from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.attempt import Attempted
from pipeline.fleet.retries import again_in_s, rest_s, resting_until, rests_until, wait_s
from pipeline.refresh.state import RecipeState, moment

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
AWAY = {"error": "no answer", "exit_code": 5, "transient": True}


def ended(code: int = 5, answer: dict[str, Any] | None = None, *, cut_short: bool = False) -> Attempted:
    return Attempted(code, answer or {}, 1.0, Path("a.log"), cut_short)


@given(st.integers(1, 60), st.floats(0.01, 600))
def test_waits_double_up_to_an_hour(failed: int, first: float) -> None:
    assert min(first * 2 ** (failed - 1), 3600.0) <= wait_s(failed, first) <= 3600.0 + first / 10
    assert wait_s(failed, first) <= wait_s(failed + 1, first) + first / 10


def test_rests_double_up_to_a_day() -> None:
    assert [rest_s(rounds) for rounds in (1, 2, 3)] == [900, 1800, 3600]
    assert rest_s(50) == 86400


@pytest.mark.parametrize(
    ("attempted", "failed", "killed", "again"),
    [
        (ended(5, AWAY), 1, 0, True),
        (ended(5, AWAY), 3, 0, True),
        (ended(5, AWAY), 4, 0, False),
        (ended(2, {**AWAY, "exit_code": 2}), 1, 0, True),
        (ended(5, {**AWAY, "transient": False}), 0, 0, False),
        (ended(5), 0, 0, False),
        (ended(137), 0, 1, True),
        (ended(-9), 0, 1, True),
        (ended(137), 0, 2, False),
        (ended(143, cut_short=True), 0, 0, False),
        (ended(1, {"verdict": "FAIL"}), 0, 0, False),
    ],
)
def test_only_what_passes_is_tried_again(attempted: Attempted, failed: int, killed: int, again: bool) -> None:
    assert (again_in_s(attempted, failed=failed, killed=killed, retries=3, first=1.0) is not None) == again


def test_without_retries_nothing_is_tried_again() -> None:
    assert again_in_s(ended(5, AWAY), failed=1, killed=0, retries=0, first=1.0) is None
    assert again_in_s(ended(137), failed=0, killed=1, retries=0, first=1.0) is None


def rests(**facts: Any) -> datetime | None:
    plain = {"last_attempt": "2026-11-21T02:50:00Z", "not_before": "2026-11-21T03:05:00Z", "inputs": "1"}
    return resting_until(RecipeState(name="a", **{**plain, **facts}), "1", NOW)


def test_a_failure_is_rested_from_unless_its_inputs_are_others() -> None:
    assert rests() == NOW + timedelta(minutes=5)
    assert rests(not_before="2026-11-21T02:59:59Z") is None
    assert rests(not_before=None) is None
    assert rests(inputs="2") is None, "the recipe was repaired"


def test_a_clock_that_was_set_back_does_not_prolong_a_rest() -> None:
    assert rests(last_attempt="2027-01-01T00:00:00Z", not_before="2027-01-01T00:15:00Z") is None
    assert rests(not_before="2026-12-21T00:00:00Z") is None
    assert rests(not_before="yesterday") is None


@given(st.integers(1, 40))
def test_a_rest_that_was_just_written_holds(rounds: int) -> None:
    written = rests_until(rounds, NOW)
    assert moment(written) == NOW + timedelta(seconds=rest_s(rounds))
    assert rests(not_before=written) == moment(written)
