"""The speed of a candidate relative to its baseline, cell by cell.

The replicate is a launch of the server, not a request: requests of one launch share its memory layout, clocks, cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from eval.bench import CellResult
from eval.errors import MeasurementError

LATENCY_FIELDS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "e2el_p50", "e2el_p99")


@dataclass(frozen=True, slots=True)
class Throughput:
    """One cell on both sides, medians over launches.

    `baseline` and `candidate` are output tokens per second; `ratio` is candidate / baseline, above 1 where the
    candidate is faster. `launches` counts (baseline, candidate). `latency` maps a field of `CellResult`, such as
    `ttft_p50`, to (baseline, candidate) in milliseconds.
    """

    cell: str
    launches: tuple[int, int]
    baseline: float
    candidate: float
    ratio: float
    total_baseline: float
    total_candidate: float
    latency: Mapping[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Throughput:
        """Read back what `to_json` wrote."""
        latency = {name: (float(pair[0]), float(pair[1])) for name, pair in data["latency"].items()}
        return cls(**{**data, "launches": tuple(data["launches"]), "latency": latency})


def compare(baseline: Sequence[CellResult], candidate: Sequence[CellResult]) -> Throughput:
    """Compare the launches of one cell, at least one a side.

    Raises `MeasurementError` when a side is empty, when cells are mixed, or when the baseline produced nothing.
    """
    cells = {result.cell for result in (*baseline, *candidate)}
    if not baseline or not candidate or len(cells) != 1:
        raise MeasurementError(
            f"cells {sorted(cells)}: {len(baseline)} baseline, {len(candidate)} candidate launches cannot be compared"
        )

    def sides(field: str) -> tuple[float, float]:
        return (
            float(median(getattr(result, field) for result in baseline)),
            float(median(getattr(result, field) for result in candidate)),
        )

    before, after = sides("output_throughput")
    if before <= 0:
        raise MeasurementError(f"cell {cells.pop()}: the baseline's output throughput is {before}")
    total_before, total_after = sides("total_throughput")
    return Throughput(
        cell=cells.pop(),
        launches=(len(baseline), len(candidate)),
        baseline=before,
        candidate=after,
        ratio=after / before,
        total_baseline=total_before,
        total_candidate=total_after,
        latency={field: sides(field) for field in LATENCY_FIELDS},
    )
