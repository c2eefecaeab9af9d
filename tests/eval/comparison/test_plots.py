"""Marks of a plane that can be read, whatever lies where."""

from __future__ import annotations

import math
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from eval.comparison.plots import apart

PLACE = st.tuples(st.floats(0, 400), st.floats(0, 300))


def test_what_lies_apart_stays_where_it_is() -> None:
    places = [(0.0, 0.0), (40.0, 0.0), (0.0, 20.0)]
    assert apart(places, 19) == places


def test_equal_figures_stand_beside_each_other() -> None:
    first, second, third = apart([(10.0, 5.0)] * 3, 19)
    assert first == (10.0, 5.0)
    assert [round(x) for x, _ in (second, third)] == [29, 48]


@given(st.lists(PLACE, max_size=8))
def test_no_mark_covers_another(places: list[tuple[float, float]]) -> None:
    shown = apart(places, 19)
    assert [y for _, y in shown] == [y for _, y in places]
    assert all(math.dist(one, other) >= 19 - 1e-6 for one, other in combinations(shown, 2))
