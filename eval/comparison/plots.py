"""The plots of a comparison: what each task lost, and accuracy against size and against throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.comparison import words
from eval.comparison.model import Group, TaskRow
from eval.comparison.words import change
from eval.report.numbers import signed
from eval.report.plots.axes import plain_ticks, shorten
from eval.report.svg import colour, figure, inline
from eval.verdict import Verdict

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


def forest(group: Group, rows: Sequence[TaskRow], *, width: int, name: str) -> str:
    """Change from the baseline, one line a contender below each task's name, with its two-sided interval.

    Red ticks are margins, each at the contender that promised it. All rows must be of one unit.
    """
    kind = next(result.kind for row in rows for result in row.results if result)
    title, line, gap, bottom, left = 26, 24, 12, 44, 30
    lines = [sum(result is not None for result in row.results) for row in rows]
    height = bottom + 4 + sum(title + line * count for count in lines) + gap * (len(rows) - 1)
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=left / width, right=1 - 10 / width, top=1, bottom=bottom / height)
        ends = [
            change(kind, end) for row in rows for r in row.results if r for end in (r.interval_low, r.interval_high)
        ]
        # A margin far from all that was measured would press the rest together: it is drawn where it is near.
        reach = max([abs(end) for end in ends] + [0.2])
        edges = [words.margin(kind, m) for row in rows for m in row.margins if m is not None]
        ends += [edge for edge in edges if abs(edge) < 2.5 * reach] + [-0.2, 0.2]
        pad = 0.06 * (max(ends) - min(ends))
        low, high = min(ends) - pad, max(ends) + pad
        axis.set_xlim(*((high, low) if kind == "perplexity" else (low, high)))  # worse is left
        axis.set_ylim(height - bottom, 0)
        axis.axvline(0, color=colour("muted"), linewidth=1)
        y = 4.0
        for row in rows:
            text = shorten(f"{row.task}, {row.metric}", width - left - 10, 13)
            axis.annotate(text, (0, y + 12), (-left + 2, 0), xycoords=("axes fraction", "data"), fontsize=13,
                          textcoords="offset points", fontweight="bold", color=colour("ink"), va="center")  # fmt: skip
            y += title
            for mark, result, margin, verdict in zip(group.marks, row.results, row.margins, row.verdicts, strict=True):
                if result is None:
                    continue
                ink = colour(verdict.value.lower()) if verdict else colour("muted")
                middle = y + line / 2
                if margin is not None:
                    axis.plot([words.margin(kind, margin)] * 2, [y + 3, y + line - 3], color=colour("fail"),
                              linewidth=1.5, clip_on=True)  # fmt: skip
                axis.plot([change(kind, result.interval_low), change(kind, result.interval_high)], [middle] * 2,
                          color=ink, linewidth=2, solid_capstyle="butt")  # fmt: skip
                axis.plot([change(kind, result.difference)], [middle], "o", color=ink, markersize=8,
                          markeredgecolor=colour("paper"), markeredgewidth=1.5)  # fmt: skip
                axis.annotate(mark.letter, (0, middle), (-left + 8, 0), xycoords=("axes fraction", "data"), fontsize=12,
                              textcoords="offset points", va="center", color=colour("ink"))  # fmt: skip
                y += line
            y += gap
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        plain_ticks(axis, x=max(3, width // 110))
        what = "change of the perplexity, %" if kind == "perplexity" else "change in accuracy, points"
        axis.set_xlabel(what)
        label = "; ".join(
            f"{row.task}: "
            + ", ".join(
                f"{mark.letter} {signed(change(kind, result.difference))}"
                for mark, result in zip(group.marks, row.results, strict=True)
                if result
            )
            for row in rows
        )
        return inline(drawing, name=name, label=f"{what}. {label}", css_class="plot")


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
        return inline(drawing, name=name, label=f"Recovery over {x_title}. {label}", css_class="plot")


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
