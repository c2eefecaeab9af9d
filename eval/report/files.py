"""The four files of a report: for people, for programs, for a model card, for a CI system."""

from __future__ import annotations

import json
from pathlib import Path

from eval.report import junit, markdown, page
from eval.report.model import Report

PAGE, DATA, CARD, JUNIT = "report.html", "report.json", "report.md", "junit.xml"


def write(folder: Path, report: Report) -> Path:
    """Write `report.json`, `report.html`, `report.md` and `junit.xml`; returns the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (DATA, json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"),
        (CARD, markdown.render(report)),
        (JUNIT, junit.render(report)),
        (PAGE, page.render(report)),
    ):
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)
    return folder / PAGE
