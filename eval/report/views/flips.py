"""Flips: how many answers changed, against how many change by themselves, and the answers themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from eval.gate import GateReport
from eval.report.model import Direction, Flip, Report
from eval.report.numbers import percent
from eval.report.plots.flips import Flipped, flips
from eval.report.views import drawn

SHOWN = 100
"""Flips of a task and direction that the page holds; report.json has all."""
FOLDED, LONGEST, SHORTER = 700, 12_000, 3_000
"""Characters of a text above which it is folded, and above which the page leaves out its middle: models that reason
write tens of thousands. After the first of a task and direction, less is kept, so that a browser opens the page."""
WHOLE = 10
"""Flips of a task and direction that are kept longer."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text that may be long: what is seen at once, and the whole where that is more."""

    start: str
    whole: str | None
    length: int


def text(value: str, longest: int = LONGEST, *, end: bool = False) -> Text:
    """Cut a text for the page, to ``longest`` characters at most.

    With ``end`` its end is what is seen at once: a prompt ends in the question.
    """
    if len(value) <= FOLDED:
        return Text(value, None, len(value))
    cut = f"\N{HORIZONTAL ELLIPSIS}{value[-FOLDED:]}" if end else f"{value[:FOLDED]}\N{HORIZONTAL ELLIPSIS}"
    half = longest // 2
    left_out = len(value) - longest
    whole = value if left_out <= 0 else (
        f"{value[:half]}\n\n[{left_out:,} characters are left out here; report.json has them]\n\n{value[-half:]}"
    )  # fmt: skip
    return Text(cut, whole, len(value))


def view(report: Report, gate: GateReport) -> dict[str, Any] | None:
    """The section's content; None where no task has answers that could flip."""
    scored = [result for result in gate.accuracy if result.kind != "perplexity"]
    if not scored:
        return None
    kept = {entry["task"]: entry["flips"] for entry in report["flips"]}
    tasks, bars = [], []
    for result in scored:
        control = gate.control.get(result.task)
        changed = result.gains + result.losses
        floor = None if control is None else (100 * control.rate, 100 * control.low, 100 * control.high)
        said = percent(result.flip_rate) + ("" if control is None else f", floor {percent(control.rate)}")
        bars.append(
            Flipped(result.task, said, 100 * result.losses / result.items, 100 * result.gains / result.items, floor)
        )
        tasks.append(
            {
                "result": result,
                "changed": changed,
                "control": control,
                "directions": [_direction(name, kept.get(result.task, [])) for name in get_args(Direction)],
                "known": any(kept.get(result.task, [])),
            }
        )
    return {
        "tasks": tasks,
        "plot": drawn(partial(flips, bars), "flips"),
        "controlled": any(task["control"] is not None for task in tasks),
    }


def _direction(direction: Direction, found: list[Flip]) -> dict[str, Any]:
    mine = [flip for flip in found if flip["direction"] == direction]
    return {
        "name": direction,
        "flips": [
            {
                "flip": flip,
                "prompt": text(flip["prompt"], end=True),
                "target": text(flip["target"]),
                "baseline": text(flip["baseline"], LONGEST if index < WHOLE else SHORTER),
                "candidate": text(flip["candidate"], LONGEST if index < WHOLE else SHORTER),
                "peek": _peek(flip),
            }
            for index, flip in enumerate(mine[:SHOWN])
        ],
        "more": max(0, len(mine) - SHOWN),
    }


def _peek(flip: Flip) -> str:
    """The last line of the prompt that says something, which a mere "Answer:" does not."""
    lines = [line.strip() for line in flip["prompt"].splitlines() if line.strip()]
    said = [line for line in lines if len(line) > 24] or lines
    return said[-1][-160:] if said else ""
