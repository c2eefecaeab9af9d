"""What goes wrong in a night: kills, hangs, networks, budgets, other fleets, full disks, broken files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

from quantmint.pipeline.base.processes import stop_signals
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.upkeep.due.due import Due
from tests.upkeep.fleet.staged import Stage, alive, by_name

FLEET = Path(__file__).with_name("staged_fleet.py")
ROOT = Path(__file__).parents[3]


def until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + 30
    while not condition():
        assert monotonic() < deadline
        sleep(0.02)


@contextmanager
def other_fleet(stage: Stage, *recipes: str) -> Iterator[subprocess.Popen[str]]:
    """A fleet in another process, whose children have begun."""
    argv = [sys.executable, "-m", "tests.upkeep.fleet.staged_fleet", str(stage.folder), *recipes]
    with subprocess.Popen(argv, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: all((stage.children / f"{name}.pids").exists() for name in recipes))
            yield process
        finally:
            process.kill()


def pids(stage: Stage, name: str) -> list[int]:
    return [int(pid) for pid in (stage.children / f"{name}.pids").read_text().split()]


def test_a_killed_fleet_takes_its_children_with_it_and_the_next_one_takes_over_at_once(stage: Stage) -> None:
    stage.recipe("a", "hang", "pass")
    with other_fleet(stage, "a") as process:
        process.kill()
        process.wait()
        until(lambda: not any(map(alive, pids(stage, "a"))))
    began = monotonic()
    assert by_name(stage.run("a"))["a"].verdict == "PASS"
    assert monotonic() - began < 30, "the lock of a dead process is not waited for"
    assert stage.locks() == []
    assert list((stage.store / "refresh" / "logs" / "a").glob("*.out")) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_fleet_that_is_told_to_stop(stage: Stage, number: signal.Signals, code: int) -> None:
    stage.recipe("a", "hang", "pass")
    stage.recipe("b", "stubborn", "pass")
    with other_fleet(stage, "a", "b") as process:
        os.kill(process.pid, number)
        os.kill(process.pid, number)  # the second one does not disturb the end
        assert process.wait(30) == code
    assert not any(map(alive, pids(stage, "a") + pids(stage, "b")))
    assert stage.locks() == []
    state = stage.state("a")
    assert state.attempts_failed == 0, "to be stopped is no failure"
    assert by_name(stage.run("a"))["a"].verdict == "PASS"


def test_stopped_while_one_runs_and_one_waits(stage: Stage) -> None:
    stage.recipe("a", "hang")
    stage.recipe("b")

    def hear(line: str) -> None:
        if line == "a: [1/2 quantize]":
            fleet.stop(signal.SIGTERM)

    fleet = stage.fleet(hear, jobs=1)
    summary = fleet.run(["a", "b"])
    assert {ended.state for ended in summary.ended} == {"interrupted"}
    assert summary.exit_code == 143
    assert stage.seen("b") == []


@pytest.mark.parametrize("looks", [1, 2])
def test_stopped_while_it_looks(stage: Stage, looks: int) -> None:
    """Nothing that is asked of a network is waited for, neither at first nor under the recipe's lock."""
    stage.recipe("a")

    def look(recipes: Sequence[str]) -> tuple[Due, ...]:
        found = stage.look(recipes)
        if len(stage.looks) == looks:
            os.kill(os.getpid(), signal.SIGTERM)
            sleep(60)
        return found

    fleet, began = stage.fleet(look=look), monotonic()
    with stop_signals(fleet.stop):
        summary = fleet.run(["a"])
    assert monotonic() - began < 30
    assert [(ended.state, ended.attempts) for ended in summary.ended] == [("interrupted", 0)]
    assert (summary.exit_code, stage.seen("a"), stage.locks()) == (143, [], [])


def test_a_child_that_hangs_is_ended_and_the_others_go_on(stage: Stage) -> None:
    stage.recipe("a", "stubborn", max_hours=0.5 / 3600)
    stage.recipe("b")
    ended = by_name(stage.run(jobs=1))
    assert (ended["a"].state, ended["a"].exit_code, ended["a"].attempts) == ("failed", 5, 1)
    assert "refresh.max_hours" in ended["a"].reason
    assert not any(map(alive, pids(stage, "a")))
    assert ended["b"].verdict == "PASS"


def test_a_fault_that_passes_is_waited_out_without_a_slot(stage: Stage) -> None:
    stage.recipe("a", "transient", "transient", "pass")
    stage.recipe("b")
    ended = by_name(stage.run(jobs=1, first_wait_s=0.3))
    assert (ended["a"].state, ended["a"].attempts) == ("ran", 3)
    first, second, _ = stage.seen("a")
    assert first["began"] < stage.seen("b")[0]["began"] < second["began"], "b ran while a waited"


@pytest.mark.slow
def test_a_fault_that_never_passes_ends_and_is_counted_by_rounds(stage: Stage) -> None:
    stage.recipe("a", "transient the Hub answers 503")
    stage.recipe("b")
    ended = by_name(stage.run(first_wait_s=0.01))
    assert (ended["a"].state, ended["a"].attempts, ended["a"].exit_code) == ("failed", 4, 5)
    assert ended["a"].reason == "the Hub answers 503"
    assert ended["b"].verdict == "PASS"
    state = stage.state("a")
    assert (state.attempts_failed, state.reason) == (1, "the Hub answers 503")
    assert by_name(stage.run("a", first_wait_s=0.01))["a"].state == "failed"
    assert stage.state("a").attempts_failed == 2


def test_no_more_is_begun_than_the_time_allows_and_the_rest_is_ended(stage: Stage) -> None:
    stage.recipe("a", "hang", priority=1)
    stage.recipe("b")
    stage.recipe("long")
    stage.remember("long", last_duration_s=3600.0)
    summary = stage.run(jobs=1, max_hours=1.5 / 3600)
    ended = by_name(summary)
    assert {name: one.state for name, one in ended.items()} == dict.fromkeys(("a", "b", "long"), "left")
    assert ended["long"].reason.startswith("it took 1 h 00 min the last time")
    assert (ended["a"].attempts, ended["b"].attempts) == (1, 0)
    assert stage.state("a").attempts_failed == 0
    assert not any(map(alive, pids(stage, "a")))


def test_a_recipe_that_another_fleet_has_is_waited_for_and_then_found_made(stage: Stage) -> None:
    stage.recipe("a")
    stage.recipe("z")
    folder = stage.store / "refresh"
    folder.mkdir(parents=True)
    other = Lock(folder / "a.lock")
    other.acquire()

    def hear(line: str) -> None:
        if line.startswith("z: PASS"):
            (stage.children / "a.done").touch()
            other.release()

    summary = stage.fleet(hear, jobs=1).run(["a", "z"])
    assert [(ended.recipe, ended.state) for ended in summary.ended] == [("z", "ran"), ("a", "current")]
    assert stage.told("a") == [
        "queued: base a -> b",
        "waits: another process works on it",
        "current: nothing changed",
    ]


def test_a_recipe_that_another_fleet_has_is_left(stage: Stage) -> None:
    stage.recipe("a")
    (stage.store / "refresh").mkdir(parents=True)
    with Lock(stage.store / "refresh" / "a.lock"):
        summary = stage.run(wait=False)
    assert (by_name(summary)["a"].state, summary.exit_code) == ("elsewhere", 0)


def test_a_display_that_breaks_leaves_no_child_and_no_lock(stage: Stage) -> None:
    stage.recipe("a", "hang")

    def hear(line: str) -> None:
        if "[" in line:
            until((stage.children / "a.pids").exists)
            raise RuntimeError("a display broke")

    with pytest.raises(RuntimeError, match="a display broke"):
        stage.fleet(hear).run(["a"])
    until(lambda: not any(map(alive, pids(stage, "a"))))
    assert stage.locks() == []
