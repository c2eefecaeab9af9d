"""The HTML page of a comparison: what each task lost, and accuracy against size and against throughput."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from quantmint.eval.accuracy import better
from quantmint.eval.comparison.model import ComparedGroup, Comparison, Mark, where
from quantmint.eval.report.accuracy import changes
from quantmint.eval.report.page import environment
from quantmint.eval.report.plots import Spot, both_widths, plane

FOLDER = Path(__file__).parent
WIDE = 912


def render(comparison: Comparison) -> str:
    """Return the HTML page of a comparison as text."""
    templates = environment(FOLDER)
    templates.globals |= {"better": better, "where": where}
    return templates.get_template("page.html.j2").render(
        comparison=comparison,
        marks=[mark for group in comparison.groups for mark in group.marks],
        drawn=[_plots(group, index) for index, group in enumerate(comparison.groups)],
    )


def _plots(group: ComparedGroup, index: int) -> dict[str, Any]:
    plots: dict[str, Any] = {"planes": []}
    for name, kinds in (("forest", ("binary", "graded")), ("perplexity", ("perplexity",))):
        results = [
            (result, f"{mark.letter}  ", mark.contender.gate)
            for task in group.tasks
            for mark in group.marks
            if (result := mark.contender.accuracy(*task)) is not None and result.kind in kinds
        ]
        plots[name] = both_widths(partial(changes, results), f"g{index}-{name}", wide=WIDE) if results else None
    ranked = [mark for mark in group.marks if mark.worst and mark.worst.recovery is not None]
    sizes = [_spot(mark, mark.contender.size_ratio, None) for mark in ranked]
    views = [("", "size over the baseline's (left is better)", sizes)]
    for place in group.speeds:
        spots = [
            _spot(mark, cell.ratio, (cell.ratio_low, cell.ratio_high))
            for mark in ranked
            if mark.contender.place == place and (cell := mark.slowest)
        ]
        views.append((where(place), "tokens/s over the baseline's (right is better)", spots))
    for number, (caption, title, spots) in enumerate(views):
        if spots:
            half = (WIDE - 32) // 2 if len(views) > 1 else WIDE
            draw = partial(plane, spots, titles=(title, "recovery of the worst task, %"), origin=(1.0, 100.0),
                           least=(0.1, 1.0))  # fmt: skip
            plots["planes"].append((caption, both_widths(draw, f"g{index}-plane{number}", wide=half)))
    return plots


def _spot(mark: Mark, x: float, x_range: tuple[float, float] | None) -> Spot:
    worst = mark.worst
    assert worst is not None and worst.recovery is not None  # noqa: S101, PT018 - only ranked ones are drawn
    low, high = worst.recovery_low, worst.recovery_high
    y_range = None if low is None or high is None else (100 * low, 100 * high)
    tone = mark.contender.gate.verdict.value.lower()
    return Spot(mark.letter, x, 100 * worst.recovery, tone, mark.on_front, x_range, y_range)
