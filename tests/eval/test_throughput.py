"""One cell over several launches: medians, intervals, exact tests against the promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from quantmint.eval import throughput
from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.throughput import Throughput

SLOW = (100.0, 98.0, 103.0, 101.0)


def launches(speeds: Sequence[float], **changes: object) -> list[CellResult]:
    return [
        dataclasses.replace(
            CellResult("c", 64, 0, 10.0, speed, 3 * speed, *(1000 / speed * factor for factor in range(1, 9))),
            **changes,  # type: ignore[arg-type]
        )
        for speed in speeds
    ]


def compare(faster: float, promise: float | None, speeds: Sequence[float] = SLOW) -> Throughput:
    return throughput.compare("c", launches(speeds), launches([faster * s for s in speeds]), promise)


def test_medians_intervals_and_launches() -> None:
    result = throughput.compare("c", launches((100, 104, 96)), launches((130, 150, 128, 132), gpus=1))
    assert (result.baseline, result.candidate, result.ratio) == (100, 131, 1.31)
    assert result.values_candidate == (130, 150, 128, 132)
    assert result.launches == (3, 4)
    assert 128 / 104 <= result.ratio_low < 1.31 < result.ratio_high <= 150 / 96
    assert result.latency["ttft_p50"] == pytest.approx((10, (1000 / 132 + 1000 / 130) / 2))
    (low, high), _ = result.latency_intervals["ttft_p50"]
    assert low < 10 < high
    assert (result.p_promise, result.p_short, result.promise) == (None, None, None)


def test_a_promise_of_more_is_significant_when_every_launch_is_faster() -> None:
    result = compare(1.3, 1.2)
    # 4 launches against 4 can be dealt out in 70 ways; this one is the clearest.
    assert result.p_faster == pytest.approx(1 / 70)
    assert result.p_promise == pytest.approx(1 / 70)
    assert result.p_short == 1


def test_goodput_only_where_every_launch_reports_it() -> None:
    both = throughput.compare("c", launches(SLOW, goodput=3.5), launches(SLOW, goodput=3.5))
    assert both.goodput == (3.5, 3.5)
    assert throughput.compare("c", launches(SLOW, goodput=3.5), launches(SLOW)).goodput is None


def test_what_cannot_be_compared() -> None:
    with pytest.raises(MeasurementError, match="4 baseline and 0 candidate launches"):
        throughput.compare("c", launches(SLOW), [])
    with pytest.raises(MeasurementError, match="launches of c, d cannot"):
        throughput.compare("c", launches(SLOW), launches(SLOW, cell="d"))
    with pytest.raises(MeasurementError, match="launches on 1 and 2 GPUs"):
        throughput.compare("c", launches(SLOW), launches(SLOW, gpus=2))
    with pytest.raises(MeasurementError, match=r"put out 0\.0 tokens"):
        throughput.compare("c", launches(SLOW, output_throughput=0.0), launches(SLOW))
