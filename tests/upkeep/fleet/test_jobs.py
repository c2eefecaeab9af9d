"""When a recipe is tried again in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.upkeep.due.due import Due
from quantmint.pipeline.upkeep.fleet.attempt import Attempted
from quantmint.pipeline.upkeep.fleet.jobs import FleetJob, pause_s
from quantmint.pipeline.upkeep.fleet.records import RecipeState

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
    job = FleetJob(Due("a", "a", "due", ""), RecipeState(name="a"), failed=failed)
    assert pause_s(job, attempted, first=60.0) == wait
