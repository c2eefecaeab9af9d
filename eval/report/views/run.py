"""How the run went, and how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from eval.report.model import Report
from eval.report.numbers import duration
from eval.report.plots.timeline import Bar, timeline
from eval.report.views import drawn
from eval.report.views.first_screen import answered_by


def view(report: Report) -> dict[str, Any]:
    """The section's content."""
    bars = [
        Bar(
            stage["name"],
            datetime.fromisoformat(stage["started"]).timestamp(),
            stage["seconds"],
            duration(stage["seconds"]),
            stage["cached"],
        )
        for stage in report["stages"]
    ]
    cached = [stage["seconds"] for stage in report["stages"] if stage["cached"]]
    return {
        "timeline": drawn(partial(timeline, bars), "timeline") if bars else None,
        "total": sum(stage["seconds"] for stage in report["stages"]),
        "cached": sum(cached) if cached else None,
        "servers": [(plan, answered_by(plan), command(plan["env"], plan["argv"])) for plan in report["servers"]],
    }


def command(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """A shell command with one variable or flag a line."""
    lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    start = next((index for index, token in enumerate(argv) if token.startswith("--")), len(argv))
    lines += [" ".join(map(shlex.quote, argv[:start]))] if start else []
    for token in argv[start:]:
        if token.startswith("--"):
            lines.append(shlex.quote(token))
        else:
            lines[-1] += f" {shlex.quote(token)}"
    return " \\\n  ".join(lines)
