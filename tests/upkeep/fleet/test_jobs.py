"""When a recipe is tried again, in a round and in the next ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.upkeep.due.state import RecipeState, moment
from pipeline.upkeep.fleet.attempt import Attempted
from pipeline.upkeep.fleet.jobs import again_in_s, resting_until, rests_until

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
AWAY = {"error": "no answer", "exit_code": 5, "transient": True}


def ended(code: int = 5, answer: dict[str, Any] | None = None, *, cut_short: bool = False) -> Attempted:
    return Attempted(code, answer or {}, 1.0, Path("a.log"), cut_short)


def rests(**facts: Any) -> datetime | None:
    plain = {"last_attempt": "2026-11-21T02:50:00Z", "not_before": "2026-11-21T03:05:00Z", "inputs": "1"}
    return resting_until(RecipeState(name="a", **{**plain, **facts}), "1", NOW)


def test_a_failure_is_rested_from_unless_its_inputs_are_others() -> None:
    assert rests() == NOW + timedelta(minutes=5)
    assert rests(not_before="2026-11-21T02:59:59Z") is None
    assert rests(not_before=None) is None
    assert rests(inputs="2") is None, "the recipe was repaired"


@pytest.mark.parametrize(
    ("attempted", "failed", "wait"),
    [
        (ended(5, AWAY), 1, 60),
        (ended(5, AWAY), 3, 240),
        (ended(5, AWAY), 4, None),
        (ended(2, {**AWAY, "exit_code": 2}), 1, 60),
        (ended(5, {**AWAY, "transient": False}), 0, None),
        (ended(137), 0, None),
        (ended(143, AWAY, cut_short=True), 0, None),
        (ended(1, {"verdict": "FAIL"}), 0, None),
    ],
)
def test_only_what_passes_is_tried_again(attempted: Attempted, failed: int, wait: int | None) -> None:
    found = again_in_s(attempted, failed=failed, retries=3, first=60.0)
    assert found is None if wait is None else found is not None and wait <= found <= wait + 6


def test_waits_double_up_to_an_hour_and_rests_up_to_a_day() -> None:
    assert 3600 <= (again_in_s(ended(5, AWAY), failed=50, retries=99, first=60.0) or 0) <= 3606
    written = [moment(rests_until(rounds, NOW)) for rounds in (1, 2, 3, 50)]
    assert written == [NOW + timedelta(seconds=rest) for rest in (900, 1800, 3600, 86400)]
    assert rests(not_before="2026-11-22T03:00:00Z") == NOW + timedelta(days=1)
