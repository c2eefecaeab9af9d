"""Accuracy: the change of each task against its margin, how it was decided, and all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.accuracy import Accuracy, change
from eval.gate import GateReport
from eval.report.numbers import DASH, PER_CENT, POINT, finite, percent, signed, three
from eval.report.plots.forest import Row, Span, forest
from eval.report.plots.looks import Path, Step, paths
from eval.report.views import drawn
from eval.verdict import Verdict

_TONES = {"PASS": "pass", "FAIL": "fail", "GO ON": "baseline"}


@dataclass(frozen=True, slots=True)
class Unit:
    """How a task's change is shown. A perplexity's is relative, so that more is worse.

    ``scale`` turns a difference as the gate computes it (below 0 is worse) into the unit.
    """

    name: str
    perplexity: bool

    def scale(self, difference: float) -> float:
        """A difference in the unit: points, or per cent more perplexity."""
        return change("perplexity" if self.perplexity else "graded", finite(difference, 20.0))

    def span(self, low: float, high: float) -> Span:
        """An interval in the unit, the better end last for points, first for a perplexity."""
        ends = (self.scale(low), self.scale(high))
        return (min(ends), max(ends))

    def margin(self, margin: float) -> float:
        """Where the margin lies."""
        return 100 * margin if self.perplexity else -100 * margin

    def words(self, value: float) -> str:
        """A change with its unit."""
        return f"{signed(value)}{PER_CENT if self.perplexity else POINT}"


def unit_of(result: Accuracy) -> Unit:
    """The unit that a task's change is shown in."""
    perplexity = result.kind == "perplexity"
    return Unit("change in perplexity, %" if perplexity else "change in accuracy, points", perplexity)


def level(result: Accuracy, value: float) -> str:
    """A score in per cent, or a perplexity."""
    return three(value) if result.kind == "perplexity" else percent(value, 2)


def view(gate: GateReport) -> dict[str, Any] | None:
    """The section's content; None where nothing was asked."""
    if not gate.accuracy:
        return None
    scored = [result for result in gate.accuracy if result.kind != "perplexity"]
    perplexed = [result for result in gate.accuracy if result.kind == "perplexity"]
    sequential = [path for result in gate.accuracy if (path := _path(gate, result)) is not None]
    saved = sum(result.planned - result.items for result in gate.accuracy)
    return {
        "rows": [_row(gate, result) for result in gate.accuracy],
        "forests": [
            drawn(partial(_forest, gate, results), name)
            for name, results in (("accuracy-scores", scored), ("accuracy-perplexity", perplexed))
            if results
        ],
        "looks": drawn(partial(paths, sequential), "looks") if sequential else None,
        "saved": saved,
        "planned": sum(result.planned for result in gate.accuracy),
    }


def _row(gate: GateReport, result: Accuracy) -> dict[str, Any]:
    unit = unit_of(result)
    margin = gate.policy.margins.get(result.task)
    words = unit.words

    def span(low: float, high: float) -> str:
        ends = unit.span(low, high)
        return f"{signed(ends[0])} \N{HORIZONTAL ELLIPSIS} {signed(ends[1])}"

    recovery = None if result.recovery_low is None or result.recovery_high is None else (
        f"{100 * result.recovery_low:.1f} \N{HORIZONTAL ELLIPSIS} {percent(result.recovery_high)}"
    )  # fmt: skip
    error = 100 * result.standard_error
    return {
        "result": result,
        "verdict": gate.verdict_of("accuracy", result.task),
        "change": words(unit.scale(result.difference)),
        "margin": DASH if margin is None else words(unit.margin(margin)),
        "bounds": span(result.lower, result.upper),
        "interval": span(result.interval_low, result.interval_high),
        "bootstrap": span(result.bootstrap_low, result.bootstrap_high),
        "error": f"{error:.2f} {'%' if unit.perplexity else 'pt'}",
        "baseline": level(result, result.baseline),
        "candidate": level(result, result.candidate),
        "recovery": percent(result.recovery),
        "recovery_interval": recovery,
        "saved": result.planned - result.items,
    }


def tone(verdict: Verdict | None) -> str:
    """The colour of a verdict; of what is shown only, a quiet one."""
    return verdict.value.lower() if verdict else "muted"


def _forest(gate: GateReport, results: Sequence[Accuracy], *, width: int, name: str) -> str:
    rows = []
    for result in results:
        unit, margin = unit_of(result), gate.policy.margins.get(result.task)
        said = "shown only" if margin is None else f"margin {unit.words(unit.margin(margin))}"
        rows.append(
            Row(
                label=result.task,
                tail=said,
                value=unit.scale(result.difference),
                bounds=unit.span(result.lower, result.upper),
                interval=unit.span(result.interval_low, result.interval_high),
                bootstrap=unit.span(result.bootstrap_low, result.bootstrap_high),
                limit=None if margin is None else unit.margin(margin),
                tone=tone(gate.verdict_of("accuracy", result.task)),
            )
        )
    unit = unit_of(results[0])
    label = "; ".join(f"{row.label}: {row.value:+.2f}" for row in rows)
    return forest(rows, axis_label=unit.name, label=f"{unit.name}. {label}", width=width, name=name,
                  mirrored=unit.perplexity)  # fmt: skip


def _path(gate: GateReport, result: Accuracy) -> Path | None:
    """The looks at a gated task, where more than one was planned."""
    looks, margin = gate.looks.get(result.task, ()), gate.policy.margins.get(result.task)
    if margin is None or not looks or (len(looks) == 1 and result.items == result.planned):
        return None
    unit = unit_of(result)
    # A perplexity's path is mirrored, so that the margin lies below in every panel.
    sign = -1 if unit.perplexity else 1
    steps = []
    for look in looks:
        low, high = sorted(sign * end for end in unit.span(look.lower, look.upper))
        steps.append(Step(look.items, low, high, _TONES[look.decision]))
    name = "less perplexity, %" if unit.perplexity else "points"
    decision = looks[-1].decision
    said = "undecided" if decision == "GO ON" else decision
    end = f"{said} at {looks[-1].items:,} of {result.planned:,}"
    return Path(result.task, end, name, 100 * margin, result.planned, tuple(steps))
