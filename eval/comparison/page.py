"""The HTML page of a comparison: it loads nothing and runs no script."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from eval.comparison import plots, words
from eval.comparison.direct import word
from eval.comparison.model import Comparison, Group, Mark, where
from eval.comparison.plots import Spot
from eval.report.templates import environment
from eval.report.views import drawn

FOLDER = Path(__file__).parent
WIDE = 912


def render(comparison: Comparison) -> str:
    """Render the page."""
    made = environment(FOLDER)
    made.globals |= {"words": words, "word": word, "where": where}
    return made.get_template("page.html.j2").render(
        comparison=comparison,
        marks=[mark for group in comparison.groups for mark in group.marks],
        drawn=[_plots(group, index) for index, group in enumerate(comparison.groups)],
    )


def _plots(group: Group, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"planes": []}
    for name, kinds in (("forest", ("binary", "graded")), ("perplexity", ("perplexity",))):
        rows = [row for row in group.tasks if any(r and r.kind in kinds for r in row.results)]
        found[name] = drawn(partial(plots.forest, group, rows), f"g{index}-{name}", wide=WIDE) if rows else None
    ranked = [mark for mark in group.marks if mark.worst and mark.worst.recovery is not None]
    views = [("", "size over the baseline's", True, [_over_size(mark) for mark in ranked])]
    for speeds in group.speeds:
        spots = [spot for mark in ranked if mark.contender.place == speeds.place and (spot := _over_speed(mark))]
        views.append((where(speeds.place), "tokens/s over the baseline's", False, spots))
    for number, (caption, title, smaller, spots) in enumerate(views):
        if spots:
            half = (WIDE - 32) // 2 if len(views) > 1 else WIDE
            draw = partial(plots.plane, spots, x_title=title, smaller_is_better=smaller)
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
