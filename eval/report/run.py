"""How the run went, and how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from eval.report.model import Report
from eval.report.numbers import duration
from eval.report.plots import LETTER, colour, drawn, figure, inline, locator, number
from eval.report.summary import answered_by


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


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage: when it began, in seconds since any fixed time, how many seconds it took, and both in words."""

    name: str
    began: float
    seconds: float
    words: str
    cached: bool


def timeline(bars: Sequence[Bar], *, width: int, name: str) -> str:
    """One row a stage, in the order of time. What lies between stages is cut out: a result of last week is near."""
    places, cuts = _packed(bars)
    total = max([start + bar.seconds for bar, start in places] + [1e-3])
    scale, unit = (3600, "hours") if total > 7200 else (60, "minutes") if total > 180 else (1, "seconds")
    row, top, bottom = 26, 4, 42
    left = round(max(len(bar.name) for bar in bars) * LETTER * 12 + 14)
    right = round(max(len(bar.words) for bar in bars) * LETTER * 12 + 12)
    height = top + bottom + row * len(bars)
    with figure(width, height) as (drawing, axis):
        drawing.subplots_adjust(left=left / width, right=1 - right / width, top=1 - top / height,
                                bottom=bottom / height)  # fmt: skip
        axis.set_xlim(0, total / scale)
        axis.set_ylim(len(bars), 0)
        for cut in cuts:
            axis.axvline(cut / scale, color=colour("muted"), linewidth=1, linestyle=(0, (1, 3)))
        least = 2.5 * total / max(1, width - left - right)  # what took no time is seen all the same
        for index, (bar, start) in enumerate(places):
            ink = colour("baseline" if bar.cached else "candidate")
            begin = min(start, total - least)
            axis.barh(index + 0.5, max(bar.seconds, least) / scale, left=begin / scale, height=0.52, color=ink,
                      linewidth=0)  # fmt: skip
            axis.annotate(bar.words, (1, index + 0.5), (8, 0), xycoords=("axes fraction", "data"), va="center",
                          textcoords="offset points", color=colour("muted"), fontsize=12)  # fmt: skip
        axis.set_yticks([index + 0.5 for index in range(len(bars))], [bar.name for bar, _ in places])
        for text in axis.get_yticklabels():
            text.set_color(colour("ink"))
        axis.tick_params(length=0, pad=8)
        axis.spines["left"].set_visible(False)
        axis.xaxis.set_major_locator(locator(max(2, (width - left - right) // 80)))
        axis.xaxis.set_major_formatter(lambda value, _: number(value))
        axis.grid(axis="x")
        axis.set_xlabel(f"{unit} of work")
        label = "; ".join(f"{bar.name}: {bar.words}" for bar, _ in places)
        return inline(drawing, name=name, label=f"Stages. {label}")


def _packed(bars: Sequence[Bar]) -> tuple[list[tuple[Bar, float]], list[float]]:
    """Each bar with its place once idle time is cut out, and the places of the cuts that were longer than a minute."""
    places: list[tuple[Bar, float]] = []
    cuts: list[float] = []
    place, clock = 0.0, None
    for bar in sorted(bars, key=lambda bar: bar.began):
        if clock is None:
            clock = bar.began
        idle = bar.began - clock
        if idle > 60:
            cuts.append(place)
        start = place + min(idle, 0.0)  # runs of two stages at once, on two machines, overlap
        places.append((bar, max(0.0, start)))
        place = max(place, start + bar.seconds)
        clock = max(clock, bar.began + bar.seconds)
    return places, cuts
