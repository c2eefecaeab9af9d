"""`tuning.html`: one page that loads nothing and runs no script, in the style of the report of a checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.report.templates import environment
from eval.report.views import WIDE, drawn
from pipeline.tuning.budget import duration
from pipeline.tuning.plots import Mark, pareto
from pipeline.tuning.report import COMPARED, Report, percent

PAGE, DATA = "tuning.html", "tuning.json"
TITLES = {
    "output_throughput": "output tokens/s",
    "ttft_p50": "median time to first token, ms",
    "ttft_p99": "time to first token, 99th percentile, ms",
    "itl_p50": "median gap between tokens, ms",
    "itl_p99": "gap between tokens, 99th percentile, ms",
}
SHORT = {
    "output_throughput": "tokens/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
}


def write(folder: Path, report: Report) -> Path:
    """Write `tuning.html` with `tuning.json` beside it; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (folder / DATA, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"),
        (folder / PAGE, render(report)),
    ):
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return folder / PAGE


def render(report: Report) -> str:
    """Render the page."""
    made = environment(Path(__file__).parent)
    made.filters |= {"ratio": percent, "figure": figure, "duration": duration, "points": _signs, "soft": _soft}
    points = report["points"]
    return made.get_template("page.html.j2").render(
        report=report,
        base=points[0] if points else None,
        best=None if report["best"] is None else points[report["best"]],
        cells=[(cell, _plots(report, cell["name"], index)) for index, cell in enumerate(report["cells"])],
        bad=[point for point in points if point["status"] != "ok"],
        compared=COMPARED,
        titles=TITLES,
        short=SHORT,
        tiles=tiles(report),
        tone=_tone,
        command=_command(report["base"]["env"], report["base"]["argv"]),
    )


def _plots(report: Report, cell: str, index: int) -> dict[str, Any]:
    found = {}
    for name in ("ttft_p99", "itl_p99", "itl_p50"):
        marks = [
            Mark(
                point["number"],
                point["label"],
                point["cells"][cell][name],
                point["cells"][cell]["output_throughput"],
                point["number"] == report["best"],
                _pair(point["spread"][cell][name]),
                _pair(point["spread"][cell]["output_throughput"]),
            )
            for point in report["points"]
            if point["status"] == "ok"
        ]
        if marks:
            wide = WIDE if name == "ttft_p99" else (WIDE - 32) // 2
            found[name] = drawn(partial(_pareto, marks, TITLES[name]), f"c{index}-{name}", wide=wide)
    return found


def _pareto(marks: Sequence[Mark], title: str, *, width: int, name: str) -> str:
    """Trials are named where there is room for it."""
    return pareto(marks, x_title=title, width=width, name=name, words=width == WIDE)


def _pair(values: Sequence[float]) -> tuple[float, float]:
    """A range as it was, or as JSON gives it back."""
    return values[0], values[1]


def tiles(report: Report) -> list[tuple[str, str, str]]:
    """The first screen: caption, the best point's ratio to the base plan, and its range over the cells."""
    best = None if report["best"] is None else report["points"][report["best"]]
    if best is None or not best["cells"]:
        return []
    base = report["points"][0]
    found = []
    for name in ("output_throughput", "ttft_p99", "itl_p99"):
        change = best["ratios"][name]
        cell = max(best["cells"], key=lambda key: best["cells"][key]["output_throughput"])
        before, after = base["cells"][cell][name], best["cells"][cell][name]
        unit = "tok/s" if name == "output_throughput" else "ms"
        caption = SHORT[name].replace("tokens/s", "Output tokens/s")
        if best["number"]:
            found.append(
                (caption, percent(change), f"{figure(before)} \N{RIGHTWARDS ARROW} {figure(after)} {unit}, {cell}")
            )
        else:
            found.append((caption, figure(after), f"{unit}, {cell}"))
    launches = sum(point["runs"] for point in report["points"])
    found.append(
        ("Launches", str(launches), f"of {len(report['points'])} plans in {duration(report['budget']['spent'] or 0)}")
    )
    return found


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:#.3g}".rstrip(".")


def _tone(name: str, change: float, noise: bool) -> str:
    if noise:
        return "shown"
    return "pass" if (change > 1) == (name == "output_throughput") else "fail"


def _soft(text: str) -> str:
    """A knob's name that may be broken where its words end."""
    from markupsafe import Markup, escape

    return escape(text).replace("_", Markup("_<wbr>"))


def _signs(text: str) -> str:
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", text)


def _command(env: dict[str, str], argv: list[str]) -> str:
    lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(env.items())] + [" ".join(argv[:3])]
    for token in argv[3:]:
        if token.startswith("--"):
            lines.append(token)
        else:
            lines[-1] += f" {shlex.quote(token)}"
    return " \\\n  ".join(lines)
