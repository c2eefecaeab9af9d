"""Whole sweeps against a stand-in whose best settings are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import ServingError
from quantmint.pipeline.serving.tuning.sweep import Objective
from quantmint.pipeline.store.gc import list_runs
from tests.serving.tuning.sweeping import run, starts, sweep_of

pytestmark = pytest.mark.slow

Surface = Callable[..., Path]
TWO = {"--max-num-batched-tokens": ["1024", "4096"], "--max-num-seqs": ["8", "32"]}
FACTORS = {"--max-num-batched-tokens": {"1024": 0.9, "4096": 1.2}, "--max-num-seqs": {"8": 0.7, "32": 1.3}}


def labels(report: Any) -> list[str]:
    return [point["label"] for point in report["points"]]


def test_one_at_a_time_finds_the_optimum_and_measures_it_before_it_recommends_it(surface: Surface) -> None:
    folder = surface(throughput=FACTORS, noise=0.01)
    found = run(folder, sweep_of(folder, TWO))
    assert labels(found) == [
        "base plan",
        "max-num-batched-tokens 1024",
        "max-num-seqs 8",
        "max-num-batched-tokens 4096",
        "max-num-seqs 32",
        "max-num-batched-tokens 4096, max-num-seqs 32",
    ]
    assert found["best"] == 5
    assert found["serve"] == {"knobs": {"--max-num-batched-tokens": 4096, "--max-num-seqs": 32}}
    assert len(starts(folder)) == 6 + 4 * 4  # the base plan twice; then three finalists and it by turns
    assert [row["better"] for row in found["contest"]] == [True, True, True]
    assert found["noise"] is not None
    assert found["noise"]["output_throughput"] > 1


def test_a_grid_finds_it_too(surface: Surface) -> None:
    folder = surface(throughput=FACTORS, noise=0.01)
    found = run(folder, sweep_of(folder, TWO, mode="grid"))
    assert found["serve"] == {"knobs": {"--max-num-batched-tokens": 4096, "--max-num-seqs": 32}}
    assert len(starts(folder)) == 10 + 4 * 4


def test_limits_come_before_speed(surface: Surface) -> None:
    folder = surface(
        throughput={"--max-num-seqs": {"8": 0.8, "32": 1.5}}, latency={"--max-num-seqs": {"8": 0.5, "32": 3.0}}
    )
    axes = {"--max-num-seqs": ["8", "32"]}
    assert run(folder, sweep_of(folder, axes))["serve"] == {"knobs": {"--max-num-seqs": 32}}
    assert run(folder, sweep_of(folder, axes, objective=Objective(max_ttft=200)))["best"] == 0
    limited = run(folder, sweep_of(folder, axes, objective=Objective(max_ttft=60)))
    assert limited["serve"] == {"knobs": {"--max-num-seqs": 8}}
    assert "the base plan does not keep a time to first token of 60 ms" in limited["verdict"]
    nothing = run(folder, sweep_of(folder, axes, objective=Objective(max_itl=0.1)))
    assert (nothing["best"], nothing["serve"]) == (None, None)
    assert len(starts(folder)) == 4 + 3 * 2  # another objective looks at the same trials


def test_what_does_not_start_or_must_not_be_judged_is_recorded_and_not_tried_again(surface: Surface) -> None:
    folder = surface(
        throughput={"--max-num-seqs": {"64": 9.0}},
        fail={"--max-num-seqs": ["7"]},
        crash={"--max-num-seqs": ["9"]},
        void={"--max-num-seqs": ["64"]},
    )
    axes: Any = {"--max-num-seqs": ["7", "64", "9"]}
    found = run(folder, sweep_of(folder, axes))
    _, failed, void, crashed = found["points"]
    assert "the server ended under in8-out4-c2: RuntimeError: the fake kernel met an illegal address" in crashed["why"]
    assert (failed["status"], void["status"]) == ("failed", "void")
    assert "the fake does not like that value" in failed["why"]
    assert "1.0" in void["why"]
    assert str(folder) not in json.dumps([failed["why"], failed["fix"]])
    assert found["best"] == 0
    before = len(starts(folder))
    run(folder, sweep_of(folder, axes))
    assert len(starts(folder)) == before


def test_a_base_plan_that_does_not_serve_ends_the_sweep(surface: Surface) -> None:
    folder = surface(fail={"--dtype": ["half"]})
    with pytest.raises(ServingError, match=r"base plan cannot be measured, so .*does not like that value"):
        run(folder, sweep_of(folder, {"--max-num-seqs": ["8"]}, base={"--dtype": "half"}))
    surface()
    assert run(folder, sweep_of(folder, {"--max-num-seqs": ["8"]}, base={"--dtype": "half"}))["best"] == 0


def test_other_knobs_take_over_the_trials_that_are_the_same(surface: Surface) -> None:
    folder = surface(throughput=FACTORS)
    run(folder, sweep_of(folder, {"--max-num-seqs": ["32"]}))
    assert len(starts(folder)) == 3 + 3 * 2
    run(folder, sweep_of(folder, TWO))
    assert len(starts(folder)) == 9 + 3 + 4 * 4  # the new values, and their finalists with the winners together
    run(folder, sweep_of(folder, TWO), redo=True)
    assert len(starts(folder)) == 28 + 6 + 4 * 4


def test_the_budget_is_kept_and_what_it_cut_off_is_named(surface: Surface) -> None:
    folder = surface(throughput=FACTORS, bench=1.0)
    found = run(folder, sweep_of(folder, TWO), budget=8.0)
    assert found["budget"]["spent"] is not None
    assert found["budget"]["spent"] < 8.0 + 15.0  # what a server may take to end
    assert found["not_tried"]
    done = [entry.get("--max-num-seqs", entry.get("--max-num-batched-tokens", "base")) for entry in starts(folder)]
    assert done[0] == done[-1] == "base"  # time for the closing one was kept
    assert len([knob for knob in done if knob != "base"]) + len(found["not_tried"]) == 4
    again = run(folder, sweep_of(folder, TWO), budget=8.0)
    assert len(starts(folder)) <= len(done) + 1  # the same command with the same budget is done, but for rounding
    assert set(again["not_tried"]) <= set(found["not_tried"])
    more = run(folder, sweep_of(folder, TWO), budget=60.0)
    assert more["not_tried"] == []
    assert more["best"] == 5


def test_the_garbage_collector_spares_trials(surface: Surface) -> None:
    from quantmint.pipeline.store.gc import plan_gc
    from quantmint.pipeline.store.tree import Store

    folder = surface(throughput=FACTORS)
    run(folder, sweep_of(folder, TWO))
    (log,) = list_runs(folder / "store")
    assert (log.recipe, log.exit_code) == ("tune fake", 0)
    plan = plan_gc(Store(folder / "store"), keep=1, now=4e9)
    assert [item.path for item in plan.remove if item.path.parent.name == "tune" and item.path.is_dir()] == []


def test_a_trial_that_outlasts_the_budget_is_ended_and_does_not_count(surface: Surface) -> None:
    folder = surface(bench=0.1)
    sweep = sweep_of(folder, {"--max-num-seqs": ["8"]})
    run(folder, sweep_of(folder, {}))
    surface(bench=60)
    found = run(folder, sweep, budget=3.0)
    assert found["not_tried"] == ["max-num-seqs 8"]
    assert labels(found) == ["base plan"]
