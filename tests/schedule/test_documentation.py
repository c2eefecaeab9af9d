"""docs/scheduling.md says what `export` does: each refusal of its table, and each that it lets through."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.schedule.conftest import Written

_PAGE = Path(__file__).parents[2] / "docs" / "scheduling.md"
_FORMS = {
    "systemd": ("--systemd",),
    "cron": ("--cron", "--machine-timezone", "Europe/Berlin"),
    "Kubernetes": ("--kubernetes", "--image", "quantmint:1"),
    "GitHub Actions": ("--github-actions", "--runner", "self-hosted"),
}
# A schedule in Berlin that is touched by what a row of the table is about, and nothing else.
_TOUCHED = {
    "missed, `run`": ("0 3 * * 6", "run"),
    "missed, `skip`": ("0 3 * * 6", "skip"),
    "named time is skipped": ("30 2 25-31 3 *", "skip"),
    "named time occurs twice": ("30 2 25-31 10 *", "skip"),
    "starred time occurs twice": ("30 * 25-31 10 *", "skip"),
}


def table() -> dict[str, dict[str, str]]:
    """The table of who keeps what: rows by their first cell, cells by their column."""
    lines = re.findall(r"(?m)^\|(.*)\|$", _PAGE.read_text(encoding="utf-8"))
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {row[0]: dict(zip(header[1:], (cell.replace("`", "") for cell in row[1:]), strict=True)) for row in rows}


@pytest.mark.parametrize("row", _TOUCHED)
@pytest.mark.parametrize("form", _FORMS)
def test_the_table_holds(row: str, form: str, written: Written, schedule: Callable[..., Any]) -> None:
    expression, missed = _TOUCHED[row]
    written(expression, "Europe/Berlin", missed=missed)
    done = schedule("export", *_FORMS[form])
    assert done.code == (2 if table()[row][form].startswith("refused") else 0), done.err
    if done.code:
        accept = "missed" if row.startswith("missed") else "clock-change"
        assert f"--accept {accept}" in done.err
        assert schedule("export", *_FORMS[form], "--accept", accept).code == 0
