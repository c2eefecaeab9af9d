"""Intervals one below the other against the limit that each must stay clear of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eval.report.plots.axes import LETTER, plain_ticks, shorten
from eval.report.svg import colour, figure, inline

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One estimate in the unit of the axis.

    ``bounds`` are the two one-sided bounds that decide (None where none are computed), ``interval`` the two-sided
    interval, ``bootstrap`` the resampled one. What lies on the worse side of ``limit`` is shaded; None: nothing
    decides. ``tone`` is a colour of the page.
    """

    label: str
    tail: str
    value: float
    bounds: Span | None
    interval: Span
    bootstrap: Span | None
    limit: float | None
    tone: str


def forest(
    rows: Sequence[Row],
    *,
    axis_label: str,
    label: str,
    width: int,
    name: str,
    neutral: float = 0.0,
    mirrored: bool = False,
    least_span: float = 0.4,
) -> str:
    """Rows as an inline SVG. Worse is at the left: below ``neutral``, or above it where the axis is ``mirrored``.

    The thick bar spans the bounds, the thin line the interval, the two ticks below it are the bootstrap's.
    """
    row, top, bottom = 58, 6, 44
    height = top + bottom + row * len(rows)
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=0, right=1, top=1 - top / height, bottom=bottom / height)
        low, high = _limits(rows, neutral, least_span)
        axis.set_xlim(*((high, low) if mirrored else (low, high)))
        axis.set_ylim(len(rows), 0)
        axis.axvline(neutral, color=colour("muted"), linewidth=1)
        edge = high if mirrored else low
        for index, item in enumerate(rows):
            y, band = index + 0.66, [index + 0.42, index + 0.94]
            ink = colour(item.tone)
            if item.limit is not None:
                axis.fill_betweenx(band, edge, item.limit, color=colour("fail"), alpha=0.1, linewidth=0)
                axis.plot([item.limit] * 2, band, color=colour("fail"), linewidth=1.5)
            axis.plot(item.interval, [y, y], color=ink, linewidth=1.5)
            if item.bounds is not None:
                axis.plot(item.bounds, [y, y], color=ink, linewidth=6, solid_capstyle="butt", alpha=0.4)
            if item.bootstrap is not None:
                axis.plot(item.bootstrap, [index + 0.82] * 2, color=ink, linewidth=1, alpha=0.75)
                axis.plot(item.bootstrap, [index + 0.82] * 2, linestyle="none", marker="|", markersize=7, color=ink)
            axis.plot([item.value], [y], "o", color=ink, markersize=8.5, markeredgecolor=colour("paper"),
                      markeredgewidth=1.5)  # fmt: skip
            room = width - LETTER * 12 * (len(item.tail) + 2)
            for text, x, ha, weight, size, tint in (
                (shorten(item.label, room, 14), 0, "left", "bold", 13, "ink"),
                (item.tail, 1, "right", "normal", 12, "muted"),
            ):
                axis.annotate(text, (x, y), (0, 21), xycoords=("axes fraction", "data"), textcoords="offset points",
                              fontsize=size, fontweight=weight, ha=ha, va="center", color=colour(tint),
                              bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        plain_ticks(axis, x=max(3, width // 95))
        axis.set_xlabel(axis_label)
        return inline(drawing, name=name, label=label, css_class="plot")


def _limits(rows: Sequence[Row], neutral: float, least: float) -> Span:
    values = [neutral - least / 2, neutral + least / 2]
    for item in rows:
        spans = [item.interval, item.bounds, item.bootstrap]
        values += [end for span in spans if span is not None for end in span if math.isfinite(end)]
        values += [item.value] + ([] if item.limit is None else [item.limit])
    low, high = min(values), max(values)
    pad = 0.08 * (high - low)
    return low - pad, high + pad
