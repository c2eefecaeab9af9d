"""The HTML page of a report."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from eval.gate import Finding, GateReport
from eval.report import plots
from eval.report.model import LayerError, Report
from eval.verdict import Verdict

WIDE, NARROW = 760, 350

_MEANING = {
    Verdict.PASS: "The candidate keeps every promise of its recipe.",
    Verdict.FAIL: "The candidate breaks a promise of its recipe.",
    Verdict.INCONCLUSIVE: "The measurements are sound, but too few to decide.",
    Verdict.INVALID: "The measurements cannot be trusted, so they say nothing about the checkpoint.",
}


def render(report: Report) -> str:
    """Render a report as one HTML page that loads nothing and runs no script."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    gate = GateReport.from_json(report["gate"])
    environment = Environment(
        loader=PackageLoader("eval.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": _bytes,
        "duration": _duration,
        "points": _points,
        "figure": _figure,
        "signs": _signs,
    }
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        report=report,
        gate=gate,
        meaning=_MEANING[gate.verdict],
        open_findings=_ordered(f for f in gate.findings if f.verdict is not Verdict.PASS),
        passed=[f for f in gate.findings if f.verdict is Verdict.PASS],
        kinds=[(kind, verdict) for kind in _kinds(gate) if (verdict := gate.verdict_of(kind))],
        tiles=_tiles(report, gate),
        plots={name: Markup(svg) for name, svg in _plots(report, gate).items()},  # noqa: S704 - our own SVG
        style=Markup(style),  # noqa: S704 - our own file
        layer_table=_layer_table(report["layers"]),
        commands={plan["side"]: _command(plan["env"], plan["argv"]) for plan in report["servers"]},
        longest=max([stage["seconds"] for stage in report["stages"]] + [1e-9]),
    )


def write(folder: Path, report: Report) -> Path:
    """Write `report.html` with `report.json` beside it; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page = folder / "report.html"
    page.write_text(render(report), encoding="utf-8")
    return page


def _plots(report: Report, gate: GateReport) -> dict[str, str]:
    """Every plot twice, for wide and for narrow screens; the style sheet shows the one that fits."""
    drawn: dict[str, Callable[..., str]] = {}
    if gate.accuracy:
        verdicts = {result.task: gate.verdict_of("accuracy", result.task) for result in gate.accuracy}
        drawn["forest"] = partial(plots.forest, gate.accuracy, gate.policy.margins, verdicts)
    if gate.throughput:
        for name, unit, rows in (
            ("throughput", "output tokens/s", [(c.cell, c.baseline, c.candidate) for c in gate.throughput]),
            ("ttft", "median time to first token, ms", [(c.cell, *c.latency["ttft_p50"]) for c in gate.throughput]),
            ("tpot", "median time per further token, ms", [(c.cell, *c.latency["tpot_p50"]) for c in gate.throughput]),
        ):
            drawn[name] = partial(plots.bars, rows, unit=unit, lower_is_better=name != "throughput")
    if report["layers"]:
        drawn["layers"] = partial(plots.layers, report["layers"])
    half = {"ttft", "tpot"}
    return {
        name: f'<div class="wide">{draw(width=(WIDE - 32) // 2 if name in half else WIDE, name=f"{name}-w")}</div>'
        f'<div class="narrow">{draw(width=NARROW, name=f"{name}-n")}</div>'
        for name, draw in drawn.items()
    }


def _tiles(report: Report, gate: GateReport) -> list[tuple[str, str, str]]:
    """The figures of the first screen: (caption, figure, explanation)."""
    size = report["size"]
    tiles = [
        (
            "Size",
            f"{size['candidate_bytes'] / size['baseline_bytes']:.2f}\N{MULTIPLICATION SIGN}",
            f"{_bytes(size['baseline_bytes'])} \N{RIGHTWARDS ARROW} {_bytes(size['candidate_bytes'])}",
        )
    ]
    decided = [result for result in gate.accuracy if result.task in gate.policy.margins]
    if decided:
        worst = min(decided, key=lambda result: result.difference + gate.policy.margins[result.task])
        tiles.append(("Accuracy", f"{_points(worst.difference)} pt", f"{worst.task}, nearest to its margin"))
        flips = max(decided, key=lambda result: result.flip_rate)
        tiles.append(("Flipped answers", f"{flips.flip_rate:.1%}", f"{flips.task}, the most of the gated tasks"))
    if gate.throughput:
        slowest = min(gate.throughput, key=lambda cell: cell.ratio)
        tiles.append(("Throughput", f"{slowest.ratio:.2f}\N{MULTIPLICATION SIGN}", f"{slowest.cell}, the least gain"))
    return tiles


def _ordered(findings: Any) -> list[Finding]:
    """Worst first, otherwise in the order of the gate."""
    order = list(Verdict)
    return sorted(findings, key=lambda finding: -order.index(finding.verdict))


def _kinds(gate: GateReport) -> list[Any]:
    return list(dict.fromkeys(["accuracy", "throughput", "structure", *(f.kind for f in gate.findings)]))


def _layer_table(errors: list[LayerError]) -> tuple[list[str], list[tuple[int, list[float | None]]]]:
    """Column names, then one row per layer with the lowest SQNR of each kind."""
    kinds = list(dict.fromkeys(error["kind"] for error in errors))
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for error in errors:
        row = rows[error["layer"]]
        row[error["kind"]] = min(error["sqnr_db"], row.get(error["kind"], error["sqnr_db"]))
    return kinds, [(layer, [rows[layer].get(kind) for kind in kinds]) for layer in sorted(rows)]


def _command(env: dict[str, str], argv: list[str]) -> str:
    """A shell command with one variable or flag a line."""
    lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    for token in argv:
        if token.startswith("--") or not lines or (lines and "=" in lines[-1] and not lines[-1].startswith("--")):
            lines.append(shlex.quote(token))
        else:
            lines[-1] += f" {shlex.quote(token)}"
    return " \\\n  ".join(lines)


def _bytes(count: float) -> str:
    """Decimal units, as disks and the Hub count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{_three(count)} {unit}"
        count /= 1000
    return f"{_three(count)} TB"


def _three(value: float) -> str:
    """Three significant digits, zeros included."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _points(fraction: float) -> str:
    """A difference of fractions in points, with a real minus sign."""
    return f"{100 * fraction:+.2f}".replace("-", "\N{MINUS SIGN}")


def _figure(value: float) -> str:
    return _three(value) if value else "0"


def _signs(text: str) -> str:
    """Numbers in a sentence with a real minus sign."""
    return re.sub(r"(?<![\w.-])-(?=\d)", "\N{MINUS SIGN}", text)
