"""A round from its requests to its summary, with real children."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.verdict import Verdict
from pipeline.fleet.attempt import attempt
from pipeline.fleet.events import Event
from pipeline.fleet.job import Job
from pipeline.fleet.requests import Request
from pipeline.fleet.summary import Summary
from pipeline.refresh.due import Due
from pipeline.refresh.state import RecipeState
from tests.fleet.staged import Stage, by_name


def test_by_priority_and_then_by_name(stage: Stage) -> None:
    for name, priority in (("b", 0), ("a", 0), ("c", 7), ("d", -1)):
        stage.recipe(name, priority=priority)
    summary = stage.run(jobs=1)
    began = sorted("abcd", key=lambda name: stage.seen(name)[0]["began"])
    assert began == ["c", "a", "b", "d"]
    assert [ended.recipe for ended in summary.ended] == began
    assert summary.exit_code == 0
    assert stage.told("a") == ["queued", "started", "finished"]
    assert stage.locks() == []


def test_what_passed_is_remembered_and_the_next_round_does_nothing(stage: Stage) -> None:
    stage.recipe("a")
    ended = by_name(stage.run())["a"]
    assert (ended.state, ended.verdict, ended.tag, ended.attempts) == ("ran", "PASS", "v20261121-00000001", 1)
    state = stage.state("a")
    assert (state.last_verdict, state.last_exit, state.tag) == ("PASS", 0, "v20261121-00000001")
    assert state.last_attempt == state.last_success == state.released is not None
    assert by_name(stage.run())["a"].state == "current"
    assert len(stage.seen("a")) == 1


def test_a_verdict_is_no_failure_and_the_worst_code_counts(stage: Stage) -> None:
    for word in ("pass", "fail", "inconclusive", "invalid"):
        stage.recipe(word, word)
    stage.recipe("gone", "broken the disk is full")
    summary = stage.run(jobs=2)
    found = {name: (ended.state, ended.verdict, ended.exit_code) for name, ended in by_name(summary).items()}
    assert found == {
        "pass": ("ran", "PASS", 0),
        "fail": ("ran", "FAIL", 1),
        "inconclusive": ("ran", "INCONCLUSIVE", 3),
        "invalid": ("ran", "INVALID", 4),
        "gone": ("failed", None, 5),
    }
    assert summary.exit_code == 5
    assert by_name(summary)["fail"].reason == "lost 5 %"
    assert by_name(summary)["gone"].reason == "the disk is full"
    assert len(stage.seen("gone")) == 1, "a fault that stays is not tried again"
    assert stage.state("fail").not_before is None
    assert stage.state("gone").not_before is not None


def test_what_is_not_due_is_not_run(stage: Stage) -> None:
    stage.recipe("held")
    stage.judged("held", Verdict.FAIL)
    stage.broken("no-such")
    stage.recipe("good")
    summary = stage.run("held", "no-such", "good")
    found = {name: (ended.state, ended.exit_code) for name, ended in by_name(summary).items()}
    assert found == {"held": ("held", 1), "no-such": ("broken", 2), "good": ("ran", 0)}
    assert summary.exit_code == 2
    assert stage.told("held") == ["held"]
    assert not (stage.store / "refresh" / "held.json").exists()


def test_all_runs_what_was_judged_but_not_what_is_broken(stage: Stage) -> None:
    stage.recipe("held")
    stage.judged("held", Verdict.FAIL)
    stage.broken("no-such")
    summary = stage.run("held", "no-such", everything=True)
    assert {ended.state for ended in summary.ended} == {"ran", "broken"}


def test_a_recipe_that_was_looked_at_with_others_is_looked_at_again_under_its_lock(stage: Stage) -> None:
    stage.recipe("a")
    stage.recipe("b")

    def hear(event: Event) -> None:
        if (event.kind, event.recipe) == ("started", "a"):
            (stage.children / "b.done").touch()  # another fleet made it

    fleet = stage.fleet(hear, jobs=1)
    fleet.add([Request("b"), Request("a")])
    fleet.close()
    assert by_name(fleet.run())["b"].state == "current"
    assert stage.seen("b") == []
    assert stage.looks == [("b", "a"), ("a",), ("b",)]


def test_stages_and_logs(stage: Stage) -> None:
    stage.recipe("a", f"wait {stage.folder / 'go'}")

    def hear(event: Event) -> None:
        if event.kind == "stage":
            (stage.folder / "go").touch()

    fleet = stage.fleet(hear)
    fleet.add([Request("a")])
    fleet.close()
    ended = by_name(fleet.run())["a"]
    assert [event.stage for event in stage.events if event.kind == "stage"] == ["1/2 quantize"]
    assert "quantize: started" in Path(str(ended.log)).read_text()


def test_the_last_logs_are_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.fleet.attempt._KEPT", 2)
    stage.recipe("a", "transient")
    ended = by_name(stage.run(retries=3, first_wait_s=0.001))["a"]
    assert len(stage.seen("a")) == 4
    logs = sorted((stage.store / "refresh" / "logs" / "a").iterdir())
    assert len(logs) == 2
    assert str(logs[-1]) == ended.log


def test_requests_that_come_while_it_runs(stage: Stage) -> None:
    stage.recipe("a", f"wait {stage.folder / 'go'}")
    stage.recipe("b")
    rounds: list[Summary] = []
    over = threading.Event()

    def on_round(summary: Summary) -> None:
        rounds.append(summary)
        over.set()

    fleet = stage.fleet(jobs=2, on_round=on_round)
    worker = threading.Thread(target=fleet.run)
    worker.start()
    fleet.add([Request("a", "schedule")])
    fleet.add([Request("a"), Request("b")])  # a is queued already
    (stage.folder / "go").touch()
    assert over.wait(20)
    over.clear()
    fleet.add([Request("b")])  # another round, for there was nothing left to do
    assert over.wait(20)
    fleet.close()
    worker.join(20)
    assert not worker.is_alive()
    ended = [[(one.recipe, one.state) for one in summary.ended] for summary in rounds]
    assert sorted(entry for summary in ended[:-1] for entry in summary) in (
        [("a", "ran"), ("b", "ran")],
        [("a", "current"), ("a", "ran"), ("b", "ran")],  # the second request came after the first had ended
    )
    assert ended[-1] == [("b", "current")]
    assert len(stage.seen("a")) == len(stage.seen("b")) == 1


def test_the_summary_is_kept(stage: Stage) -> None:
    stage.recipe("a", "crash no module named x")
    summary = stage.run()
    (path,) = (stage.store / "refresh" / "rounds").iterdir()
    kept = json.loads(path.read_text())
    assert kept["exit_code"] == summary.exit_code == 5
    assert kept["ended"][0]["reason"] == "ended by exit code 1: ValueError: no module named x"
    assert kept["ended"][0]["log"].endswith(".log")


def test_only_so_many_rounds_are_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.fleet.summary._KEPT", 3)
    for _ in range(5):
        stage.run()
    assert len(list((stage.store / "refresh" / "rounds").iterdir())) == 3


def test_a_secret_that_a_child_prints_is_not_repeated(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")
    stage.recipe("a", "crash denied for very-secret-value and hf_abcdefghijklmnopqrstuv at https://u:p@host/x")
    ended = by_name(stage.run())["a"]
    assert ended.reason.endswith("denied for [secret] and [secret] at https://host/x")


def test_a_look_that_breaks_fails_its_recipes_and_nothing_else(stage: Stage) -> None:
    def look(_recipes: Sequence[str]) -> tuple[Due, ...]:
        raise RuntimeError("a fault of ours")

    fleet = stage.fleet(look=look)
    fleet.add([Request("a")])
    fleet.close()
    (ended,) = fleet.run().ended
    assert (ended.state, ended.exit_code, ended.reason) == ("failed", 5, "RuntimeError: a fault of ours")


def test_what_was_made_again_is_not_made_again_once_more(stage: Stage) -> None:
    stage.recipe("a")
    due = Due("a", "a", "due", "", stages=tuple((key, "cached") for key in ("calibrate", "evaluate-b", "evaluate-c")))
    job = Job(Request("a"), due, RecipeState(name="a"), since=0.0, ready=0.0)
    assert job.left_of(["evaluate", "calibrate"]) == ["evaluate", "calibrate"]
    job.made = frozenset({"evaluate-b", "calibrate"})
    assert job.left_of(["evaluate", "calibrate", "gate"]) == ["evaluate-c", "gate"]


def test_which_stages_a_child_made(stage: Stage) -> None:
    log = stage.folder / "a.log"
    said = ("[1/9] source: cached: x", "[2/9] calibrate: done in 3.0 s: y", "[3/9] quantize: started")
    code = "import sys; sys.stderr.write(sys.argv[1])"
    attempted = attempt(
        [sys.executable, "-I", "-S", "-c", code, "\n".join(said)],
        log,
        environment={},
        grace_s=1.0,
        limit_s=None,
        stop=threading.Event(),
        on_stage=lambda _: None,
    )
    assert attempted.finished == {"calibrate"}
