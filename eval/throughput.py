"""The speed of a candidate relative to its baseline, cell by cell.

The replicate is a launch of the server, not a request: requests of one launch share its memory layout, clocks, cache.
A handful of launches bears no assumption about their distribution, so the tests are exact rank tests, the interval of
the ratio is theirs (`eval.statistics.ranks`), and of a latency the range over the launches stands beside its median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.records import Part
from quantmint.eval.statistics.means import LogDifference, day_difference
from quantmint.eval.statistics.ranks import rank_test, ratio_interval, sequential_interval, sequential_p

LATENCY_FIELDS = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "e2el_p50", "e2el_p99")

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Throughput(Part):  # earlier records have the most requests in flight, too
    """One cell on both sides, medians over launches.

    `baseline` and `candidate` are output tokens per second on `gpus` GPUs, `values_baseline` and `values_candidate`
    those of each launch in the order made; `ratio` is candidate / baseline, above 1 where the candidate is faster, with
    the bounds of the rank test, each of which holds at `confidence`. `launches` counts (baseline, candidate).

    The p-values are exact and one-sided: `p_faster` that the candidate is faster than the baseline, `p_promise` that it
    is faster than `promise` times the baseline, `p_short` that it is slower than that (None without a promise).

    The first `reused` launches of the baseline are an earlier series'. Then the ratio must be shown twice, by the rank
    test of all launches and by `day_difference` of the fresh ones: each p-value is the larger of both, each bound the
    outer one. Of launches that may end early, p-values and bounds are those of all looks together.

    `latency` maps a field of `CellResult`, such as `ttft_p50`, to (baseline, candidate) in milliseconds, and
    `latency_intervals` to the ranges of both over launches. `goodput` (requests per second that met their limits)
    is (baseline, candidate), None where a launch did not report it.
    """

    cell: str
    gpus: int
    launches: tuple[int, int]
    values_baseline: tuple[float, ...]
    values_candidate: tuple[float, ...]
    baseline: float
    candidate: float
    ratio: float
    ratio_low: float
    ratio_high: float
    confidence: float
    p_faster: float
    p_promise: float | None
    p_short: float | None
    promise: float | None
    total_baseline: float
    total_candidate: float
    latency: Mapping[str, tuple[float, float]]
    latency_intervals: Mapping[str, tuple[Interval, Interval]]
    goodput: tuple[float, float] | None
    reused: int = 0

    @property
    def repeated(self) -> bool:
        """Return whether both sides were launched more than once; with one launch the interval is only a point."""
        return min(self.launches) > 1

    @property
    def backing(self) -> str:
        """Return the number of launches behind the figures, as in "4 launches a side"."""
        before, after = self.launches
        noun = "launch" if before == 1 else "launches"
        count = f"{before} {noun} a side" if before == after else f"{before} against {after} launches"
        return f"{count}, {self.reused} of the baseline's reused" if self.reused else count


def noise(results: Sequence[CellResult]) -> float:
    """Return the relative standard deviation of output tokens/s between launches of one side; 0 below two."""
    values = [result.output_throughput for result in results]
    return stdev(values) / mean(values) if len(values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class RatioTest:
    """Tests and bounds of the ratio of two series of launches.

    `baseline` and `candidate` are throughputs above 0 in the order of the launches. The first `reused` of the baseline
    are from an earlier series. `looks` is the most launches a side of a series that may end early (None: their number
    is fixed).
    """

    baseline: Sequence[float]
    candidate: Sequence[float]
    confidence: float
    reused: int = 0
    looks: int | None = None

    def p_above(self, ratio: float) -> float:
        """Return the one-sided p-value for the claim that the candidate is more than `ratio` times as fast."""
        return self._p(self.candidate, [ratio * value for value in self.baseline], ratio, above=True)

    def p_below(self, ratio: float) -> float:
        """Return the one-sided p-value for the claim that the candidate is less than `ratio` times as fast."""
        return self._p([ratio * value for value in self.baseline], self.candidate, ratio, above=False)

    def bounds(self) -> tuple[float, float]:
        """Return the lower and upper bound of candidate / baseline, each one-sided at `confidence`."""
        if self.looks is not None:
            return sequential_interval(self.candidate, self.baseline, self.looks, 1 - self.confidence)
        low, high = ratio_interval(self.candidate, self.baseline, self.confidence)
        if self.reused:
            outer = self._day().bounds(self.confidence)
            low, high = min(low, outer[0]), max(high, outer[1])
        return low, high

    def _p(self, higher: Sequence[float], lower: Sequence[float], ratio: float, *, above: bool) -> float:
        if self.looks is not None:
            return sequential_p(higher, lower, self.looks, 1 - self.confidence)
        p = rank_test(higher, lower)
        if self.reused:
            of_day = self._day().p_above(ratio)
            p = max(p, of_day if above else 1 - of_day)
        return p

    def _day(self) -> LogDifference:
        return day_difference(self.candidate, self.baseline[self.reused :], self.baseline[: self.reused])


def compare(
    cell: str,
    baseline: Sequence[CellResult],
    candidate: Sequence[CellResult],
    promise: float | None = None,
    confidence: float = 0.95,
    *,
    reused: int = 0,
    looks: int | None = None,
) -> Throughput:
    """Compare the launches of one cell, at least one a side, in the order in which they were made.

    `promise` is the least ratio that the candidate must reach. The first `reused` launches of the baseline are from an
    earlier series; `looks` is the most launches a side of a series that may end early (None: their number is fixed).
    Raises `MeasurementError` when a side is empty, when cells or numbers of GPUs are mixed, when a launch produced
    nothing, when launches are reused in a series that may end early, or when too few are fresh to be compared.
    """
    _require_comparable(cell, baseline, candidate, reused, looks)

    def values(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(getattr(r, name) for r in baseline), tuple(getattr(r, name) for r in candidate)

    def medians(name: str) -> tuple[float, float]:
        before, after = values(name)
        return float(median(before)), float(median(after))

    before, after = values("output_throughput")
    middle = medians("output_throughput")
    test = RatioTest(before, after, confidence, reused, looks)
    low, high = test.bounds()
    total = medians("total_throughput")
    return Throughput(
        cell=cell,
        gpus=baseline[0].gpus,
        launches=(len(before), len(after)),
        values_baseline=before,
        values_candidate=after,
        baseline=middle[0],
        candidate=middle[1],
        ratio=middle[1] / middle[0],
        ratio_low=low,
        ratio_high=high,
        confidence=confidence,
        p_faster=test.p_above(1.0),
        p_promise=None if promise is None else test.p_above(promise),
        p_short=None if promise is None else test.p_below(promise),
        promise=promise,
        total_baseline=total[0],
        total_candidate=total[1],
        latency={name: medians(name) for name in LATENCY_FIELDS},
        latency_intervals={
            name: ((min(before), max(before)), (min(after), max(after)))
            for name in LATENCY_FIELDS
            for before, after in [values(name)]
        },
        goodput=None if None in (result.goodput for result in (*baseline, *candidate)) else medians("goodput"),
        reused=reused,
    )


def _require_comparable(
    cell: str, baseline: Sequence[CellResult], candidate: Sequence[CellResult], reused: int, looks: int | None
) -> None:
    """Raise `MeasurementError` as `compare` says."""
    results = (*baseline, *candidate)
    cells = sorted({result.cell for result in results})
    if not baseline or not candidate or cells != [cell]:
        raise MeasurementError(
            f"cell {cell}: {len(baseline)} baseline and {len(candidate)} candidate launches of {', '.join(cells)} "
            "cannot be compared"
        )
    gpus = {result.gpus for result in results}
    if len(gpus) != 1:
        raise MeasurementError(
            f"cell {cell}: launches on {' and '.join(map(str, sorted(gpus)))} GPUs cannot be compared"
        )
    slowest = min(result.output_throughput for result in results)
    if slowest <= 0:
        raise MeasurementError(f"cell {cell}: a launch put out {slowest} tokens per second")
    if reused and looks is not None:
        raise MeasurementError(f"cell {cell}: {reused} launches are reused in a series that may end early")
    fresh = len(baseline) - reused
    if reused and (fresh < 2 or len(candidate) < 2):
        raise MeasurementError(
            f"cell {cell}: {fresh} fresh and {reused} reused launches of the baseline, expected 2 fresh"
        )
