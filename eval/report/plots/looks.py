"""How a task was decided: the bounds at each look at its items, against the margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.plots.axes import LETTER, Grid, number, plain_ticks, shorten, title
from eval.report.svg import colour, inline, panels


@dataclass(frozen=True, slots=True)
class Step:
    """One look: items so far, the bounds in the axis' unit, and the colour of what it decided."""

    items: int
    lower: float
    upper: float
    tone: str


@dataclass(frozen=True, slots=True)
class Path:
    """The looks at one task: ``planned`` items are all that it has, ``margin`` is positive, ``end`` the outcome."""

    task: str
    end: str
    unit: str
    margin: float
    planned: int
    steps: tuple[Step, ...]


def paths(tasks: Sequence[Path], *, width: int, name: str) -> str:
    """Small multiples, one a task."""
    columns = 1 if width < 500 else 2 if width < 700 or len(tasks) in (2, 4) else 3
    grid = Grid(width, min(columns, max(1, len(tasks))), len(tasks), 132, left=52, right=14, top=36)
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        room = width / grid.columns - grid.right
        for axis, task in zip(grid.place(axes), tasks, strict=False):
            _panel(axis, task)
            title(axis, shorten(task.task, room - LETTER * 12 * (len(task.end) + 1), 14), left=grid.left)
            axis.annotate(task.end, (1, 1), (0, 12), xycoords="axes fraction", textcoords="offset points", ha="right",
                          va="center", fontsize=12, color=colour(_written(task.steps[-1].tone)))  # fmt: skip
        label = "; ".join(f"{task.task}: {task.steps[-1].items:,} of {task.planned:,} items" for task in tasks)
        return inline(drawing, name=name, label=f"Bounds at each look. {label}", css_class="plot")


def _written(tone: str) -> str:
    """The colour of words about a bar: that of an undecided one is too pale to read."""
    return "muted" if tone == "baseline" else tone


def _panel(axis: Any, task: Path) -> None:
    # Early bounds are wide: what lies far beyond the margin is cut off, so that the rest can be seen.
    last = task.steps[-1]
    reach = min(max(2.2 * task.margin, 1.15 * abs(last.lower), 1.15 * abs(last.upper)), 8 * task.margin)
    axis.set_xlim(0, 1.06 * task.planned)
    axis.set_ylim(-reach, reach)
    axis.axhspan(-reach, -task.margin, color=colour("fail"), alpha=0.1, linewidth=0)
    axis.axhline(-task.margin, color=colour("fail"), linewidth=1.5)
    axis.axhline(0, color=colour("muted"), linewidth=1)
    axis.axvline(task.planned, color=colour("rule"), linewidth=1.5, linestyle=(0, (2, 3)))
    for step in task.steps:
        span = (max(step.lower, -2 * reach), min(step.upper, 2 * reach))
        axis.plot([step.items] * 2, span, color=colour(step.tone), linewidth=5, solid_capstyle="butt")
    axis.set_xticks([step.items for step in _apart(task)], [number(step.items) for step in _apart(task)])
    plain_ticks(axis, y=4)
    axis.grid(axis="y")
    axis.set_xlabel("items")
    axis.set_ylabel(task.unit, labelpad=2)


def _apart(task: Path) -> list[Step]:
    """The looks that have room for a tick, the last one first of all."""
    kept: list[Step] = []
    for step in reversed(task.steps):
        if not kept or kept[-1].items - step.items > 0.16 * task.planned:
            kept.append(step)
    return kept[::-1]
