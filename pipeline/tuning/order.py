"""In which order a sweep measures, so that whatever a budget cuts off has the least left to say.

The guides say: vary one knob at a time. So by default every value is measured against the same base plan, which makes
effects comparable and independent of the order; then what won is measured together, because effects need not add up,
and only what was measured is recommended. ``keep`` goes on from the best value of each knob instead (coordinate
descent): fewer launches in a large space, but effects that depend on the order. A grid finds what only works in
combination, at the price of a product.

Generators are asked for one trial at a time and look at results through ``choose`` only when they must.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pipeline.tuning.space import BASE, Axis, Point, Trial

Mode: TypeAlias = Literal["one-at-a-time", "grid"]
Choose: TypeAlias = Callable[[Sequence[Point]], Point]
"""Of points in the order of preference, the first that no later one beats by more than noise."""


@dataclass(frozen=True, slots=True)
class Design:
    """The shape of a sweep: ``repeat`` launches a point, interleaved, so that a drift meets all of them alike."""

    axes: tuple[Axis, ...]
    mode: Mode = "one-at-a-time"
    keep: bool = False
    repeat: int = 1


def exploring(design: Design, choose: Choose) -> Iterator[Trial]:
    """Every trial up to the point where noise must be known; each once."""
    seen: set[Trial] = set()
    for trial in _exploring(design, choose):
        if trial not in seen:
            seen.add(trial)
            yield trial


def _exploring(design: Design, choose: Choose) -> Iterator[Trial]:
    if design.mode == "grid":
        yield from _rounds([BASE, *grid_order(design.axes)], design.repeat)
    elif not design.keep:
        yield from _rounds([BASE, *singles(design.axes)], design.repeat)
    else:
        # A decision needs the noise, so the base plan is measured twice before the first.
        yield from _rounds([BASE], max(2, design.repeat))
        current = BASE
        for axis in design.axes:
            points = [current, *((*current, (axis.knob, value)) for value in axis.values)]
            yield from _rounds(points, design.repeat)
            current = choose(points)


def closing(design: Design) -> Iterator[Trial]:
    """The base plan once more at the end: its spread is the noise, drift included."""
    before = max(2, design.repeat) if design.keep and design.mode == "one-at-a-time" else design.repeat
    yield Trial(BASE, before)


def together(design: Design, choose: Choose) -> Iterator[Trial]:
    """One at a time only: the winners of all knobs in one launch, where there are at least two."""
    if design.mode == "grid" or design.keep:
        return
    winner = tuple(
        change for axis in design.axes for change in choose([BASE, *(((axis.knob, v),) for v in axis.values)])
    )
    if len(winner) > 1:
        yield from _rounds([winner], design.repeat)


def singles(axes: Sequence[Axis]) -> list[Point]:
    """Every value on its own. One value of each knob first: a cut budget then leaves no knob untouched."""
    columns = [[((axis.knob, value),) for value in axis.values] for axis in axes]
    return [point for row in itertools.zip_longest(*columns) for point in row if point is not None]


def grid_size(axes: Sequence[Axis]) -> int:
    """How many combinations a grid has, the base plan included."""
    return math.prod(len(axis.values) + 1 for axis in axes)


def grid_order(axes: Sequence[Axis]) -> list[Point]:
    """The cartesian product without the base plan, such that any beginning covers the most.

    Greedy: the next point is the one with the most values, then the most pairs of values, that were not met yet (the
    base plan's own count as values). When every pair was met, the rest follows in the order of the product.
    """
    columns: list[list[tuple[str, object]]] = [
        [(axis.knob, None), *((axis.knob, value) for value in axis.values)] for axis in axes
    ]
    left = dict.fromkeys(itertools.product(*columns))
    base = next(iter(left), ())
    left.pop(base, None)
    met = set(base) | set(itertools.combinations(base, 2))
    ordered = []
    while left:
        best, gained = None, (0, 0)
        for row in left:
            gain = (len(set(row) - met), sum(pair not in met for pair in itertools.combinations(row, 2)))
            if gain > gained:
                best, gained = row, gain
        if best is None:
            break
        met |= set(best) | set(itertools.combinations(best, 2))
        ordered.append(best)
        del left[best]
    return [_point(row) for row in (*ordered, *left)]


def _point(row: Sequence[tuple[str, object]]) -> Point:
    return tuple((knob, value) for knob, value in row if isinstance(value, str | bool))


def _rounds(points: Sequence[Point], repeat: int) -> Iterator[Trial]:
    for run in range(repeat):
        for point in points:
            yield Trial(point, run)
