"""What the runner keeps, makes again, stops and tells."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.errors import (
    InspectionError,
    InvalidMeasurementError,
    QuantmintError,
    ServingError,
    StageError,
    StoreError,
    UserError,
)
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.stages.stage import Job


@pytest.fixture
def chain(orchestra: Any) -> Callable[..., list[Any]]:
    """Three stages, one after the other; options are those of the middle one."""

    def make(**options: Any) -> list[Any]:
        return [
            orchestra.stage("first"),
            orchestra.stage("second", "first", **options),
            orchestra.stage("third", "second"),
        ]

    return make


def raising(error: BaseException) -> Callable[[Job], None]:
    def work(job: Job) -> None:
        (job.path / "piece").write_text("finished piece")
        raise error

    return work


def test_a_second_run_makes_nothing(orchestra: Any, chain: Any) -> None:
    first = orchestra.run(*chain())
    again = orchestra.run(*chain())
    assert orchestra.ran == ["first", "second", "third"]
    assert [step.cached for step in first.steps] == [False] * 3
    assert [step.cached for step in again.steps] == [True] * 3
    assert [step.entry for step in again.steps] == [step.entry for step in first.steps]
    assert first.exit_code == again.exit_code == 0
    assert orchestra.lines[-1] == "[3/3] third: cached: made third"


def test_an_edit_in_the_middle_keeps_what_is_before_it(orchestra: Any, chain: Any) -> None:
    orchestra.run(*chain(option=1))
    orchestra.run(*chain(option=2))
    assert orchestra.ran == ["first", "second", "third", "second", "third"]
    orchestra.run(*chain(option=1))
    assert len(orchestra.ran) == 5, "what was made before is still there"


@pytest.mark.parametrize("name", ["second", "family"])
def test_redo_makes_one_stage_again(orchestra: Any, chain: Any, name: str) -> None:
    orchestra.run(*chain(family="family"))
    outcome = orchestra.run(*chain(family="family"), redo=[name])
    assert orchestra.ran == ["first", "second", "third", "second"]
    assert [step.cached for step in outcome.steps] == [True, False, True]


def test_what_lies_outside_the_store_is_made_again_when_it_is_gone(orchestra: Any, chain: Any) -> None:
    outside = Path("outside")
    options = {"work": lambda job: outside.write_text("there"), "whole": lambda entry: outside.exists()}
    orchestra.run(*chain(**options))
    orchestra.run(*chain(**options))
    assert len(orchestra.ran) == 3
    outside.unlink()
    orchestra.run(*chain(**options))
    assert orchestra.ran[3:] == ["second"]
    orchestra.run(*chain(**options))
    assert len(orchestra.ran) == 4


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (StageError("the disk melted"), StageError, 5),
        (InvalidMeasurementError("half of the answers are missing"), InvalidMeasurementError, 4),
        (UserError("no such device"), UserError, 2),
        (ZeroDivisionError("division by zero"), StageError, 5),
        (OSError(errno.ENOSPC, "No space left on device"), StoreError, 5),
        (KeyboardInterrupt(), KeyboardInterrupt, 130),
        (ValueError("Field 'a':\n  KeyboardInterrupt:"), KeyboardInterrupt, 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_way_to_break(
    orchestra: Any, chain: Any, error: BaseException, kind: type[BaseException], code: int
) -> None:
    with pytest.raises(kind) as caught:
        orchestra.run(*chain(work=raising(error)))
    run = orchestra.last_run
    assert run.finished is not None
    assert (run.verdict, run.exit_code) == (None, code)
    assert run.facts["error"] == ("interrupted" if code == 130 else caught.value.message)  # type: ignore[attr-defined]
    if isinstance(caught.value, QuantmintError):
        assert caught.value.exit_code == code
    assert orchestra.committed(*chain()) == ["first"]

    seen: list[str] = []
    orchestra.run(*chain(work=lambda job: seen.append((job.path / "piece").read_text())))
    assert seen == ["finished piece"], "what the stage had finished is there when it goes on"
    assert orchestra.ran == ["first", "second", "second", "third"]


def test_the_log_of_a_run(orchestra: Any, chain: Any) -> None:
    stages = chain()
    outcome = orchestra.run(*stages)
    run = orchestra.last_run
    assert run.id == outcome.run
    assert run.recipe == "r"
    assert run.plan == tuple((p.stage.family, p.fingerprint) for p in orchestra.plan(*stages))
    assert (run.verdict, run.exit_code) == (None, 0)
    assert {key: facts["cached"] for key, facts in run.facts["stages"].items()} == dict.fromkeys(
        ["first", "second", "third"], False
    )


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_pass_is_published(orchestra: Any, verdict: Verdict) -> None:
    stages = [
        orchestra.stage("gate", result={"verdict": verdict.value}),
        orchestra.stage("report", "gate"),
        orchestra.stage("publish", "report"),
    ]
    for _ in range(2):
        outcome = orchestra.run(*stages)
        assert outcome.verdict is verdict
        assert outcome.exit_code == verdict.exit_code
        assert (outcome.entry("publish") is not None) == (verdict is Verdict.PASS)
        assert outcome.entry("report") is not None, "a report is written for every verdict"
    assert ("publish" in orchestra.ran) == (verdict is Verdict.PASS)
    assert (orchestra.last_run.verdict, orchestra.last_run.exit_code) == (verdict.value, verdict.exit_code)
    skipped = f"    not published: the verdict is {verdict.value}" in orchestra.lines
    assert skipped == (verdict is not Verdict.PASS)


def test_an_unsound_checkpoint_goes_no_further(orchestra: Any) -> None:
    stages = [
        orchestra.stage("quantize"),
        orchestra.stage("inspect", "quantize", result={"verdict": "FAIL", "reasons": ["scales: NaN"]}),
        orchestra.stage("serve-candidate", "inspect"),
    ]
    for _ in range(2):
        with pytest.raises(InspectionError, match="neither served nor published") as caught:
            orchestra.run(*stages)
        assert caught.value.exit_code == 1
        assert orchestra.last_run.exit_code == 1
    assert orchestra.ran == ["quantize", "inspect"], "found wrong once, not inspected again"


class FakeLauncher:
    """Counts the servers that run."""

    running: list[str]

    def __init__(self, executable: Path) -> None:
        self.executable = executable

    def launch_in_background(self, plan: Any, log: Path, **_: Any) -> FakeLauncher:
        self.model = plan.served_model_name
        return self

    def __enter__(self) -> Any:
        from types import SimpleNamespace

        if self.model == "does not start":
            raise ServingError("it did not start")
        FakeLauncher.running.append(self.model)
        assert len(FakeLauncher.running) == 1, "two servers at once"
        server = SimpleNamespace(started_seconds=1.0, base_url="http://127.0.0.1:1")
        return lambda: server

    def __exit__(self, *error: object) -> None:
        FakeLauncher.running.remove(self.model)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    FakeLauncher.running = []
    monkeypatch.setattr("quantmint.pipeline.stages.servers.LocalLauncher", FakeLauncher)
    return FakeLauncher.running


def serving(side: str, model: str = "", then: BaseException | None = None) -> Callable[[Job], None]:
    def work(job: Job) -> None:
        job.servers.get(side, LaunchPlan({}, ("vllm", "serve"), model or side, 1, ()))
        assert FakeLauncher.running == [model or side]
        if then is not None:
            raise then

    return work


def test_stages_of_a_side_share_a_server(orchestra: Any, launched: list[str]) -> None:
    orchestra.run(
        orchestra.stage("serve-candidate", work=serving("candidate")),
        orchestra.stage("evaluate-candidate", work=serving("candidate")),
        orchestra.stage("serve-baseline", work=serving("baseline")),
        orchestra.stage("evaluate-baseline", work=serving("baseline")),
    )
    assert launched == []
    assert len([line for line in orchestra.lines if "starting vLLM" in line]) == 2


@pytest.mark.parametrize(
    "error", [StageError("broke"), ValueError("ours"), OSError("disk"), KeyboardInterrupt(), SystemExit(1)]
)
def test_no_server_outlives_a_run(orchestra: Any, launched: list[str], error: BaseException) -> None:
    with pytest.raises((QuantmintError, KeyboardInterrupt, SystemExit)):
        orchestra.run(orchestra.stage("serve", work=serving("candidate", then=error)))
    assert launched == []
