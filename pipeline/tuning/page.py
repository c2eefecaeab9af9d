"""`tuning.html`: one page that loads nothing and runs no script, in the style of the report of a checkpoint."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eval.report
from pipeline.tuning.budget import duration
from pipeline.tuning.plots import Mark, pareto
from pipeline.tuning.report import COMPARED, Report, percent

PAGE, DATA = "tuning.html", "tuning.json"
WIDE, NARROW = 760, 340
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
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"ratio": percent, "figure": figure, "duration": duration, "points": _signs, "soft": _soft}
    # Ours: the style sheets of two rooms and SVG that was drawn here.
    style = (Path(eval.report.__file__).parent / "page.css").read_text(encoding="utf-8")
    own = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    points = report["points"]
    return environment.get_template("page.html.j2").render(
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
        style=Markup(style + own),  # noqa: S704
    )


def _plots(report: Report, cell: str, index: int) -> dict[str, Any]:
    from markupsafe import Markup

    drawn = {}
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
            at, title = f"c{index}-{name}", TITLES[name]
            broad = pareto(marks, x_title=title, width=wide, name=f"{at}-w", words=wide == WIDE)
            slim = pareto(marks, x_title=title, width=NARROW, name=f"{at}-n", words=False)
            pair = f'<div class="wide">{broad}</div><div class="narrow">{slim}</div>'
            drawn[name] = Markup(pair)  # noqa: S704 - our own SVG
    return drawn


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
