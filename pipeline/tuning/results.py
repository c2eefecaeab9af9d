"""What a trial measured, as it is kept and read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from eval.bench import CellResult
from pipeline.tuning.space import Point, Trial

FIGURES = ("output_throughput", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99")
"""Fields of `CellResult` that a sweep looks at: tokens/s, and milliseconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One trial. ``seconds`` is its whole wall time, from the start of the server until it was gone.

    ``status`` is "ok"; "failed" where the server did not start or a request did not come back; "void" where the log
    says that the numbers do not mean what they should. ``why`` says so in words. ``started_seconds`` counts until the
    server answered. ``sweep`` names the sweep that paid for it.
    """

    status: Literal["ok", "failed", "void"]
    seconds: float
    sweep: str
    cells: Mapping[str, CellResult] = field(default_factory=dict)
    why: str | None = None
    fix: str | None = None
    started_seconds: float | None = None
    kv_tokens: int | None = None
    attention_backend: str | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            **asdict(self),
            "notes": list(self.notes),
            "cells": {name: cell.to_json() for name, cell in self.cells.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Read back what `to_json` wrote. Raises TypeError or `eval.errors.MeasurementError` for anything else."""
        cells = {name: CellResult.from_json(cell) for name, cell in data["cells"].items()}
        return cls(**{**data, "cells": cells, "notes": tuple(data["notes"])})


@dataclass(frozen=True, slots=True)
class Figures:
    """A point's medians over its sound runs: figure by cell and name."""

    cells: Mapping[str, Mapping[str, float]]

    def worst(self, name: str) -> float:
        """The highest value of a latency over all cells, ms."""
        return max(cell[name] for cell in self.cells.values())


def figures(outcomes: Iterable[Outcome]) -> Figures | None:
    """The medians of the sound outcomes; None where there is none."""
    sound = [outcome for outcome in outcomes if outcome.status == "ok"]
    if not sound:
        return None
    return Figures(
        {
            cell: {name: median(getattr(outcome.cells[cell], name) for outcome in sound) for name in FIGURES}
            for cell in sound[0].cells
        }
    )


def by_point(outcomes: Mapping[Trial, Outcome]) -> dict[Point, list[Outcome]]:
    """Outcomes of each point, in the order in which points were first met."""
    found: dict[Point, list[Outcome]] = {}
    for trial, outcome in outcomes.items():
        found.setdefault(trial.point, []).append(outcome)
    return found
