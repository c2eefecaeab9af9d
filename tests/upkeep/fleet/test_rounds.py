"""A round from its requests to its summary, with real children, on devices that another fleet may want too."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.upkeep.due.due import Due
from quantmint.pipeline.upkeep.fleet.devices import Devices, take
from quantmint.pipeline.upkeep.fleet.records import RoundSummary
from tests.upkeep.fleet.staged import Stage, by_name


def test_by_priority_and_then_by_name(stage: Stage) -> None:
    for name, priority in (("b", 0), ("a", 0), ("c", 7), ("d", -1)):
        stage.recipe(name, priority=priority)
    summary = stage.run(jobs=1)
    began = sorted("abcd", key=lambda name: stage.seen(name)[0]["began"])
    assert began == ["c", "a", "b", "d"]
    assert [ended.recipe for ended in summary.ended] == began
    assert summary.exit_code == 0
    first, second, third = stage.told("a")
    assert (first, second) == ("queued: base a -> b", "started")
    assert re.fullmatch(r"PASS in \d+\.\d s, released v20261121-00000001", third), third
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


def test_what_is_not_due_is_not_run(stage: Stage) -> None:
    stage.recipe("held")
    stage.judged("held", Verdict.FAIL)
    stage.broken("no-such")
    stage.recipe("good")
    summary = stage.run("held", "no-such", "good")
    found = {name: (ended.state, ended.exit_code) for name, ended in by_name(summary).items()}
    assert found == {"held": ("held", 1), "no-such": ("broken", 2), "good": ("ran", 0)}
    assert summary.exit_code == 2
    assert stage.told("held") == ["held: judged before"]
    assert not (stage.store / "refresh" / "held.json").exists()


def test_a_recipe_that_was_looked_at_with_others_is_looked_at_again_under_its_lock(stage: Stage) -> None:
    stage.recipe("a")
    stage.recipe("b")

    def hear(line: str) -> None:
        if line == "a: started":
            (stage.children / "b.done").touch()  # another fleet made it

    assert by_name(stage.fleet(hear, jobs=1).run(["b", "a"]))["b"].state == "current"
    assert stage.seen("b") == []
    assert stage.looks == [("b", "a"), ("a",), ("b",)]


def test_stages_and_logs(stage: Stage) -> None:
    stage.recipe("a", f"wait {stage.folder / 'go'}")

    def hear(line: str) -> None:
        if line == "a: [1/2 quantize]":
            (stage.folder / "go").touch()

    ended = by_name(stage.fleet(hear).run(["a"]))["a"]
    assert "quantize: started" in Path(str(ended.log)).read_text()


def test_a_recipe_that_is_named_twice_runs_once(stage: Stage) -> None:
    stage.recipe("a")
    ended = stage.fleet(look=lambda recipes: tuple(stage.look(["a"] * len(recipes)))).run(["a", "a.yaml"]).ended
    assert [(one.recipe, one.state) for one in ended] == [("a", "ran")]
    assert stage.warnings == ["a.yaml: a is queued already"]


def test_no_more_is_begun_than_the_disk_allows(stage: Stage) -> None:
    for name in "abc":
        stage.recipe(name, f"grow {stage.store}")
    summary = stage.run(jobs=1, max_disk=150_000)
    assert {name: one.state for name, one in by_name(summary).items()} == {"a": "ran", "b": "ran", "c": "left"}
    assert by_name(summary)["c"].reason == "the round's disk is used up"
    assert (summary.grown_bytes or 0) >= 200_000


def test_an_order_to_stop_that_comes_first(stage: Stage) -> None:
    stage.recipe("a")
    fleet = stage.fleet()
    fleet.stop(signal.SIGTERM)
    summary = fleet.run(["a"])
    assert [ended.state for ended in summary.ended] == ["interrupted"]
    assert (summary.exit_code, stage.looks) == (143, [])


def test_a_fault_of_the_look_tells_no_secret(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-for-a-webhook")

    def look(_: Sequence[str]) -> tuple[Due, ...]:
        raise RuntimeError("https://me:pw@proxy refused\nAuthorization: Bearer not-for-a-webhook")

    (ended,) = stage.fleet(look=look).run(["a"]).ended
    assert ended.reason == "RuntimeError: https://proxy refused Authorization: Bearer [secret]"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``devices(4)``: the machine has so many Instinct GPUs."""

    def have(count: int) -> None:
        found = Devices("HIP_VISIBLE_DEVICES", {number: str(number) for number in range(count)})
        monkeypatch.setattr("quantmint.pipeline.upkeep.fleet.rounds.devices_of", lambda *_: found)

    return have


def test_each_has_as_many_as_its_target(stage: Stage, devices: Callable[[int], None]) -> None:
    devices(4)
    stage.recipe("two", f"wait {stage.folder / 'go'}", gpus=2, priority=2)
    stage.recipe("one", gpus=1, priority=1)
    stage.recipe("cpu")
    stage.recipe("eight", gpus=8)

    def hear(line: str) -> None:
        if line.startswith("cpu: PASS"):
            (stage.folder / "go").touch()  # all three ran beside each other

    ended = by_name(stage.fleet(hear).run(tuple(stage.recipes)))
    assert {name: stage.seen(name)[0]["devices"] for name in ("two", "one", "cpu")} == {
        "two": ["0,1", None],
        "one": ["2", None],
        "cpu": ["-1", None],
    }
    assert (ended["eight"].state, ended["eight"].exit_code) == ("failed", 2)
    assert ended["eight"].reason == "its target has 8 devices, and this fleet has 4"
    assert stage.locks() == []


def test_two_fleets_and_one_device(stage: Stage, devices: Callable[[int], None]) -> None:
    devices(1)
    for name in "abcd":
        stage.recipe(name, gpus=1)
    summaries: list[RoundSummary] = []
    runs = [partial(lambda names: summaries.append(stage.fleet().run(names)), names) for names in ("ab", "cd")]
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended.verdict or "" for summary in summaries for ended in summary.ended) == ["PASS"] * 4
    spans = sorted((stage.seen(name)[0]["began"], stage.ends(name)[0]) for name in "abcd")
    assert all(ended < began for (_, ended), (began, _) in pairwise(spans)), "never two at a time"
    assert stage.locks() == []


def test_a_device_that_another_fleet_has_is_left_to_it(stage: Stage, devices: Callable[[int], None]) -> None:
    devices(2)
    stage.recipe("a", gpus=1)
    held = take(stage.store, (0,))
    assert held is not None
    assert by_name(stage.run())["a"].verdict == "PASS"
    assert stage.seen("a")[0]["devices"] == ["1", None]
    held.close()
