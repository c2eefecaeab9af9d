"""How often a sweep recommends what does nothing, and finds what does something, where the truth is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scipy.stats import binom

from quantmint.eval.measurements import CellResult
from quantmint.eval.workloads import Cell, Workload
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.serving.tuning import runner
from quantmint.pipeline.serving.tuning.contest import ALPHA, Contest, contest_of, simplest, standings
from quantmint.pipeline.serving.tuning.report import TuningReport, report
from quantmint.pipeline.serving.tuning.runner import run_sweep
from quantmint.pipeline.serving.tuning.space import BASE, Axis, Point, SweepTrial
from quantmint.pipeline.serving.tuning.subject import TuningSubject
from quantmint.pipeline.serving.tuning.sweep import Design, KnobSweep, Objective
from quantmint.pipeline.serving.tuning.trials import Budget, TrialResult
from quantmint.pipeline.store.tree import Store
from tests.serving.tuning.sweeping import FakeVllm, planner_for

TEN_VALUES = (Axis("--a", tuple(map(str, range(10)))),)
TEN_KNOBS = tuple(Axis(f"--k{number}", ("1",)) for number in range(10))
NOISE = 0.01
RUNS = 400


def outcome(speed: float) -> TrialResult:
    cell = CellResult("c", 1, 0, 1.0, speed, speed, *(1000 / speed,) * 8)
    return TrialResult("ok", 1.0, "s", {"c": cell})


Simulate = Callable[..., KnobSweep]


@pytest.fixture
def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """A whole sweep whose launches are drawn: a normal error around the plan's speed, and a drift a launch."""

    def sweep(
        axes: tuple[Axis, ...],
        rng: np.random.Generator,
        effects: Mapping[tuple[str, str], float] = MappingProxyType({}),
        *,
        drift: float = 0.0,
        goal: Any = "throughput",
        **design: Any,
    ) -> KnobSweep:
        count = 0

        def drawn(subject: TuningSubject, store: Store, payload: Any, plan: Any, *_: Any) -> Any:
            nonlocal count
            count += 1
            words = plan(tmp_path).argv
            speed = 1000.0 * (1 + drift * count) * (1 + NOISE * rng.standard_normal())
            for (knob, value), factor in effects.items():
                if knob in words and words[words.index(knob) + 1] == value:
                    speed *= factor
            return outcome(speed), tmp_path

        monkeypatch.setattr(runner, "measure_stored", drawn)
        subject = TuningSubject(
            "fake", tmp_path, "a" * 64, "cpu:1", "cpu",
            Workload("w", "", "throughput", (Cell("c", 8, 4, 2, 4, 1),)), FakeVllm(tmp_path),  # type: ignore[arg-type]
            MappingProxyType({"cpu": "fake", "cores": "2"}), planner_for(tmp_path, {}),
        )  # fmt: skip
        found = KnobSweep(subject, Design(axes, **design), Objective(goal))
        run_sweep(found, Store(tmp_path / "store"), Budget(None), Mock(spec=PlainReporter))
        return found

    return sweep


def of(sweep: KnobSweep) -> TuningReport:
    return report(sweep, Budget(None), created="2026-01-02T03:04:05+00:00", existing={}, tunableop=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "drift", "goal"),
    [
        (TEN_VALUES, 0.0, "throughput"),
        (TEN_KNOBS, 0.0, "throughput"),
        (TEN_VALUES, 0.0, "latency"),
        (TEN_VALUES, 0.001, "throughput"),  # a machine that gets faster by 2.5 % in the course of a sweep
    ],
)
def test_of_sweeps_without_any_effect_one_in_twenty_names_a_winner_at_most(
    simulate: Simulate, axes: tuple[Axis, ...], drift: float, goal: str
) -> None:
    rng = np.random.default_rng(20)
    winners = sum(simulate(axes, rng, drift=drift, goal=goal).best() != BASE for _ in range(RUNS))
    # As many as the luckiest of a thousand series of sweeps that err in exactly 5 % of cases would have, and no more.
    assert winners <= binom.ppf(0.999, RUNS, ALPHA), f"{winners / RUNS:.1%} of the sweeps name a winner"
    print(f"{axes[0].knob} {goal} drift {drift}: {winners / RUNS:.1%}")  # noqa: T201


@pytest.mark.slow
@pytest.mark.parametrize("axes", [TEN_VALUES, TEN_KNOBS])
def test_a_gain_of_five_percent_is_found_among_ten_values(simulate: Simulate, axes: tuple[Axis, ...]) -> None:
    rng = np.random.default_rng(21)
    effective = (axes[-1].knob, axes[-1].values[-1])
    sweeps = [simulate(axes, rng, {effective: 1.05}) for _ in range(RUNS)]  # type: ignore[dict-item]
    hits = sum(effective in (sweep.best() or BASE) for sweep in sweeps)
    assert hits >= 0.9 * RUNS, f"{hits / RUNS:.1%} of the sweeps find it"
    print(f"{axes[0].knob}: found in {hits / RUNS:.1%}")  # noqa: T201


def test_the_screening_alone_would_name_winners_in_noise(simulate: Simulate) -> None:
    rng = np.random.default_rng(22)
    sweeps = [simulate(TEN_VALUES, rng) for _ in range(40)]
    screenings = [
        replace(sweep, results={trial: seen for trial, seen in sweep.results.items() if not trial.contest})
        for sweep in sweeps
    ]
    assert sum(screening.favourite() != BASE for screening in screenings) >= 12
    assert sum(sweep.best() != BASE for sweep in sweeps) <= 4
    assert all(screening.best() == BASE for screening in screenings)


def test_the_report_says_what_could_not_be_told_apart(simulate: Simulate) -> None:
    rng = np.random.default_rng(23)
    nothing = next(of(sweep) for _ in range(50) if (sweep := simulate(TEN_VALUES, rng)).contest is not None)
    assert nothing["best"] == 0
    contested = nothing["contest"][0]
    assert not contested["better"]
    assert any(
        line.startswith(f"{contested['label']} cannot be told apart from base plan: ") for line in nothing["undecided"]
    )
    assert any(line.startswith("Screened only") for line in nothing["undecided"])
    effects = {("--a", "3"): 1.2, ("--a", "4"): 1.2}
    twins = of(simulate(TEN_VALUES, rng, effects))
    labels = {"a 3", "a 4"}
    (best,) = labels & {twins["points"][twins["best"]]["label"]}
    (twin,) = labels - {best}
    assert any(line.startswith(f"{twin} cannot be told apart from {best}: ") for line in twins["undecided"])
    assert "at least; 4 launches each by turns, p = 0.043)" in twins["verdict"]


def test_a_cut_budget_proves_nothing_and_says_so(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner._Runner, "contest", lambda *_: None)
    sweep = simulate(TEN_VALUES, np.random.default_rng(24), {("--a", "3"): 1.2})
    assert sweep.best() == BASE
    assert sweep.favourite() == (("--a", "3"),)


def test_finalists_take_turns_and_share_no_launch_with_another_contest() -> None:
    a, b = (("--a", "1"),), (("--b", "1"),)
    contest = contest_of([a, b], None)
    assert contest.launches == 4  # 1/70 is below 5 % of two finalists, 1/20 is not
    points = [trial.point for trial in contest.trials()]
    assert points == [BASE, a, b, b, a, BASE, b, a, BASE, BASE, a, b]
    assert contest_of([a], None).launches == 3
    assert contest_of([a], 7).launches == 7
    assert not {*contest.trials()} & {*contest_of([a], None).trials(), SweepTrial(a), SweepTrial(BASE)}
    assert len(set(contest.trials())) == 12


def test_p_values_are_corrected_for_the_number_of_finalists() -> None:
    a, b, c = ((("--a", value),) for value in "123")
    scores: dict[Point, list[float]] = {BASE: [1.0, 1.01, 0.99, 1.02]}
    scores |= {a: [1.1, 1.2, 1.15, 1.12], b: [1.1, 0.98, 1.2, 1.3], c: []}
    table = standings(Contest((a, b, c), 4), scores)
    assert table[a].p == pytest.approx(3 / 70)
    assert table[b].p == pytest.approx(2 * 12 / 70, rel=0.5)
    assert table[b].p > 2 / 70
    assert (table[a].better, table[b].better, c in table) == (True, False, False)
    assert table[a].low == pytest.approx(1.1 / 1.02)
    assert standings(Contest((a,), 4), {a: [1.0]}) == {}


def test_of_proven_plans_the_simplest_that_is_no_worse_is_recommended() -> None:
    one, both = (("--a", "1"),), (("--a", "1"), ("--b", "1"))
    near = {one: [1.20, 1.22, 1.19, 1.21], both: [1.21, 1.23, 1.18, 1.24]}
    assert simplest([one, both], near) == one
    assert simplest([one, both], near | {both: [1.3, 1.31, 1.32, 1.33]}) == both
    assert simplest([one], near) == one


def test_a_plan_that_breaks_a_limit_in_its_turns_is_not_recommended(simulate: Simulate) -> None:
    sweep = simulate(TEN_VALUES, np.random.default_rng(25), {("--a", "3"): 1.2})
    assert sweep.best() == (("--a", "3"),)
    assert replace(sweep, objective=Objective(max_ttft=0.1)).best() is None
