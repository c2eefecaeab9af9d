"""The HTML page of a comparison: what each task lost, and accuracy against size and against throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.comparison.model import Comparison, Group, Mark, better, where
from eval.report.accuracy import changes
from eval.report.numbers import level, unit_of
from eval.report.page import environment
from eval.report.plots import colour, drawn, figure, inline, plain_ticks
from eval.verdict import Verdict

FOLDER = Path(__file__).parent
WIDE = 912


def render(comparison: Comparison) -> str:
    """Render the page."""
    made = environment(FOLDER)
    made.globals |= {"unit_of": unit_of, "level": level, "better": better, "where": where}
    return made.get_template("page.html.j2").render(
        comparison=comparison,
        marks=[mark for group in comparison.groups for mark in group.marks],
        drawn=[_plots(group, index) for index, group in enumerate(comparison.groups)],
    )


def _plots(group: Group, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"planes": []}
    for name, kinds in (("forest", ("binary", "graded")), ("perplexity", ("perplexity",))):
        results = [
            (result, f"{mark.letter}  ", mark.contender.gate)
            for row in group.tasks
            for mark, result in zip(group.marks, row.results, strict=True)
            if result is not None and result.kind in kinds
        ]
        found[name] = drawn(partial(changes, results), f"g{index}-{name}", wide=WIDE) if results else None
    ranked = [mark for mark in group.marks if mark.worst and mark.worst.recovery is not None]
    views = [("", "size over the baseline's", True, [_over_size(mark) for mark in ranked])]
    for speeds in group.speeds:
        spots = [spot for mark in ranked if mark.contender.place == speeds.place and (spot := _over_speed(mark))]
        views.append((where(speeds.place), "tokens/s over the baseline's", False, spots))
    for number, (caption, title, smaller, spots) in enumerate(views):
        if spots:
            half = (WIDE - 32) // 2 if len(views) > 1 else WIDE
            draw = partial(plane, spots, x_title=title, smaller_is_better=smaller)
            found["planes"].append((caption, drawn(draw, f"g{index}-plane{number}", wide=half)))
    return found


def _over_size(mark: Mark) -> Spot:
    return _spot(mark, mark.contender.size_ratio, None)


def _over_speed(mark: Mark) -> Spot | None:
    cell = mark.slowest
    return None if cell is None else _spot(mark, cell.ratio, (cell.ratio_low, cell.ratio_high))


def _spot(mark: Mark, x: float, x_range: tuple[float, float] | None) -> Spot:
    worst = mark.worst
    assert worst is not None and worst.recovery is not None  # noqa: S101, PT018 - only ranked ones are drawn
    low, high = worst.recovery_low, worst.recovery_high
    y_range = None if low is None or high is None else (100 * low, 100 * high)
    return Spot(mark.letter, mark.contender.gate.verdict, mark.on_front, x, x_range, 100 * worst.recovery, y_range)


_RADIUS = 8.5  # of a lettered mark, in pixels


@dataclass(frozen=True, slots=True)
class Spot:
    """A contender on a plane: recovery in per cent over a ratio to the baseline, each with its interval."""

    letter: str
    verdict: Verdict
    on_front: bool
    x: float
    x_range: tuple[float, float] | None
    y: float
    y_range: tuple[float, float] | None


def plane(spots: Sequence[Spot], *, x_title: str, smaller_is_better: bool, width: int, name: str) -> str:
    """Recovery over a ratio to the baseline, which stands at 1 and 100 % as a cross; filled marks are on the front."""
    left, right, top, bottom, height = 56, 14, 14, 46, 330
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(
            left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height
        )
        _limits(axis, spots)
        axis.grid(color=colour("rule"))
        axis.axhline(100, color=colour("muted"), linewidth=1)
        axis.axvline(1, color=colour("muted"), linewidth=1)
        ordered = sorted(spots, key=lambda spot: spot.on_front)
        true = [tuple(map(float, axis.transData.transform((spot.x, spot.y)))) for spot in ordered]
        shown = axis.transData.inverted().transform(apart(true, 2 * _RADIUS + 2))
        for spot, (x, y) in zip(ordered, shown, strict=True):
            ink = colour(spot.verdict.value.lower())
            for xs, ys in ((spot.x_range, (spot.y, spot.y)), ((spot.x, spot.x), spot.y_range)):
                if xs is not None and ys is not None:
                    axis.plot(xs, ys, color=ink, linewidth=1.4, alpha=0.6, solid_capstyle="butt", zorder=2)
            axis.plot([x], [y], "o", markersize=2 * _RADIUS, markeredgecolor=ink, zorder=3,
                      markerfacecolor=ink if spot.on_front else colour("paper"), markeredgewidth=1.6)  # fmt: skip
            axis.annotate(spot.letter, (x, y), (0, -0.5), ha="center", va="center", fontsize=11, zorder=4,
                          textcoords="offset points", fontweight="bold",
                          color=colour("paper") if spot.on_front else ink)  # fmt: skip
        plain_ticks(axis, x=max(3, width // 90), y=5)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        axis.set_xlabel(f"{x_title} ({'left' if smaller_is_better else 'right'} is better)")
        axis.set_ylabel("recovery of the worst task, %")
        label = "; ".join(f"{s.letter}: {s.y:.1f} % at {s.x:.2f}" for s in spots)
        return inline(drawing, name=name, label=f"Recovery over {x_title}. {label}")


def apart(places: Sequence[tuple[float, ...]], room: float) -> list[tuple[float, float]]:
    """Where marks at (x, y) are drawn so that each can be read: one that would cover another moves to its right.

    `room` is the least distance of two marks, in the pixels of `places`. Their intervals stay where they are.
    """
    taken: list[tuple[float, float]] = []
    for x, y in places:
        while (hidden := next((t for t in taken if math.dist(t, (x, y)) < room), None)) is not None:
            x = hidden[0] + math.sqrt(max(room**2 - (y - hidden[1]) ** 2, 0.0)) + 1e-6
        taken.append((x, y))
    return taken


def _limits(axis: Any, spots: Sequence[Spot]) -> None:
    """Room around the spots and the baseline; what lies close together is not blown up to look far apart."""
    across = [1.0, *(end for s in spots for end in (s.x, *(s.x_range or ())))]
    upwards = [100.0, *(end for s in spots for end in (s.y, *(s.y_range or ())))]
    for values, least, setter in ((across, 0.1, axis.set_xlim), (upwards, 1.0, axis.set_ylim)):
        middle, room = (min(values) + max(values)) / 2, max(max(values) - min(values), least)
        setter(middle - 0.6 * room, middle + 0.6 * room)
