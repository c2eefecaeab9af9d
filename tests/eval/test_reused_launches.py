"""Launches of an earlier series in the gate: what it takes for them, how it judges, and how often it errs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quantmint.eval import throughput
from quantmint.eval.errors import MeasurementError
from quantmint.eval.gate import Policy, judge
from quantmint.eval.gate.reach import detectable_shift, reach
from quantmint.eval.gate.report import GateReport
from quantmint.eval.gate.validity import check_launches, disagreement, is_sound
from quantmint.eval.measurements import CellResult, Launch, MachineState, Measurements, order, reusable, reuse_order
from quantmint.eval.suites import load
from quantmint.eval.verdict import Verdict
from tests.bench.gate import LAUNCHES
from tests.bench.reused_launches import NOISES, PROMISE, SHIFTS, drawn, verdicts
from tests.eval.measured import make_cell

BASELINE, CANDIDATE = (1000.0, 1004.0, 998.0, 1002.0), (1250.0, 1254.0, 1247.0, 1252.0)


def launch(side: Any, number: int, speed: float, **changes: Any) -> Launch:
    made = Launch(side, number, {"c": make_cell("c", speed)}, None, None, 1.0, None, MachineState())
    return replace(made, **changes)


def series(baseline: Any = BASELINE, candidate: Any = CANDIDATE, reused: int = 2, end: int = 1) -> tuple[Launch, ...]:
    """A series whose first launches are reused, in the order of its end (1: they agreed, 2: made anew)."""
    values = {"baseline": iter(baseline), "candidate": iter(candidate)}
    parts = reuse_order(len(candidate))
    sides = (*["baseline"] * reused, *parts[0], *parts[end])
    return tuple(launch(side, number, next(values[side]), reused=number < reused) for number, side in enumerate(sides))


@pytest.mark.parametrize("launches", range(4, 8))
def test_sides_of_a_series_are_balanced_whichever_its_end_is(launches: int) -> None:
    """A linear drift is the same on both sides, but for half a launch of an odd number."""
    start, agreed, disagreed = reuse_order(launches)
    counts = [Counter((*start, *end)) for end in (agreed, disagreed)]
    assert counts[0] == {"candidate": launches, "baseline": launches - reusable(launches)}
    assert counts[1] == {"candidate": launches, "baseline": launches}
    assert "baseline" not in agreed, "all fresh ones are there when they are compared"
    for end in (agreed, disagreed):
        places = {
            side: np.mean([n for n, other in enumerate((*start, *end)) if other == side])
            for side in ("baseline", "candidate")
        }
        assert abs(places["baseline"] - places["candidate"]) <= (0.5 if launches % 2 else 0)
    assert [reusable(launches) for launches in (3, 4, 5, 7, 8)] == [0, 2, 2, 3, 0]


def test_the_gate_takes_a_series_with_reused_launches(measurements: Measurements, policy: Policy) -> None:
    promised = replace(policy, min_ratio=1.2)
    report = judge(replace(measurements, launches=series()), promised)
    assert report.verdict is Verdict.PASS, report.reasons
    (cell,) = report.throughput
    assert (cell.reused, cell.launches) == (2, (4, 4))
    assert "4 launches a side, 2 of the baseline's reused" in "".join(report.reasons)
    assert GateReport.from_json(report.to_json()) == report
    anew = judge(replace(measurements, launches=series(reused=0, end=2)), promised)
    assert anew.verdict is Verdict.PASS, anew.reasons
    assert "reused" not in anew.to_json()["throughput"][0]


def test_launches_of_before_are_recorded_as_before() -> None:
    assert "reused" not in launch("baseline", 0, 1.0).to_json()
    (first, *_) = series()
    assert Launch.from_json(first.to_json()) == first


FAULTS = {
    "too many reused": (
        lambda made: [*made[:4], replace(made[4], reused=True), *made[5:]],
        "Launches 0, 1, 4 are reused, expected the first 2 at most",
    ),
    "in turn as if all were fresh": (
        lambda made: [replace(one, side=side) for one, side in zip(made, order(4), strict=True)],
        "expected AABBAABB",
    ),
    "another speed": (
        lambda made: (
            [replace(one, cells={"c": make_cell("c", 900.0 + n)}) for n, one in enumerate(made[:2])] + list(made[2:])
        ),
        "The reused launches disagree with the fresh ones: c had 900.5 tokens/s and has 1,000.0",
    ),
    "another backend": (
        lambda made: [replace(one, attention_backend="TRITON_ATTN") for one in made[:2]] + list(made[2:]),
        "the attention backend was TRITON_ATTN and is unknown",
    ),
    "another cell": (
        lambda made: [replace(one, cells={"d": make_cell("d", 1000.0)}) for one in made[:2]] + list(made[2:]),
        "c was not measured in all of them",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_reused_launches_that_void_a_series(measurements: Measurements, name: str) -> None:
    change, reason = FAULTS[name]
    changed = replace(measurements, launches=tuple(change(list(series()))))
    found = [finding.reason for finding in check_launches(changed)]
    assert any(reason in text for text in found), found


def test_clocks_of_a_gpu_must_be_alike() -> None:
    def at(clock: float) -> list[Launch]:
        return [launch("baseline", n, 1000.0, machine=MachineState(clock_mhz=clock)) for n in range(2)]

    assert disagreement(at(2000), at(1980), "mi300x") is None
    assert disagreement(at(2000), at(1800), "mi300x") == "the clock changed from 1,800 to 2,000 MHz"
    assert disagreement(at(2000), at(1800), "cpu") is None


def test_launches_that_would_void_a_series_are_not_sound() -> None:
    sound = launch("baseline", 0, 1000.0, client_cpu=0.5, server_cpu=0.8)
    cell = sound.cells["c"]
    assert is_sound(sound, ())
    for changes in (
        {"faults": ("default KV scales were used",)},
        {"machine": MachineState(throttled=("thermal",))},
        {"client_cpu": 0.99},
        {"server_cpu": 0.95},
        {"cells": {"c": replace(cell, failed=1)}},
    ):
        assert not is_sound(replace(sound, **changes), ()), changes
    late = replace(sound, cells={"c": replace(cell, peak_output_throughput=300.0)})
    assert not is_sound(late, ())
    assert is_sound(late, ("vllm", "serve", "MODEL", "--stream-interval", "10"))


def test_what_cannot_be_compared() -> None:
    def results(speeds: Any) -> list[CellResult]:
        return [make_cell("c", speed) for speed in speeds]

    sides = results(BASELINE), results(CANDIDATE)
    with pytest.raises(MeasurementError, match="1 fresh and 3 reused launches of the baseline, expected 2 fresh"):
        throughput.compare("c", *sides, 1.1, reused=3)
    with pytest.raises(MeasurementError, match="2 launches are reused in a series that may end early"):
        throughput.compare("c", *sides, 1.1, reused=2, looks=6)


@pytest.mark.parametrize("name", ["normal, 1 %", "one launch in ten 10 % slow"])
def test_the_simulated_rule_is_the_gates(name: str) -> None:
    """Run by run, at a shift where some reused launches agree and some do not."""
    rng = np.random.default_rng(9)
    made = drawn(NOISES[name], rng, 150, 4, 2, 1.01 * PROMISE, 0.015)
    passed, failed, anew = verdicts(made)
    assert 0 < anew.sum() < 150
    assert passed.any()
    for run in range(150):
        sides = [made.reused, made.fresh, made.candidate]
        reused, fresh, candidate = ([launch("baseline", 0, 1000 * speed) for speed in side[run]] for side in sides)
        assert (disagreement(reused, fresh, "mi300x") is not None) == anew[run]
        before, count = ([*reused, *fresh], 2)
        if anew[run]:
            before, candidate = (
                [launch("baseline", 0, 1000 * speed) for speed in side[run]]
                for side in (made.fresh_anew, made.candidate_anew)
            )
            count = 0
        cells = ([one.cells["c"] for one in side] for side in (before, candidate))
        cell = throughput.compare("c", *cells, PROMISE, reused=count)
        assert cell.p_promise is not None
        assert cell.p_short is not None
        assert (cell.p_promise <= 0.05 + 1e-12, cell.p_short <= 0.05 + 1e-12) == (passed[run], failed[run])
        assert (cell.ratio_low >= PROMISE, cell.ratio_high <= PROMISE) == (passed[run], failed[run])


@pytest.mark.slow
@pytest.mark.parametrize("launches", [4, 5, 7])
@pytest.mark.parametrize("cells", [1, 4])
@pytest.mark.parametrize("name", NOISES)
def test_a_shift_between_the_days_does_not_raise_the_errors(name: str, launches: int, cells: int) -> None:
    """At most 5 %, and 5.5 % where the candidate's launches lie twice as far apart, as with fresh launches only."""
    rng, runs = np.random.default_rng(launches), 4000
    limit = 0.055 if name.startswith("the candidate's") else 0.05
    for shift in SHIFTS:
        made = drawn(NOISES[name], rng, runs, launches, launches - launches // 2, PROMISE, shift)
        passed, failed, _ = verdicts(made, cells=cells)
        error = 3 * (limit * (1 - limit) / runs) ** 0.5
        assert max(passed.mean(), failed.mean()) < limit + error, shift


def test_the_rank_test_alone_would_err() -> None:
    rng = np.random.default_rng(2)
    made = drawn((LAUNCHES["normal, 1 %"], 1.0), rng, 4000, 4, 2, PROMISE, 0.015)
    assert verdicts(made, both_tests=False)[0].mean() > 0.06
    assert verdicts(made)[0].mean() < 0.05


def test_reach_of_reused_launches() -> None:
    """What is shown with 80 % is shown by the simulated rule as often, where the machine has not changed."""
    assert detectable_shift(4) < detectable_shift(4, reused=2) < 3
    policy = Policy(margins={}, min_ratio=1.1, launches=4)
    speed = reach(load("tiny"), policy, looks=1, reused=2).speed
    assert speed is not None
    assert speed.least is not None
    rng, runs = np.random.default_rng(3), 4000
    made = drawn((LAUNCHES["normal, 1 %"], 1.0), rng, runs, 4, 2, speed.least, 0.0)
    passed, _, anew = verdicts(made)
    assert passed[~anew].mean() == pytest.approx(0.8, abs=0.025)


def test_reach_of_launches_that_may_end_early() -> None:
    from quantmint.eval.statistics.ranks import decided

    policy = Policy(margins={}, min_ratio=1.1, launches=6, stop_early=True)
    speed = reach(load("tiny"), policy, looks=1, seen=1.2).speed
    fixed = reach(load("tiny"), replace(policy, stop_early=False), looks=1).speed
    assert speed is not None
    assert fixed is not None
    assert speed.least is not None
    assert fixed.least is not None
    assert speed.least > fixed.least
    assert speed.needed == 3
    rng, runs = np.random.default_rng(5), 2000
    baseline, candidate = np.exp(0.01 * rng.standard_normal((2, runs, 6)))
    shown = [
        decided(list(speed.least / 1.1 * after), list(before), 6, 0.05) is not None
        for before, after in zip(baseline, candidate, strict=True)
    ]
    assert np.mean(shown) == pytest.approx(0.8, abs=0.03)
