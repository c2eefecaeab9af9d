"""How a recipe's tasks moved from run to run."""

from __future__ import annotations

from collections.abc import Sequence

from eval.comparison import words
from eval.report.numbers import signed
from eval.report.plots.axes import plain_ticks, shorten
from eval.report.svg import colour, inline, panels
from pipeline.site.rows import Row, Task

_PANEL, _TITLE, _BOTTOM, _LEFT = 96, 26, 30, 44


def history(rows: Sequence[Row], *, width: int, name: str) -> str:
    """A panel a task: the change from the baseline with its interval by run, the oldest at the left, and the margin.

    `rows` have a report each. Up is better: the axis of a perplexity is turned round.
    """
    names = list(dict.fromkeys((t.task, t.kind) for row in rows if row.judged for t in row.judged.tasks))
    height = (_PANEL + _TITLE) * len(names) + _BOTTOM
    with panels(width, height, len(names), 1) as (drawing, axes):
        for number, (axis, (task, kind)) in enumerate(zip(axes, names, strict=True)):
            low = height - (number + 1) * (_PANEL + _TITLE)
            axis.set_position([_LEFT / width, low / height, 1 - (_LEFT + 12) / width, _PANEL / height])
            found = [
                (place, t) for place, row in enumerate(rows) for t in _tasks(row) if (t.task, t.kind) == (task, kind)
            ]
            for place, result in found:
                ink = colour((result.verdict or "muted").lower())
                ends = [words.change(kind, end) for end in (result.low, result.high)]
                axis.plot([place] * 2, ends, color=ink, linewidth=2, alpha=0.6, solid_capstyle="butt")
                axis.plot([place], [words.change(kind, result.difference)], "o", color=ink, markersize=7,
                          markeredgecolor=colour("paper"), markeredgewidth=1.2)  # fmt: skip
            margins = [(place, words.margin(kind, result.margin)) for place, result in found]
            axis.step(
                *zip(*margins, strict=True), where="mid", color=colour("fail"), linewidth=1.2, linestyle=(0, (3, 2))
            )
            axis.axhline(0, color=colour("muted"), linewidth=1)
            axis.set_xlim(-0.5, len(rows) - 0.5)
            axis.margins(y=0.12)
            if kind == "perplexity":
                axis.invert_yaxis()
            plain_ticks(axis, y=3)
            axis.grid(axis="y")
            last = number == len(names) - 1
            places = _places(len(rows), width)
            axis.set_xticks(places, _dates([rows[place].started for place in places]) if last else [""] * len(places))
            unit = "perplexity, %" if kind == "perplexity" else "points"
            axis.annotate(shorten(f"{task}, {unit}", width - 20, 13), (0, 1), (-_LEFT + 2, 13), fontsize=13,
                          xycoords="axes fraction", textcoords="offset points", va="center", fontweight="bold",
                          color=colour("ink"))  # fmt: skip
        return inline(drawing, name=name, label=_label(rows), css_class="plot")


def _tasks(row: Row) -> tuple[Task, ...]:
    return row.judged.tasks if row.judged else ()


def _places(runs: int, width: int) -> list[int]:
    """Runs whose date is written: evenly spread, as many as there is room for, the newest among them."""
    step = max(1, -(-runs // max(1, width // 100)))
    return list(range(runs - 1, -1, -step))[::-1]


def _dates(started: Sequence[str]) -> list[str]:
    """The days of runs; of those that share a day with the one before, the hour, which tells them apart."""
    days = [time[:10] for time in started]
    return [
        f"{time[11:16]} UTC" if number and days[number - 1] == day else day
        for number, (time, day) in enumerate(zip(started, days, strict=True))
    ]


def _label(rows: Sequence[Row]) -> str:
    parts = []
    for row in rows:
        changes = ", ".join(f"{t.task} {signed(words.change(t.kind, t.difference))}" for t in _tasks(row))
        parts.append(f"{row.started[:16].replace('T', ' ')}: {changes}")
    return f"Change from the baseline by run. {'; '.join(parts)}"
