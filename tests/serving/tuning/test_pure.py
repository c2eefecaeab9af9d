"""Frontier, order of trials, knobs, budget, choice: what needs no server."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmint.eval.measurements import CellResult
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.times import parse_duration
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.tuning.space import (
    BASE,
    Axis,
    SweepTrial,
    parse_knob,
    same,
    value_in,
    without_base_values,
)
from quantmint.pipeline.serving.tuning.sweep import Design, KnobSweep, Objective, frontier, grid_size, screening_trials
from quantmint.pipeline.serving.tuning.trials import Budget, TrialResult

FIGURE = st.integers(1, 40).map(float)
POINTS = st.lists(st.tuples(FIGURE, FIGURE), min_size=1, max_size=40)
AXES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda counts: tuple(Axis(f"--k{n}", tuple(f"v{i}" for i in range(c))) for n, c in enumerate(counts))
)


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether ``one`` (more is better, less is better) is nowhere worse than ``other`` and somewhere better."""
    return one[0] >= other[0] and one[1] <= other[1] and one != other


@settings(deadline=None)
@given(POINTS)
def test_the_frontier_is_what_nothing_dominates(points: list[tuple[float, float]]) -> None:
    line = frontier(points)
    unbeaten = {point for point in points if not any(dominates(other, point) for other in points)}
    assert {points[index] for index in line} == unbeaten
    assert len(line) == len(unbeaten)  # one of each
    assert [points[index][1] for index in line] == sorted(points[index][1] for index in line)
    assert all(points[a][0] < points[b][0] for a, b in itertools.pairwise(line))


@settings(deadline=None)
@given(AXES, st.integers(1, 3), st.sampled_from(["one-at-a-time", "grid"]))
def test_every_mode_begins_with_the_base_plan_and_repeats_nothing(
    axes: tuple[Axis, ...], repeat: int, mode: Literal["one-at-a-time", "grid"]
) -> None:
    trials = screening_trials(Design(axes, mode, repeat))
    assert trials[0] == SweepTrial(BASE)
    assert trials[-1] == SweepTrial(BASE, repeat)
    assert len(set(trials)) == len(trials)
    singles = {(axis.knob, value) for axis in axes for value in axis.values}
    assert {trial.point for trial in trials[1 : len(singles) + 1]} == {(change,) for change in singles}
    if mode == "grid":
        assert len(trials) == repeat * grid_size(axes) + 1


def test_winners_are_the_best_value_of_each_knob_that_beats_noise() -> None:
    axes = (Axis("--a", ("1", "2")), Axis("--b", ("3",)))
    outcomes = {SweepTrial(BASE): outcome(100, 50), SweepTrial((("--b", "3"),)): outcome(120, 50)}
    outcomes |= {SweepTrial((("--a", value),)): outcome(speed, 50) for value, speed in (("1", 100.5), ("2", 130))}
    sweep = KnobSweep(None, Design(axes), Objective(), outcomes)  # type: ignore[arg-type]
    assert sweep.winners() == (("--a", "2"), ("--b", "3"))
    outcomes[SweepTrial((("--a", "2"),))] = outcome(99, 50)
    assert sweep.winners() == (("--b", "3"),)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--max-num-seqs=64,128", ("64", "128")),
        ("--max-num-batched-tokens=8k,64K,8192", ("8192", "65536")),
        ("--enforce-eager=on,off", (True, False)),
        ('--compilation-config={"mode": "FULL", "x": [1, 2]},{}', ('{"mode": "FULL", "x": [1, 2]}', "{}")),
        ("OMP_NUM_THREADS=1", ("1",)),
    ],
)  # fmt: skip
def test_knobs_of_the_command_line(text: str, values: tuple[object, ...]) -> None:
    assert parse_knob(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize("text", ["--max-num-seqs", "--max-num-seqs=", "=3"])
def test_knobs_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match="--knob"):
        parse_knob(text)


def test_values_of_the_base_plan_are_not_tried_again() -> None:
    argv = ("vllm", "serve", "M", "--max-num-seqs", "64", "--enforce-eager", "--compilation-config", '{"a":1}')
    plan = LaunchPlan(MappingProxyType({"OMP_NUM_THREADS": "2"}), argv, "model", 1, ())
    axes = (
        Axis("--max-num-seqs", ("64", "128")),
        Axis("--enforce-eager", (True, False)),
        Axis("OMP_NUM_THREADS", ("2",)),
        Axis("--compilation-config", ('{"a": 1}', '{"a": 2}')),
        Axis("--numa-bind", (True, False)),
    )
    left = {axis.knob: axis.values for axis in without_base_values(axes, plan)}
    assert left == {
        "--max-num-seqs": ("128",),
        "--enforce-eager": (False,),
        "--compilation-config": ('{"a": 2}',),
        "--numa-bind": (True,),
    }
    assert value_in(plan, "--max-num-seqs") == "64"
    assert same("1.0", "1") is True
    assert without_base_values([Axis("VLLM_X", ("0", "1"))], plan, lambda _: "0") == (Axis("VLLM_X", ("1",)),)


def test_durations() -> None:
    assert [parse_duration(text) for text in ("90m", "2h", "1h30m", "45 s")] == [5400, 7200, 5400, 45]
    for text in ("2", "h", "2 parsecs", "0m", ""):
        with pytest.raises(UserError, match="duration"):
            parse_duration(text)


@settings(deadline=None)
@given(st.lists(st.floats(1, 100), max_size=30), st.floats(10, 1000), st.floats(0, 500))
def test_a_sweep_whose_trials_take_what_was_expected_stays_within_its_budget(
    trials: list[float], limit: float, earlier: float
) -> None:
    now = [0.0]
    budget = Budget(limit, clock=lambda: now[0])
    budget.earlier = earlier
    budget.longest = max(trials, default=1.0)
    for seconds in trials:
        if not budget.affords(1 + 1):  # the closing launch of the base plan is kept in mind
            break
        now[0] += seconds
        assert budget.spent <= limit
        assert budget.affords(1)
    assert budget.spent == earlier + now[0]


def outcome(speed: float, wait: float, **more: object) -> TrialResult:
    cell = CellResult("c", 1, 0, 1.0, speed, speed, wait, 2 * wait, wait, wait, wait / 10, wait / 5, wait, wait)
    return TrialResult(status="ok", seconds=1.0, sweep="s", cells={"c": cell}, **more)  # type: ignore[arg-type]


def test_of_points_that_noise_cannot_tell_apart_the_one_with_fewer_changes_is_chosen() -> None:
    a, b, c = (("--a", "1"),), (("--b", "1"),), (("--a", "1"), ("--b", "1"))
    outcomes = {
        SweepTrial(BASE): outcome(100, 50),
        SweepTrial(BASE, 1): outcome(104, 50),
        SweepTrial(a): outcome(118, 50),
        SweepTrial(b): outcome(120, 50),
        SweepTrial(c): outcome(122, 50),
    }
    judge = KnobSweep(None, Design(()), Objective(), outcomes)  # type: ignore[arg-type]
    assert judge.score_noise() == pytest.approx(1.04)
    assert judge.favourite() == b
    outcomes[SweepTrial(c)] = outcome(130, 50)
    assert judge.favourite() == c
    assert replace(judge, objective=Objective("latency")).favourite() == BASE


@pytest.mark.parametrize(("goal", "best"), [("throughput", "--fast"), ("latency", "--quick")])
def test_objectives_weigh_speed_against_waiting(goal: object, best: str) -> None:
    outcomes = {
        SweepTrial(BASE): outcome(100, 100),
        SweepTrial(BASE, 1): outcome(100, 100),
        SweepTrial((("--fast", "1"),)): outcome(200, 300),
        SweepTrial((("--quick", "1"),)): outcome(50, 40),
        SweepTrial((("--both", "1"),)): outcome(160, 70),
    }
    sweep = KnobSweep(None, Design(()), Objective(goal), outcomes)  # type: ignore[arg-type]
    assert sweep.favourite() == ((best, "1"),)
