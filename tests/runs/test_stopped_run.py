"""A run that the canary stops: judged and shown, nothing long is measured, nothing published, and all of it is told."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.eval.report.model import PAGE
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.runs import planner
from quantmint.pipeline.runs.preflight import require_means
from quantmint.pipeline.runs.runner import run_plan
from quantmint.pipeline.stages.stage import Job

BROKEN = {"verdict": "FAIL", "reasons": ["agreement below 70.0%"]}
SOUND: dict[str, object] = {"verdict": "PASS", "reasons": []}
UP_TO_THERE = ["quantize", "canary-baseline", "canary-candidate"]
STOPPED = [*UP_TO_THERE, "gate", "report"]


@pytest.fixture
def stages(orchestra: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A short recipe whose canary says what it is told to, and the stages of its stopped run."""

    def make(canary: dict[str, object], *, verdict: str = "FAIL", option: object = None) -> list[Any]:
        begun = [
            orchestra.stage("quantize", option=option),
            orchestra.stage("canary-baseline", family="canary"),
            orchestra.stage("canary-candidate", "quantize", "canary-baseline", family="canary", result=canary),
        ]
        judged = {"verdict": verdict, "reasons": [*(canary["reasons"] or ["all is well"])]}  # type: ignore[misc]
        end = [
            orchestra.stage("gate", "canary-candidate", result=judged),
            orchestra.stage("report", "gate", "canary-candidate", work=write_page),
        ]
        monkeypatch.setattr(planner, "stopped_stages", lambda setting: [*begun, *end])
        return [
            *begun,
            orchestra.stage("evaluate-candidate", "quantize"),
            orchestra.stage("bench", "quantize"),
            orchestra.stage("gate", "canary-candidate", "evaluate-candidate", "bench", result=judged),
            orchestra.stage("report", "gate", "bench"),
            orchestra.stage("publish", "report"),
        ]

    return make


def write_page(job: Job) -> None:
    (job.path / PAGE).write_text("a page")


def test_a_broken_checkpoint_is_judged_and_shown_and_no_more(orchestra: Any, stages: Any) -> None:
    outcome = orchestra.run(*stages(BROKEN))
    assert orchestra.ran == STOPPED
    assert [step.planned.key for step in outcome.steps] == STOPPED
    assert (outcome.verdict, outcome.exit_code, outcome.stopped) == (Verdict.FAIL, 1, "canary-candidate")
    assert "    stopped by canary-candidate: nothing more is measured, and nothing published" in orchestra.lines
    assert "[4/5] gate: started" in orchestra.lines


def test_one_that_may_be_sound_ends_undecided(orchestra: Any, stages: Any) -> None:
    outcome = orchestra.run(*stages({**BROKEN, "verdict": "INCONCLUSIVE"}, verdict="INCONCLUSIVE"))
    assert orchestra.ran == STOPPED
    assert (outcome.verdict, outcome.exit_code, outcome.stopped) == (Verdict.INCONCLUSIVE, 3, "canary-candidate")


def test_a_later_run_makes_nothing_and_says_the_same(orchestra: Any, stages: Any) -> None:
    first = orchestra.run(*stages(BROKEN))
    again = orchestra.run(*stages(BROKEN))
    assert orchestra.ran == STOPPED
    assert all(step.cached for step in again.steps)
    assert [step.entry for step in again.steps] == [step.entry for step in first.steps]
    assert (again.verdict, again.exit_code, again.stopped) == (first.verdict, first.exit_code, first.stopped)


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        ("canary-baseline", UP_TO_THERE[:2]),
        ("canary", UP_TO_THERE),
        ("bench", UP_TO_THERE),
        ("gate", STOPPED[:-1]),
        ("report", STOPPED),
        (None, STOPPED),
    ],
)
def test_until_ends_a_stopped_run_too(orchestra: Any, stages: Any, until: str | None, expected: list[str]) -> None:
    plan = planner.cut(orchestra.plan(*stages(BROKEN)), until)
    outcome = run_plan(plan, orchestra.setting, PlainReporter())
    assert orchestra.ran == expected
    reached = "canary-candidate" in expected
    assert (outcome.verdict, outcome.exit_code) == ((Verdict.FAIL, 1) if reached else (None, 0))
    assert (outcome.stopped is not None) == reached
    assert (orchestra.last_run.verdict, orchestra.last_run.exit_code) == (("FAIL", 1) if reached else (None, 0))


def test_the_reference_runtime_needs_no_vllm_but_its_packages(
    orchestra: Any, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = orchestra.plan(*stages(SOUND))
    setting = orchestra.setting
    evaluation = setting.recipe.evaluation.model_copy(update={"runtime": "reference"})
    loaded = replace(setting.loaded, recipe=setting.recipe.model_copy(update={"evaluation": evaluation}))
    without = replace(setting, vllm=None, loaded=loaded)
    asked = tuple(planned for planned in plan if planned.key == "canary-baseline")
    require_means(asked, without)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "quantmint.pipeline.runs.preflight.find_spec", lambda name: None if name == "torch" else real(name)
    )
    with pytest.raises(UserError, match="this needs torch, which is not installed"):
        require_means(asked, without)


def test_the_command_says_so(orchestra: Any, stages: Any, quantmint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.preflight.require_means", lambda *_: None)
    monkeypatch.setattr(
        "quantmint.pipeline.runs.session.find_vllm", lambda explicit=None: SimpleNamespace(version="0.32.0")
    )
    orchestra.plan(*stages(BROKEN))
    store = orchestra.setting.store.root
    ended = quantmint("run", "r.yaml", "--store", store, "--json")
    assert ended.code == 1
    assert (ended.json["verdict"], ended.json["stopped"]) == ("FAIL", "canary-candidate")
    assert ended.json["reasons"] == ["agreement below 70.0%"]
    assert ended.json["checkpoint"] is None
    assert [stage["stage"] for stage in ended.json["stages"]] == STOPPED
    short = quantmint("run", "r.yaml", "--store", store, "--until", "canary")
    assert short.code == 1
    assert "FAIL  r\n  agreement below 70.0%" in short.out
    listed = quantmint("runs", "--store", store, "--json").json
    assert [(run["verdict"], run["exit_code"], run["facts"]["stopped"]) for run in listed] == [
        ("FAIL", 1, "canary-candidate")
    ] * 2
    explained = quantmint("explain", "r.yaml", "--store", store, "--json").json
    assert [(stage["stage"], stage["state"]) for stage in explained] == [(key, "cached") for key in STOPPED]
