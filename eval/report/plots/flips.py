"""Answers that changed in either direction, against those that change by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.report.plots.axes import LETTER, plain_ticks, shorten
from eval.report.svg import colour, figure, inline


@dataclass(frozen=True, slots=True)
class Flipped:
    """Shares of a task's items in percent: lost, gained, and the floor with its interval where it was measured."""

    task: str
    tail: str
    lost: float
    gained: float
    floor: tuple[float, float, float] | None


def flips(tasks: Sequence[Flipped], *, width: int, name: str) -> str:
    """One stacked bar a task; the mark on it is the floor, the line through the mark its interval."""
    row, top, bottom = 50, 4, 42
    height = top + bottom + row * len(tasks)
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=0, right=1, top=1 - top / height, bottom=bottom / height)
        most = max([task.lost + task.gained for task in tasks] + [task.floor[2] for task in tasks if task.floor])
        axis.set_xlim(0, 1.06 * max(most, 0.1))
        axis.set_ylim(len(tasks), 0)
        for index, task in enumerate(tasks):
            y = index + 0.68
            axis.barh(y, task.lost, height=0.3, color=colour("fail"), linewidth=0, alpha=0.85)
            axis.barh(y, task.gained, left=task.lost, height=0.3, color=colour("pass"), linewidth=0, alpha=0.85)
            if task.floor is not None:
                middle, low, high = task.floor
                axis.plot([low, high], [y, y], color=colour("ink"), linewidth=1.4)
                axis.plot([middle] * 2, [y - 0.24, y + 0.24], color=colour("ink"), linewidth=2.4)
            room = width - LETTER * 12 * (len(task.tail) + 2)
            for text, x, ha, weight, size, tint in (
                (shorten(task.task, room, 14), 0, "left", "bold", 13, "ink"),
                (task.tail, 1, "right", "normal", 12, "muted"),
            ):
                axis.annotate(text, (x, index + 0.28), xycoords=("axes fraction", "data"), fontsize=size, ha=ha,
                              fontweight=weight, va="center", color=colour(tint),
                              bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        plain_ticks(axis, x=max(3, width // 95))
        axis.set_xlabel("items whose score changed, %")
        label = "; ".join(f"{task.task}: {task.lost:.2f} % lost, {task.gained:.2f} % gained" for task in tasks)
        return inline(drawing, name=name, label=f"Flips. {label}", css_class="plot")
