"""Accuracy: the change of each task against its margin, how it was decided, and all figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from quantmint.eval import long_context, reasoning, tool_calls
from quantmint.eval.accuracy import Accuracy
from quantmint.eval.gate import GateReport
from quantmint.eval.report.numbers import tone, unit_of
from quantmint.eval.report.plots import (
    LETTER,
    PanelGrid,
    Row,
    both_widths,
    colour,
    forest,
    inline,
    number,
    panels,
    plain_ticks,
    shorten,
    title,
)  # fmt: skip
from quantmint.eval.statistics.sequential import Look

_TONES = {"PASS": "pass", "FAIL": "fail", "GO ON": "baseline"}
_ENDPOINTS = {
    tool_calls.EXACT: "the right functions with equal arguments",
    tool_calls.VALID: "calls that keep the schema of a function",
    reasoning.RIGHT: "right answers, the mean of a problem's samples",
    reasoning.COMPLETE: "answers that end before the limit of length",
    reasoning.UNREPEATED: "answers that do not end in a loop",
    long_context.RETRIEVAL: "sentences found again in long texts",
}
Path = tuple[Accuracy, float, tuple[Look, ...]]
"""A gated task, its margin, and the looks that were taken at it."""


def view(gate: GateReport) -> dict[str, Any] | None:
    """Return the values of the template's accuracy section; None if no task was asked."""
    if not gate.accuracy:
        return None
    scored = [result for result in gate.accuracy if result.kind != "perplexity"]
    perplexed = [result for result in gate.accuracy if result.kind == "perplexity"]
    sequential = [path for result in gate.accuracy if (path := _path(gate, result)) is not None]
    return {
        "forests": [
            both_widths(partial(changes, [(result, "", gate) for result in results]), name)
            for name, results in (("accuracy-scores", scored), ("accuracy-perplexity", perplexed))
            if results
        ],
        "looks": both_widths(partial(paths, sequential), "looks") if sequential else None,
        "explained": {result.task: words for result in gate.accuracy if (words := _explained(result.task))},
        "saved": sum(result.planned - result.items for result in gate.accuracy),
        "planned": sum(result.planned for result in gate.accuracy),
    }


def _explained(task: str) -> str | None:
    """Return what a task of an endpoint beside the suite scores, in words; None for another task."""
    if task.startswith(f"{long_context.LIKELIHOOD}_to_"):
        return f"perplexity of long texts, in the bucket that ends at token {int(task.rpartition('_')[2]):,}"
    return _ENDPOINTS.get(task)


def changes(results: Sequence[tuple[Accuracy, str, GateReport]], *, width: int, name: str) -> str:
    """Draw each task's loss or gain against its margin, as an inline SVG.

    `results` share one unit; each comes with a prefix of its name (or "") and the judgement that it is from. `width` is
    in CSS pixels, `name` the prefix of the ids.
    """
    rows = []
    unit = unit_of(results[0][0].kind)
    for result, prefix, gate in results:
        margin = gate.policy.margins.get(result.task)
        rows.append(
            Row(
                label=f"{prefix}{result.task}",
                tail="shown only" if margin is None else f"margin {unit.margin_words(margin)}",
                value=unit.scale(result.difference),
                bounds=unit.span(result.lower, result.upper),
                interval=unit.span(result.interval_low, result.interval_high),
                limit=None if margin is None else unit.margin(margin),
                tone=tone(gate.verdict_of("accuracy", result.task)),
            )
        )
    label = "; ".join(f"{row.label}: {row.value:+.2f}" for row in rows)
    return forest(rows, axis_label=unit.name, label=f"{unit.name}. {label}", width=width, name=name,
                  more_is_worse=unit.perplexity)  # fmt: skip


def _path(gate: GateReport, result: Accuracy) -> Path | None:
    """Return a gated task with its margin and its looks; None if it is shown only, or if only one look was planned."""
    looks, margin = gate.looks.get(result.task, ()), gate.policy.margins.get(result.task)
    if margin is None or not looks or (len(looks) == 1 and result.items == result.planned):
        return None
    return result, margin, looks


def paths(tasks: Sequence[Path], *, width: int, name: str) -> str:
    """Draw how each task was decided, as an inline SVG: a panel per task with bounds and margin at each look."""
    columns = 1 if width < 500 else 2 if width < 700 or len(tasks) in (2, 4) else 3
    grid = PanelGrid(width, min(columns, max(1, len(tasks))), len(tasks), 132, left=52, right=14, top=36)
    with panels(width, grid.height, grid.rows, grid.columns) as (drawing, axes):
        room = width / grid.columns - grid.right
        for axis, (result, margin, looks) in zip(grid.place(axes), tasks, strict=False):
            _panel(axis, result, margin, looks)
            decision, items = looks[-1].decision, looks[-1].items
            end = f"{'undecided' if decision == 'GO ON' else decision} at {items:,}"
            title(axis, shorten(result.task, room - LETTER * 12 * (len(end) + 1), 14), left=grid.left)
            # The colour of an undecided bar is too pale for words.
            ink = "muted" if decision == "GO ON" else _TONES[decision]
            axis.annotate(end, (1, 1), (0, 12), xycoords="axes fraction", textcoords="offset points", ha="right",
                          va="center", fontsize=12, color=colour(ink))  # fmt: skip
        label = "; ".join(f"{result.task}: {looks[-1].items:,} of {result.planned:,} items"
                          for result, _, looks in tasks)  # fmt: skip
        return inline(drawing, name=name, label=f"Bounds at each look. {label}")


def _panel(axis: Any, result: Accuracy, margin: float, looks: Sequence[Look]) -> None:
    unit = unit_of(result.kind)
    spans = [unit.span(look.lower, look.upper) for look in looks]
    limit = unit.margin(margin)
    # Early bounds are wide: what lies far beyond the margin is cut off, so that the rest can be seen.
    reach = min(max(2.2 * abs(limit), 1.15 * abs(spans[-1][0]), 1.15 * abs(spans[-1][1])), 8 * abs(limit))
    axis.set_xlim(0, 1.06 * result.planned)
    axis.set_ylim(-reach, reach)
    axis.axhspan(limit, math.copysign(reach, limit), color=colour("fail"), alpha=0.1, linewidth=0)
    axis.axhline(limit, color=colour("fail"), linewidth=1.5)
    axis.axhline(0, color=colour("muted"), linewidth=1)
    axis.axvline(result.planned, color=colour("rule"), linewidth=1.5, linestyle=(0, (2, 3)))
    for look, (low, high) in zip(looks, spans, strict=True):
        axis.plot([look.items] * 2, (max(low, -2 * reach), min(high, 2 * reach)), color=colour(_TONES[look.decision]),
                  linewidth=5, solid_capstyle="butt")  # fmt: skip
    ticks: list[int] = []  # the looks that have room for one, the last first of all
    for look in reversed(looks):
        if not ticks or ticks[-1] - look.items > 0.16 * result.planned:
            ticks.append(look.items)
    axis.set_xticks(ticks[::-1], [number(items) for items in ticks[::-1]])
    plain_ticks(axis, y=4)
    axis.grid(axis="y")
    axis.set_xlabel("items")
    axis.set_ylabel("perplexity, %" if unit.perplexity else "points", labelpad=2)
