"""The HTML page of a report."""

from __future__ import annotations

from eval.gate import GateReport
from eval.report.model import Report
from eval.report.templates import environment
from eval.report.views import accuracy, first_screen, flips, layers, run, throughput


def render(report: Report) -> str:
    """Render a report as one HTML page that loads nothing and runs no script."""
    gate = GateReport.from_json(report["gate"])
    return (
        environment()
        .get_template("page.html.j2")
        .render(
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
        )
    )
