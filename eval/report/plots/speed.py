"""Output tokens/s against the load, each launch a dot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.plots.axes import Grid, at_values, plain_ticks, shorten, title
from eval.report.svg import colour, inline, panels


@dataclass(frozen=True, slots=True)
class Point:
    """One cell: its load, and output tokens/s of each launch on both sides with their medians (baseline, candidate)."""

    cell: str
    load: float
    launches: tuple[tuple[float, ...], tuple[float, ...]]
    medians: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """The cells of one shape of request, by rising load."""

    shape: str
    load_name: str
    points: tuple[Point, ...]


def curves(shapes: Sequence[Curve], *, unit: str, width: int, name: str) -> str:
    """One panel a shape of request; lines join the medians."""
    columns = 1 if width < 500 or len(shapes) == 1 else 2
    grid = Grid(width, columns, len(shapes), 230, left=62, right=16, top=30 if len(shapes) > 1 else 12)
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        for axis, curve in zip(grid.place(axes), shapes, strict=False):
            _panel(axis, curve, unit, width / columns - grid.left - grid.right)
            if len(shapes) > 1:
                title(axis, shorten(curve.shape, width / columns, 14), left=grid.left)
        label = "; ".join(
            f"{point.cell}: {point.medians[0]:,.0f} to {point.medians[1]:,.0f}" for c in shapes for point in c.points
        )
        return inline(drawing, name=name, label=f"{unit} against the load. {label}", css_class="plot")


def _panel(axis: Any, curve: Curve, unit: str, room: float) -> None:
    loads = [point.load for point in curve.points]
    axis.set_xscale("log", base=2)
    axis.set_xlim(min(loads) / 1.45, max(loads) * 1.45)
    for side, ink, marker in ((0, "muted", "s"), (1, "candidate", "o")):
        axis.plot(loads, [point.medians[side] for point in curve.points], color=colour(ink), linewidth=2, zorder=2)
        for point in curve.points:
            values = point.launches[side]
            axis.plot([point.load] * len(values), values, linestyle="none", marker=marker, markersize=6.5,
                      color=colour(ink), alpha=0.8, markeredgecolor=colour("paper"), markeredgewidth=0.8,
                      zorder=3)  # fmt: skip
    axis.set_ylim(0, 1.12 * max(max(point.medians) for point in curve.points))
    at_values(axis, loads, room)
    plain_ticks(axis, y=5)
    axis.grid(axis="y")
    axis.set_xlabel(curve.load_name)
    axis.set_ylabel(unit)
