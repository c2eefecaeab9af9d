"""The guides' sentences beside what was measured: shown, never judged."""

from __future__ import annotations

import dataclasses
import doctest

import pytest

from quantmint.eval.gate import Policy, judge, judgement
from quantmint.eval.gate.judgement import claims
from quantmint.eval.measurements import Measurements
from quantmint.eval.verdict import Verdict


def test_claims_are_about_this_kind_of_checkpoint() -> None:
    assert claims(weights="e4m3", kv_cache="auto") == {"memory_fp8": 2.0, "throughput": 1.6}
    assert claims(weights="e2m1", kv_cache="fp8") == {"memory_mxfp4": 4.0, "kv_tokens_fp8": 2.0, "throughput": 1.6}
    assert claims(weights="int8", kv_cache="auto") == {"throughput": 1.6}
    assert doctest.testmod(judgement).failed == 0


def test_promised_stands_beside_measured(measurements: Measurements, policy: Policy) -> None:
    rows = {row.name: row for row in judge(measurements, policy).headlines}
    assert rows["memory_fp8"].measured == pytest.approx(16_060_522_496 / 9_083_392_000)
    assert rows["kv_tokens_fp8"].measured == 2.0
    assert rows["throughput"].measured == pytest.approx(13120 / 9875, rel=0.01)  # the better cell
    assert {name: row.kept for name, row in rows.items()} == {
        "memory_fp8": False,
        "kv_tokens_fp8": True,
        "throughput": False,
    }
    assert all(row.source.startswith("ROCm") for row in rows.values())
    judged = judge(measurements, policy)
    assert judged.verdict is Verdict.PASS
    assert "throughput" in [row.name for row in judged.claims]
    assert "throughput" not in [row.name for row in dataclasses.replace(judged, hardware="cpu").claims]


def test_a_figure_that_rounds_to_the_guides_keeps_it(measurements: Measurements, policy: Policy) -> None:
    for baseline, kept in ((1960, True), (1940, False)):
        nearly = dataclasses.replace(measurements, weights=(baseline, 1000))
        rows = {row.name: row for row in judge(nearly, policy).headlines}
        assert rows["memory_fp8"].kept is kept


def test_what_was_not_measured_is_neither_kept_nor_broken(measurements: Measurements, policy: Policy) -> None:
    bare = dataclasses.replace(measurements, launches=(), weights=(0, 0))
    rows = judge(bare, policy).headlines
    assert [(row.measured, row.kept) for row in rows] == [(None, None)] * 3
    assert all(row.promised > 1 for row in rows)


def test_a_claim_of_a_later_table_is_left_out(measurements: Measurements, policy: Policy) -> None:
    later = dataclasses.replace(measurements, claims={"latency": 1.1})
    assert judge(later, policy).headlines == ()


@pytest.mark.parametrize("weights", [(1000, 0), (0, 1000)])
def test_bytes_of_one_side_alone_say_nothing(
    measurements: Measurements, policy: Policy, weights: tuple[int, int]
) -> None:
    judged = judge(dataclasses.replace(measurements, weights=weights), policy)
    rows = {row.name: row for row in judged.headlines}
    assert (rows["memory_fp8"].measured, rows["memory_fp8"].kept) == (None, None)
