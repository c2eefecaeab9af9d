"""When a recipe is tried again in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.upkeep.fleet.attempt import Attempted
from quantmint.pipeline.upkeep.fleet.jobs import again_in_s

AWAY = {"error": "no answer", "exit_code": 5, "transient": True}


def ended(code: int = 5, answer: dict[str, Any] | None = None, *, cut_short: bool = False) -> Attempted:
    return Attempted(code, answer or {}, 1.0, Path("a.log"), cut_short)


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


def test_waits_double_up_to_an_hour() -> None:
    assert 3600 <= (again_in_s(ended(5, AWAY), failed=50, retries=99, first=60.0) or 0) <= 3606
