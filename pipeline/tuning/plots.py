"""Throughput against a latency, one mark a point, with the frontier that nothing beats."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.svg import colour, figure, inline
from pipeline.tuning.pareto import frontier

_FONT = 12
_LETTER = 6.6  # mean width of a letter at that size, in pixels
_MARK = 8.5  # radius of a mark, in pixels


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of a plot: ``x`` a latency in ms, ``y`` output tokens/s, its number and what was changed.

    ``x_range`` and ``y_range`` are the least and the most over its launches.
    """

    number: int
    text: str
    x: float
    y: float
    best: bool
    x_range: tuple[float, float]
    y_range: tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: _Box) -> float:
        """Square pixels that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)


def pareto(marks: Sequence[Mark], *, x_title: str, width: int, name: str, words: bool) -> str:
    """An inline SVG. ``words`` writes what was changed beside a mark where there is room; numbers are always there."""
    left, right, top, bottom, height = 58, 14, 14, 46, 380 if words else 320
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(
            left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height
        )
        _limits(axis, marks)
        axis.grid(color=colour("rule"))
        axis.set_xlabel(x_title)
        axis.set_ylabel("output tokens/s")
        axis.xaxis.set_major_locator(_locator(width // 90))
        axis.yaxis.set_major_locator(_locator(6))
        axis.tick_params(length=0)
        line = frontier([(mark.y, mark.x) for mark in marks])
        steps = [(marks[index].x, marks[index].y) for index in line]
        stairs = _stairs(steps, axis)
        axis.plot(*zip(*stairs, strict=True), color=colour("candidate"), linewidth=1.6)
        for mark in sorted(marks, key=lambda mark: (mark.best, mark.number == 0)):
            ink = _ink(mark, mark.number in {marks[index].number for index in line})
            for xs, ys in ((mark.x_range, (mark.y, mark.y)), ((mark.x, mark.x), mark.y_range)):
                axis.plot(xs, ys, color=colour(ink), linewidth=1.2, alpha=0.55, solid_capstyle="butt", zorder=2)
            axis.plot([mark.x], [mark.y], "o", markersize=2 * _MARK, markerfacecolor=colour("paper"),
                      markeredgecolor=colour(ink), markeredgewidth=2.6 if mark.best else 1.4, zorder=3)  # fmt: skip
            axis.annotate("B" if mark.number == 0 else str(mark.number), (mark.x, mark.y), (0, -0.5), ha="center",
                          va="center", textcoords="offset points", fontsize=11, color=colour(ink), zorder=4,
                          fontweight="bold" if mark.best or mark.number == 0 else "normal")  # fmt: skip
        if words:
            room = (width - left - right, height - top - bottom)
            _write(axis, marks, {marks[index].number for index in line}, stairs, room)
        label = "; ".join(f"{mark.text}: {mark.y:,.0f} tokens/s at {mark.x:,.1f} ms" for mark in marks)
        return inline(drawing, name=name, label=f"Output tokens/s against {x_title}. {label}", css_class="plot")


def _ink(mark: Mark, on_line: bool) -> str:
    if mark.best:
        return "pass"
    if mark.number == 0:
        return "ink"
    return "candidate" if on_line else "muted"


def _limits(axis: Any, marks: Sequence[Mark]) -> None:
    """Room around the marks; points that lie close together are not blown up to look far apart."""
    across = [value for mark in marks for value in mark.x_range]
    upwards = [value for mark in marks for value in mark.y_range]
    for values, setter in ((across, axis.set_xlim), (upwards, axis.set_ylim)):
        low, high = min(values), max(values)
        room = max(high - low, 0.04 * high, 1e-6)
        middle = (low + high) / 2
        setter(max(0.0, middle - 0.62 * room), middle + 0.62 * room)


def _stairs(steps: Sequence[tuple[float, float]], axis: Any) -> list[tuple[float, float]]:
    """Corners of the line from the lower edge, through the points, to the right edge: what lies below it is beaten."""
    corners = [(steps[0][0], axis.get_ylim()[0]), steps[0]]
    for x, y in steps[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return [*corners, (axis.get_xlim()[1], corners[-1][1])]


def _write(
    axis: Any,
    marks: Sequence[Mark],
    on_line: set[int],
    stairs: Sequence[tuple[float, float]],
    size: tuple[float, float],
) -> None:
    """Labels where they hide no mark, line or other label: the ones that matter first, none where there is no room."""
    (x_low, x_high), (y_low, y_high) = axis.get_xlim(), axis.get_ylim()

    def pixels(x: float, y: float) -> tuple[float, float]:
        return size[0] * (x - x_low) / (x_high - x_low), size[1] * (y - y_low) / (y_high - y_low)

    place = {mark.number: pixels(mark.x, mark.y) for mark in marks}
    taken = [_Box(x - _MARK, y - _MARK, x + _MARK, y + _MARK) for x, y in place.values()]
    for one, two in itertools.pairwise(pixels(*corner) for corner in stairs):
        taken.append(_Box(one[0] - 1, min(one[1], two[1]) - 1, two[0] + 1, max(one[1], two[1]) + 1))
    ordered = sorted(marks, key=lambda mark: (not mark.best, mark.number != 0, mark.number not in on_line, mark.number))
    for mark in ordered:
        x, y = place[mark.number]
        length, far, half = _LETTER * len(mark.text), _MARK + 4, 0.62 * _FONT
        beside = [(far, 0, "left"), (-far, 0, "right"), (0, far + half, "center"), (0, -far - half, "center")]
        askew = [(far, far, "left"), (far, -far, "left"), (-far, far, "right"), (-far, -far, "right")]
        for dx, dy, ha in beside + askew:
            start = x + dx - {"left": 0.0, "right": length, "center": length / 2}[ha]
            box = _Box(start, y + dy - half, start + length, y + dy + half)
            inside = box.left >= 2 and box.right <= size[0] and box.bottom >= 2 and box.top <= size[1]
            if inside and not any(box.overlap(other) for other in taken):
                taken.append(box)
                axis.annotate(mark.text, (mark.x, mark.y), (dx, dy - 0.5), textcoords="offset points", fontsize=_FONT,
                              ha=ha, va="center", color=colour(_ink(mark, mark.number in on_line)),
                              fontweight="bold" if mark.best else "normal")  # fmt: skip
                break


def _locator(most: int) -> object:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(max(2, most))
