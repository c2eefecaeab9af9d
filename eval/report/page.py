"""The frame that all pages share, the page of a report, and the four files of one.

A page loads nothing and runs no script. `frame.html.j2` is what a page extends, `page.css` the style of all of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from quantmint.eval.gate import GateReport
from quantmint.eval.report import accuracy, flips, junit, layers, long, markdown, run, summary, throughput
from quantmint.eval.report.model import CARD, DATA, JUNIT, PAGE, Report
from quantmint.eval.report.numbers import FILTERS, level, unit_of

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent


def environment(folder: Path = FOLDER) -> Environment:
    """Return the Jinja environment of a folder's templates and the shared frame, with the filters for figures.

    It escapes HTML and refuses undefined names. `style` is the style sheet of all pages, followed by the folder's own
    `page.css` if it has one.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    made.globals |= {"unit_of": unit_of, "level": level}
    sheets = [sheet for place in dict.fromkeys((FOLDER, folder)) if (sheet := place / "page.css").is_file()]
    made.globals["style"] = Markup("".join(sheet.read_text(encoding="utf-8") for sheet in sheets))  # noqa: S704 - our own files
    return made


def render(report: Report) -> str:
    """Render a report as one HTML page."""
    gate = GateReport.from_json(report["gate"])
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            gate=gate,
            first=summary.view(report, gate),
            accuracy=accuracy.view(gate),
            flips=flips.view(report, gate),
            canary=gate.canary,
            long=long.view(gate),
            kl=gate.kl,
            throughput=throughput.view(report, gate),
            errors=layers.errors(report),
            cache=layers.cache(report),
            run=run.view(report),
        )
    )


def write(folder: Path, report: Report) -> Path:
    """Write `report.json`, `report.html`, `report.md` and `junit.xml`; return the path of `report.html`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (DATA, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"),
        (CARD, markdown.render(report)),
        (JUNIT, junit.render(report)),
        (PAGE, render(report)),
    ):
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    return folder / PAGE
