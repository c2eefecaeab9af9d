"""How a recipe left a round, as a line of a log."""

from __future__ import annotations

from typing import Any

import pytest

from quantmint.pipeline.upkeep.fleet.records import Ended

FAILED = {"state": "failed", "exit_code": 5, "attempts": 1, "duration_s": 4000.0, "log": "store/refresh/logs/a.log"}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"state": "ran", "verdict": "PASS", "exit_code": 0, "attempts": 2, "duration_s": 700.0, "tag": "v1"},
            "llama8b: PASS in 11 min 40 s, released v1",
        ),
        (
            {**FAILED, "reason": "no such flag"},
            "llama8b: failed with exit code 5 in 1 h 06 min: no such flag (log: store/refresh/logs/a.log)",
        ),
        (
            {"state": "held", "verdict": "FAIL", "exit_code": 1, "reason": "judged before"},
            "llama8b: held: judged before",
        ),
        ({"state": "left", "exit_code": 0, "attempts": 1, "duration_s": 0.0}, "llama8b: left in 0.0 s"),
    ],
)
def test_lines_for_a_log(fields: dict[str, Any], line: str) -> None:
    assert str(Ended(recipe="llama8b", **fields)) == line
