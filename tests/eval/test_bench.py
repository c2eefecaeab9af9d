"""Cells, machines and launches: written and read back; the order of a series."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from eval.bench import CellResult, Launch, Machine, order
from eval.errors import MeasurementError

LATENCIES = {f"{name}_p{percent}": 1.5 for name in ("ttft", "tpot", "itl", "e2el") for percent in (50, 99)}
RESULT = CellResult.from_json(
    {
        "cell": "c4", "completed": 32, "failed": 0, "duration": 46.2, "output_throughput": 22.0,
        "total_throughput": 67.0, **LATENCIES, "gpus": 4, "goodput": 0.5, "peak_concurrency": 6,
    }
)  # fmt: skip
LAUNCH = Launch(
    side="candidate",
    number=1,
    cells={"c4": RESULT},
    kv_tokens=12345,
    kv_cache_dtype="fp8_e4m3",
    started_seconds=41.5,
    client_cpu=0.31,
    machine=Machine(1980.0, 1755.0, 71.0, 690.5, ("power brake",), 40),
    started="2026-01-01T00:00:00+00:00",
    attention_backend="FLASH_ATTN",
    faults=("the KV cache is not FP8: auto",),
)


def written(launch: Launch, **changes: Any) -> Any:
    return {**json.loads(json.dumps(launch.to_json(), allow_nan=False)), **changes}


def test_a_launch_is_read_as_it_was_written() -> None:
    assert Launch.from_json(written(LAUNCH)) == LAUNCH
    bare = replace(LAUNCH, machine=Machine(), client_cpu=None, faults=(), kv_tokens=None)
    assert Launch.from_json(written(bare)) == bare


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"side": "both"}, "side: .*'baseline' or 'candidate', found 'both'"),
        ({"speed": 1}, "not a Launch: speed"),
        ({"cells": {"c4": {"cell": "c4"}}}, "cells.c4.completed"),
        ({"cells": [1]}, "not a Launch: cells"),
        ({"machine": {"clock": 1}}, "machine.clock"),
        ({"machine": None}, "not a Launch: machine"),
    ],
)
def test_anything_else_is_no_launch(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MeasurementError, match=words):
        Launch.from_json(written(LAUNCH, **changes))


def test_sides_take_turns() -> None:
    letters = "".join("A" if side == "baseline" else "B" for side in order(8))
    assert letters == "ABBABAABBAABABBA"
    for launches in range(1, 21):
        assert Counter(order(launches)) == {"baseline": launches, "candidate": launches}


@pytest.mark.parametrize(("launches", "degree"), [(2, 1), (4, 2), (8, 3)])
def test_a_drift_meets_both_sides_alike(launches: int, degree: int) -> None:
    """Whatever polynomial of that degree the machine drifts by, both sides have the same sum of it."""
    for power in range(degree + 1):
        sums = {"baseline": 0, "candidate": 0}
        for number, side in enumerate(order(launches)):
            sums[side] += number**power
        assert sums["baseline"] == sums["candidate"]
