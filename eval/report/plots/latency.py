"""Latency against output tokens/s: what a higher load costs each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.plots.axes import Grid, locator, number, plain_ticks, title
from eval.report.svg import colour, inline, panels

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One latency over the cells of a shape: (baseline, candidate) in ms for the median and the 99th percentile.

    ``speed`` is output tokens/s of both sides in the same cells. ``spans`` are the intervals of both over launches, for
    the median and the 99th percentile; empty where there are none.
    """

    title: str
    speed: tuple[Pair, ...]
    p50: tuple[Pair, ...]
    p99: tuple[Pair, ...]
    spans: tuple[tuple[tuple[Pair, Pair], ...], tuple[tuple[Pair, Pair], ...]] = ((), ())


def lines(latencies: Sequence[Line], *, unit: str, width: int, name: str) -> str:
    """One panel a latency: solid for the median, dashed for the 99th percentile."""
    columns = 1 if width < 500 else min(3, len(latencies))
    grid = Grid(width, columns, len(latencies), 170, left=50, right=18, top=34)
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        for axis, line in zip(grid.place(axes), latencies, strict=False):
            _panel(axis, line, unit)
            title(axis, line.title, left=grid.left)
        label = "; ".join(f"{line.title}: median {_ends(line.p50)}, 99th percentile {_ends(line.p99)}"
                          for line in latencies)  # fmt: skip
        return inline(drawing, name=name, label=f"Latency in ms, baseline to candidate. {label}", css_class="plot")


def _ends(pairs: Sequence[Pair]) -> str:
    return ", ".join(f"{before:.3g} to {after:.3g}" for before, after in pairs)


def _panel(axis: Any, line: Line, unit: str) -> None:
    values = [value for pairs in (line.p50, line.p99) for pair in pairs for value in pair]
    values += [end for kind in line.spans for sides in kind for span in sides for end in span]
    for side, ink, marker in ((0, "muted", "s"), (1, "candidate", "o")):
        speed = [pair[side] for pair in line.speed]
        kinds = ((line.p50, line.spans[0], "-", 1.0), (line.p99, line.spans[1], (0, (4, 2)), 0.85))
        for pairs, spans, style, alpha in kinds:
            for x, span in zip(speed, spans, strict=False):
                axis.plot([x, x], span[side], color=colour(ink), linewidth=3.5, alpha=0.35, solid_capstyle="butt")
            axis.plot(speed, [pair[side] for pair in pairs], linestyle=style, color=colour(ink), linewidth=1.8,
                      marker=marker, markersize=6, markeredgecolor=colour("paper"), markeredgewidth=0.8,
                      alpha=alpha)  # fmt: skip
    fastest = max(value for pair in line.speed for value in pair)
    axis.set_xlim(0, 1.08 * fastest)
    if max(values) > 25 * min(values) > 0:
        axis.set_yscale("log")
        axis.set_ylim(min(values) / 1.6, max(values) * 1.6)
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        axis.minorticks_off()
        axis.tick_params(length=0)
    else:
        axis.set_ylim(0, 1.12 * max(*values, 1e-9))
        plain_ticks(axis, y=4)
    axis.xaxis.set_major_locator(locator(3))
    axis.xaxis.set_major_formatter(lambda value, _: number(value))
    axis.tick_params(length=0)
    axis.grid(axis="y")
    axis.set_xlabel(unit)
    axis.set_ylabel("ms", labelpad=2)
