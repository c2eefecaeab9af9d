"""`index.html`: it loads nothing and runs no script; what it filters, the style sheet does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.comparison import words
from eval.comparison.page import FOLDER as COMPARISON
from eval.report.templates import environment
from eval.report.views import drawn
from eval.verdict import Verdict
from pipeline.site.plots import history
from pipeline.site.rows import BROKEN, NO_VERDICT, UNFINISHED, Row

STATUSES = (*(verdict.value for verdict in Verdict), NO_VERDICT, BROKEN, UNFINISHED)
WIDE = 1012
OPEN = 8
"""Runs of a recipe that are shown at once; older ones can be opened."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The runs of one recipe, newest first; `latest` is the newest that was judged."""

    name: str
    anchor: str
    runs: tuple[Row, ...]
    latest: Row | None
    plot: Any


def render(rows: Sequence[Row], at_hand: Collection[str]) -> str:
    """Render the index of runs, which come newest first; `at_hand` are the folders of reports that can be linked."""
    made = environment(Path(__file__).parent, COMPARISON)
    made.globals |= {"words": words, "OPEN": OPEN}
    names = list(dict.fromkeys(row.recipe for row in rows))
    recipes = [_recipe(name, number, [row for row in rows if row.recipe == name]) for number, name in enumerate(names)]
    counts = {status: sum(recipe.runs[0].status == status for recipe in recipes) for status in STATUSES}
    return made.get_template("page.html.j2").render(
        rows=rows, recipes=recipes, at_hand=at_hand, counts={status: count for status, count in counts.items() if count}
    )


def _recipe(name: str, number: int, runs: Sequence[Row]) -> Recipe:
    judged = [row for row in runs if row.judged is not None]
    # A run that found everything in the store has the report of the run before: one point, not two.
    distinct = list({row.judged.page: row for row in judged if row.judged}.values())[::-1]
    tasks = any(row.judged and row.judged.tasks for row in distinct)
    plot = drawn(partial(history, distinct), f"r{number}", wide=WIDE) if len(distinct) > 1 and tasks else None
    return Recipe(name, f"recipe-{number}", tuple(runs), judged[0] if judged else None, plot)
