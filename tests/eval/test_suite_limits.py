"""Shipped suites keep the limits of releases: `quantmint release verify` reads releases of every version."""

from __future__ import annotations

import json
from pathlib import Path

from quantmint.eval import records, suites

PINNED = Path(__file__).parents[1] / "assets/release/suites.json"


def test_a_shipped_suite_keeps_its_limits_and_counts() -> None:
    """Whoever must change one ships a suite of another name beside it, and leaves this one as it is."""
    found = {
        name: {
            task.task: [task.metric, task.filter, task.items, task.gated, task.margin, task.expected_flip_rate]
            for task in suites.load(name).tasks
        }
        for name in records.names(suites.FOLDER)
    }
    pinned = json.loads(PINNED.read_text())
    assert {name: found.get(name) for name in pinned} == pinned
    assert found.keys() == pinned.keys(), "a new suite is pinned with its first release"
