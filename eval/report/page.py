"""The HTML page of a report."""

from __future__ import annotations

from pathlib import Path

from eval.gate import GateReport
from eval.report import numbers
from eval.report.model import Report
from eval.report.views import accuracy, first_screen, flips, layers, run, throughput


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
    environment.filters |= numbers.FILTERS
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        report=report,
        gate=gate,
        first=first_screen.view(report, gate),
        accuracy=accuracy.view(gate),
        flips=flips.view(report, gate),
        canary=gate.canary,
        throughput=throughput.view(report, gate),
        errors=layers.errors(report),
        cache=layers.cache(report),
        run=run.view(report),
        style=Markup(style),  # noqa: S704 - our own file
    )
