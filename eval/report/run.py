"""The section of a report on the run: its stages, and how to repeat it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from quantmint.eval.report.model import Report, ShownStage
from quantmint.eval.report.numbers import duration
from quantmint.eval.report.plots import LETTER, both_widths, colour, figure, inline, plain_ticks
from quantmint.eval.report.summary import answered_by


def view(report: Report) -> dict[str, Any]:
    """Return the values of the template's section on the run."""
    cached = [stage["seconds"] for stage in report["stages"] if stage["cached"]]
    return {
        "timeline": both_widths(partial(timeline, report["stages"]), "timeline") if report["stages"] else None,
        "total": sum(stage["seconds"] for stage in report["stages"]),
        "cached": sum(cached) if cached else None,
        "servers": [(plan, answered_by(plan), command(plan["env"], plan["argv"])) for plan in report["servers"]],
    }


def command(env: Mapping[str, str], argv: Sequence[str]) -> str:
    """Return a shell command over several lines, with one variable or flag per line."""
    lines = [f"{key}={shlex.quote(value)}" for key, value in sorted(env.items())]
    start = next((index for index, token in enumerate(argv) if token.startswith("--")), len(argv))
    lines += [" ".join(map(shlex.quote, argv[:start]))] if start else []
    for token in argv[start:]:
        if token.startswith("--"):
            lines.append(shlex.quote(token))
        else:
            lines[-1] += f" {shlex.quote(token)}"
    return " \\\n  ".join(lines)


def timeline(stages: Sequence[ShownStage], *, width: int, name: str) -> str:
    """Draw one row per stage in the order of time, as an inline SVG; idle time between stages is cut out."""
    places, cuts = _packed(stages)
    labels = [(stage["name"], duration(stage["seconds"])) for stage, _ in places]
    total = max([start + stage["seconds"] for stage, start in places] + [1e-3])
    scale, unit = (3600, "hours") if total > 7200 else (60, "minutes") if total > 180 else (1, "seconds")
    row, top, bottom = 26, 4, 42
    left, right = (round(max(map(len, words)) * LETTER * 12 + 14) for words in zip(*labels, strict=True))
    height = top + bottom + row * len(stages)
    with figure(width, height, (left, right, top, bottom)) as (drawing, axis):
        axis.set_xlim(0, total / scale)
        axis.set_ylim(len(stages), 0)
        for cut in cuts:
            axis.axvline(cut / scale, color=colour("muted"), linewidth=1, linestyle=(0, (1, 3)))
        least = 2.5 * total / max(1, width - left - right)  # what took no time is seen all the same
        for index, (stage, start) in enumerate(places):
            ink = colour("baseline" if stage["cached"] else "candidate")
            begin = min(start, total - least)
            axis.barh(index + 0.5, max(stage["seconds"], least) / scale, left=begin / scale, height=0.52, color=ink,
                      linewidth=0)  # fmt: skip
            axis.annotate(labels[index][1], (1, index + 0.5), (8, 0), xycoords=("axes fraction", "data"), va="center",
                          textcoords="offset points", color=colour("muted"), fontsize=12)  # fmt: skip
        axis.set_yticks([index + 0.5 for index in range(len(labels))], [stage for stage, _ in labels])
        for text in axis.get_yticklabels():
            text.set_color(colour("ink"))
        axis.tick_params(length=0, pad=8)
        axis.spines["left"].set_visible(False)
        plain_ticks(axis, x=max(2, (width - left - right) // 80))
        axis.grid(axis="x")
        axis.set_xlabel(f"{unit} of work")
        label = "; ".join(map(": ".join, labels))
        return inline(drawing, name=name, label=f"Stages. {label}")


def _packed(stages: Sequence[ShownStage]) -> tuple[list[tuple[ShownStage, float]], list[float]]:
    """Return each stage with its start, and the places where the timeline is cut; both in seconds from its beginning.

    Time in which no stage ran is left out. Where that was more than a minute, the place is among the cuts.
    """
    places: list[tuple[ShownStage, float]] = []
    cuts: list[float] = []
    place, clock = 0.0, -math.inf
    for stage in sorted(stages, key=_began):
        began = _began(stage)
        idle = began - clock if places else 0.0
        if idle > 60:
            cuts.append(place)
        start = place + min(idle, 0.0)  # runs of two stages at once, on two machines, overlap
        places.append((stage, max(0.0, start)))
        place = max(place, start + stage["seconds"])
        clock = max(clock, began + stage["seconds"])
    return places, cuts


def _began(stage: ShownStage) -> float:
    return datetime.fromisoformat(stage["started"]).timestamp()
