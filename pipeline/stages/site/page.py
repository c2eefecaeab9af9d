"""`index.html`: it loads nothing and runs no script; what it filters, the style sheet does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.report.numbers import signed, unit_of
from eval.report.page import environment
from eval.report.plots import Grid, colour, drawn, inline, panels, plain_ticks, shorten, title
from eval.verdict import Verdict
from pipeline.stages.site.rows import BROKEN, NO_VERDICT, UNFINISHED, Row

STATUSES = (*(verdict.value for verdict in Verdict), NO_VERDICT, BROKEN, UNFINISHED)
WIDE = 1012
OPEN = 8
"""Runs of a recipe that are shown at once; older ones can be opened."""


def render(rows: Sequence[Row], at_hand: Collection[str]) -> str:
    """Render the index of runs, which come newest first; `at_hand` are the folders of reports that can be linked."""
    made = environment(Path(__file__).parent)
    made.globals |= {"unit_of": unit_of, "OPEN": OPEN}
    names = list(dict.fromkeys(row.recipe for row in rows))
    recipes = [_recipe(name, number, [row for row in rows if row.recipe == name]) for number, name in enumerate(names)]
    newest = [recipe["runs"][0].status for recipe in recipes]
    counts = {status: newest.count(status) for status in STATUSES if status in newest}
    return made.get_template("page.html.j2").render(rows=rows, recipes=recipes, at_hand=at_hand, counts=counts)


def _recipe(name: str, number: int, runs: Sequence[Row]) -> dict[str, Any]:
    """The runs of one recipe, newest first; `latest` is the newest that was judged."""
    judged = [row for row in runs if row.judged is not None]
    # A run that found everything in the store has the report of the run before: one point, not two.
    distinct = list({row.judged.page: row for row in judged if row.judged}.values())[::-1]
    tasks = any(row.judged and row.judged.tasks for row in distinct)
    plot = drawn(partial(history, distinct), f"r{number}", wide=WIDE) if len(distinct) > 1 and tasks else None
    latest = judged[0] if judged else None
    return {"name": name, "anchor": f"recipe-{number}", "runs": runs, "latest": latest, "plot": plot}


def history(rows: Sequence[Row], *, width: int, name: str) -> str:
    """A panel a task: the change from the baseline with its interval by run, the oldest at the left, and the margin.

    `rows` have a report each. Up is better: the axis of a perplexity is turned round.
    """
    tasks = [[] if row.judged is None else row.judged.tasks for row in rows]
    names = list(dict.fromkeys((task.task, task.kind) for found in tasks for task in found))
    grid = Grid(width, 1, len(names), 96, left=44, top=26, bottom=26)
    with panels(width, grid.height, grid.rows, 1) as (drawing, axes):
        for axis, (task, kind) in zip(grid.place(axes), names, strict=True):
            unit = unit_of(kind)
            found = [(at, t) for at, mine in enumerate(tasks) for t in mine if (t.task, t.kind) == (task, kind)]
            for at, result in found:
                ink = colour((result.verdict or "muted").lower())
                axis.plot([at] * 2, unit.span(result.low, result.high), color=ink, linewidth=2, alpha=0.6,
                          solid_capstyle="butt")  # fmt: skip
                axis.plot([at], [unit.scale(result.difference)], "o", color=ink, markersize=7,
                          markeredgecolor=colour("paper"), markeredgewidth=1.2)  # fmt: skip
            axis.step([at for at, _ in found], [unit.margin(result.margin) for _, result in found], where="mid",
                      color=colour("fail"), linewidth=1.2, linestyle=(0, (3, 2)))  # fmt: skip
            axis.axhline(0, color=colour("muted"), linewidth=1)
            axis.set_xlim(-0.5, len(rows) - 0.5)
            axis.margins(y=0.12)
            if unit.perplexity:
                axis.invert_yaxis()
            plain_ticks(axis, y=3)
            axis.grid(axis="y")
            # Evenly spread, as many as there is room for, the newest among them.
            places = list(range(len(rows) - 1, -1, -max(1, -(-len(rows) // max(1, width // 100)))))[::-1]
            axis.set_xticks(places, _dates([rows[at].started for at in places]))
            words = f"{task}, {'perplexity, %' if unit.perplexity else 'points'}"
            title(axis, shorten(words, width - 20, 13), left=grid.left)
        said = [
            f"{row.started[:16].replace('T', ' ')}: "
            + ", ".join(f"{t.task} {signed(unit_of(t.kind).scale(t.difference))}" for t in found)
            for row, found in zip(rows, tasks, strict=True)
        ]
        return inline(drawing, name=name, label=f"Change from the baseline by run. {'; '.join(said)}")


def _dates(started: Sequence[str]) -> list[str]:
    """The days of runs; of those that share a day with the one before, the hour, which tells them apart."""
    days = [time[:10] for time in started]
    return [
        f"{time[11:16]} UTC" if number and days[number - 1] == day else day
        for number, (time, day) in enumerate(zip(started, days, strict=True))
    ]
