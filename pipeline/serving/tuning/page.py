"""`tuning.html`: one page that loads nothing and runs no script, in the style of the report of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.report.page import environment
from eval.report.plots import WIDE, colour, drawn, figure, inline, plain_ticks
from pipeline.serving.plan import Process
from pipeline.serving.render.invocation import command
from pipeline.serving.tuning.objective import frontier
from pipeline.serving.tuning.report import COMPARED, Report, percent
from pipeline.store.disk import write_atomic

PAGE, DATA = "tuning.html", "tuning.json"
TITLES = {
    "ttft_p99": "time to first token, 99th percentile, ms",
    "itl_p99": "gap between tokens, 99th percentile, ms",
    "itl_p50": "median gap between tokens, ms",
}
SHORT = {
    "output_throughput": "tokens/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
}
_RADIUS = 8.5  # of a mark, in pixels


@dataclass(frozen=True, slots=True)
class Mark:
    """One point of a plot: ``x`` a latency in ms, ``y`` output tokens/s, its number and what was changed.

    ``x_range`` and ``y_range`` are the least and the most over its launches.
    """

    number: int
    text: str
    x: float
    y: float
    best: bool
    x_range: Sequence[float]
    y_range: Sequence[float]


def write(folder: Path, report: Report) -> Path:
    """Write `tuning.html` with `tuning.json` beside it; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, text in ((DATA, data), (PAGE, render(report))):
        write_atomic(folder / name, text.encode(), temporary=folder / f"{name}.partial")
    return folder / PAGE


def render(report: Report) -> str:
    """Render the page."""
    made = environment(Path(__file__).parent)
    made.filters["change"] = percent
    points, base_plan = report["points"], report["base"]
    return made.get_template("page.html.j2").render(
        report=report,
        base=points[0] if points else None,
        best=None if report["best"] is None else points[report["best"]],
        cells=[(cell, _plots(report, cell["name"], index)) for index, cell in enumerate(report["cells"])],
        bad=[point for point in points if point["status"] != "ok"],
        compared=COMPARED,
        short=SHORT,
        tone=_tone,
        command=command(Process(0, "server", 0, (), None, base_plan["env"], tuple(base_plan["argv"]))),
    )


def _plots(report: Report, cell: str, index: int) -> dict[str, Any]:
    """Throughput against three latencies, by the latency's name."""
    found = {}
    for name, title in TITLES.items():
        marks = [
            Mark(
                point["number"],
                point["label"],
                point["cells"][cell][name],
                point["cells"][cell]["output_throughput"],
                point["number"] == report["best"],
                point["spread"][cell][name],
                point["spread"][cell]["output_throughput"],
            )
            for point in report["points"]
            if point["status"] == "ok"
        ]
        if marks:
            wide = WIDE if name == "ttft_p99" else (WIDE - 32) // 2
            found[name] = drawn(partial(pareto, marks, x_title=title), f"c{index}-{name}", wide=wide)
    return found


def _tone(name: str, change: float, noise: bool) -> str:
    if noise:
        return "shown"
    return "pass" if (change > 1) == (name == "output_throughput") else "fail"


def pareto(marks: Sequence[Mark], *, x_title: str, width: int, name: str) -> str:
    """Throughput against a latency, one numbered mark a point, with the frontier that nothing beats: an inline SVG."""
    left, right, top, bottom, height = 58, 14, 14, 46, 320
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(
            left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height
        )
        _limits(axis, marks)
        axis.grid(color=colour("rule"))
        axis.set_xlabel(x_title)
        axis.set_ylabel("output tokens/s")
        plain_ticks(axis, x=width // 90, y=6)
        line = [marks[index] for index in frontier([(mark.y, mark.x) for mark in marks])]
        # From the lower edge, through the points, to the right edge: what lies below the line is beaten.
        across = [line[0].x, *(mark.x for mark in line), axis.get_xlim()[1]]
        up = [axis.get_ylim()[0], *(mark.y for mark in line), line[-1].y]
        axis.step(across, up, where="post", color=colour("candidate"), linewidth=1.6)
        for mark in sorted(marks, key=lambda mark: (mark.best, mark.number == 0)):
            ink = colour(
                "pass" if mark.best else "ink" if mark.number == 0 else "candidate" if mark in line else "muted"
            )
            for xs, ys in ((mark.x_range, (mark.y, mark.y)), ((mark.x, mark.x), mark.y_range)):
                axis.plot(xs, ys, color=ink, linewidth=1.2, alpha=0.55, solid_capstyle="butt", zorder=2)
            axis.plot([mark.x], [mark.y], "o", markersize=2 * _RADIUS, markerfacecolor=colour("paper"),
                      markeredgecolor=ink, markeredgewidth=2.6 if mark.best else 1.4, zorder=3)  # fmt: skip
            axis.annotate("B" if mark.number == 0 else str(mark.number), (mark.x, mark.y), (0, -0.5), ha="center",
                          va="center", textcoords="offset points", fontsize=11, color=ink, zorder=4,
                          fontweight="bold" if mark.best or mark.number == 0 else "normal")  # fmt: skip
        label = "; ".join(f"{mark.text}: {mark.y:,.0f} tokens/s at {mark.x:,.1f} ms" for mark in marks)
        return inline(drawing, name=name, label=f"Output tokens/s against {x_title}. {label}")


def _limits(axis: Any, marks: Sequence[Mark]) -> None:
    """Room around the marks; points that lie close together are not blown up to look far apart."""
    across = [value for mark in marks for value in mark.x_range]
    upwards = [value for mark in marks for value in mark.y_range]
    for values, setter in ((across, axis.set_xlim), (upwards, axis.set_ylim)):
        low, high = min(values), max(values)
        room = max(high - low, 0.04 * high, 1e-6)
        middle = (low + high) / 2
        setter(max(0.0, middle - 0.62 * room), middle + 0.62 * room)
