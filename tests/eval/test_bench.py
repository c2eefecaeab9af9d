"""The order of a series of launches."""

from __future__ import annotations

from collections import Counter

import pytest

from quantmint.eval.measurements import order


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
