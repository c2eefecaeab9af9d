from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.schedule import resident
from pipeline.schedule.fires import fires_path, read_fires
from tests.schedule.scene import Clock, Scene

SATURDAY = datetime(2026, 3, 28, 2, tzinfo=UTC)  # 03:00 in Berlin, the day before its clocks go ahead
WEEKLY = {"schedule": "0 3 * * 6", "timezone": "Europe/Berlin"}
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nobody pulls the plug here
    scene = Scene(tmp_path / "store", Clock(SATURDAY - HOUR))
    scene.clock.rules(monkeypatch)
    yield scene
    scene.stop()


def test_a_recipe_is_asked_for_at_its_times_once_each(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY)
    scene.recipe("b", schedule="30 * * * *")
    scene.recipe("never")
    scene.start()
    assert scene.asked == []
    assert scene.planned == {"a": SATURDAY, "b": SATURDAY - HOUR / 2}
    scene.at(SATURDAY - HOUR / 2)
    scene.at(SATURDAY - timedelta(seconds=1))
    assert scene.asked == ["b"]
    scene.at(SATURDAY)
    scene.at(SATURDAY + timedelta(seconds=20))
    assert scene.asked == ["b", "a"]
    assert scene.planned["a"] == SATURDAY + 7 * DAY - HOUR  # an hour less passes until 03:00 by the summer's clock
    assert [line["time"] for line in scene.of("fired")] == ["2026-03-28T01:30:00Z", "2026-03-28T02:00:00Z"]
    assert scene.told[-1]["recipes"] == ["b"]


def test_named_recipes_are_asked_for_as_they_were_named(scene: Scene, tmp_path: Path) -> None:
    scene.recipe("a", **WEEKLY)
    path = scene.recipe("b", **WEEKLY).rename(tmp_path / "b.yaml")
    scene.recipe("c", **WEEKLY)
    scene.start("a", str(path))
    scene.at(SATURDAY)
    assert sorted(scene.asked) == sorted(["a", str(path)])


@pytest.mark.parametrize(("missed", "asked"), [("run", ["a"]), ("skip", [])])
def test_what_was_missed_while_none_ran_is_one_or_none(scene: Scene, missed: str, asked: list[str]) -> None:
    scene.recipe("a", **WEEKLY, missed=missed)
    scene.start()
    scene.stop()
    scene.clock.passes(100 * DAY)
    scene.start()
    assert scene.asked == asked
    (line,) = scene.of("missed")
    assert (line["run"], line["time"]) == (missed == "run", "2026-07-04T01:00:00Z")
    scene.stop()
    scene.start()
    assert scene.asked == asked + asked  # it did not come to its end, and none was begun that was left out
    assert len(scene.of("missed")) == 1
    scene.at(datetime(2026, 7, 11, 1, tzinfo=UTC))
    assert len(scene.asked) == 2 * len(asked) + 1  # the next comes as if nothing had been


def test_nothing_was_missed_before_the_first_scheduler(scene: Scene) -> None:
    scene.clock.passes(100 * DAY)
    scene.recipe("a", **WEEKLY)
    scene.start()
    assert (scene.asked, scene.of("missed")) == ([], [])


def test_a_restart_within_minutes_misses_nothing(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY, missed="skip")
    scene.start()
    scene.stop()
    scene.clock.passes(HOUR + timedelta(minutes=3))
    scene.start()
    assert scene.asked == ["a"]


def test_what_was_begun_goes_on_with_the_next_scheduler(scene: Scene) -> None:
    for name in ("killed", "stopped", "done"):
        scene.recipe(name, **WEEKLY, missed="skip")
    scene.start()
    scene.at(SATURDAY)
    scene.ends("done")
    scene.ends("stopped", "interrupted")
    scene.stop()
    scene.asked.clear()
    scene.clock.passes(DAY)
    scene.start()
    assert scene.asked == ["killed", "stopped"]
    assert [line["recipe"] for line in scene.of("resumed")] == ["killed", "stopped"]
    scene.ends("killed", "failed")
    scene.ends("stopped", "current")
    scene.stop()
    scene.start()
    assert scene.asked == ["killed", "stopped"]


def test_a_time_that_comes_after_the_end_is_not_settled_by_it(scene: Scene) -> None:
    scene.recipe("a", schedule="0 * * * *", missed="skip")
    scene.start()
    scene.at(SATURDAY)
    scene.ends("a")
    scene.at(SATURDAY + HOUR)
    fires = read_fires(scene.store, "a")
    assert fires is not None
    assert (fires.settled, fires.fired) == (SATURDAY, SATURDAY + HOUR)
    assert fires.unsettled


@pytest.mark.parametrize(("missed", "asked"), [("run", ["a"]), ("skip", [])])
def test_a_machine_that_slept_catches_up_once(scene: Scene, missed: str, asked: list[str]) -> None:
    scene.recipe("a", schedule="*/10 * * * *", missed=missed)
    scene.start()
    scene.clock.is_set(9 * HOUR + timedelta(minutes=7))
    scene.turn()
    assert scene.asked == asked
    assert [line["seconds"] for line in scene.of("clock")] == [9 * 3600 + 7 * 60]
    scene.at(scene.clock.now + timedelta(minutes=3))
    assert scene.asked == [*asked, "a"]


def test_the_hour_that_comes_twice_is_two_to_those_who_follow_the_clock(scene: Scene) -> None:
    scene.recipe("a", schedule="*/30 * * * *", timezone="Europe/Berlin")
    scene.recipe("b", schedule="30 2 * * *", timezone="Europe/Berlin")
    scene.clock.now = datetime(2026, 10, 24, 23, 45, tzinfo=UTC)  # 01:45; from 03:00 it is 02:00 again
    scene.start()
    for quarter in range(1, 10):
        scene.at(datetime(2026, 10, 24, 23, 45, tzinfo=UTC) + quarter * HOUR / 4)
        if quarter == 4:  # 02:45 of the first
            scene.stop()
            scene.start()
        scene.ends("a")
    assert scene.asked.count("a") == 5  # 02:00, 02:30, 02:00, 02:30, 03:00
    assert scene.asked.count("b") == 2  # its one time, and that it had not ended for the second scheduler


@pytest.mark.parametrize("back", [timedelta(seconds=2), HOUR / 2, 2.9 * HOUR])
def test_a_clock_that_is_put_back_brings_nothing_again(scene: Scene, back: timedelta) -> None:
    scene.recipe("a", schedule="0 * * * *")
    scene.start()
    scene.at(SATURDAY)
    scene.clock.is_set(-back)
    scene.turn()
    scene.stop()
    scene.start()  # nor from one that starts by such a clock
    scene.ends("a")
    scene.asked.clear()
    while scene.clock.now < SATURDAY + HOUR:
        assert scene.asked == []
        scene.at(scene.clock.now + timedelta(minutes=10))
    assert len(scene.asked) == 1


def test_a_clock_that_was_years_ahead_holds_nothing_up(scene: Scene) -> None:
    scene.recipe("a", schedule="0 * * * *")
    scene.clock.now += 900 * DAY
    scene.start()
    scene.at(scene.clock.now + HOUR)
    scene.asked.clear()
    scene.clock.is_set(-900 * DAY)
    scene.turn()
    assert scene.asked == []
    scene.at(scene.clock.now + HOUR)
    assert scene.asked == ["a"]


def test_a_store_from_a_clock_that_was_years_ahead_holds_nothing_up(scene: Scene) -> None:
    scene.recipe("a", schedule="0 * * * *")
    scene.clock.now += 900 * DAY
    scene.start()
    scene.stop()
    scene.clock.now -= 900 * DAY
    scene.start()
    scene.at(scene.clock.now + HOUR)
    assert scene.asked == ["a"]
    assert len(scene.of("clock")) == 1


def test_recipes_come_go_and_change_while_it_runs(scene: Scene) -> None:
    first = scene.recipe("a", **WEEKLY)
    scene.start()
    scene.recipe("b", **WEEKLY)
    scene.turn()
    assert sorted(scene.planned) == ["a", "b"]
    scene.recipe("b", schedule="5 3 * * 6", timezone="Europe/Berlin")
    first.unlink()
    scene.turn()
    assert scene.planned == {"b": SATURDAY + timedelta(minutes=5)}
    assert [line["recipe"] for line in scene.of("unscheduled")] == ["a"]
    scene.at(SATURDAY)
    assert scene.asked == []
    scene.at(SATURDAY + timedelta(minutes=5))
    assert scene.asked == ["b"]
    scene.at(SATURDAY + HOUR)
    scene.recipe("b", **WEEKLY)  # 03:00 has passed: it is not missed, for somebody was here
    scene.recipe("a", **WEEKLY)
    scene.turn()
    assert scene.asked == ["b"]


@pytest.mark.parametrize("broken", ["", "name: a\nextends: nowhere\n", "refresh: {schedule: 61 * * * *}\n", "[: \x00"])
def test_a_recipe_that_is_broken_meanwhile_keeps_its_schedule(scene: Scene, broken: str) -> None:
    path = scene.recipe("a", **WEEKLY)
    scene.start()
    path.write_text(broken, encoding="utf-8")
    scene.turn()
    scene.turn()
    (line,) = scene.of("broken")  # told once
    assert line["recipe"] == "a"
    scene.at(SATURDAY)
    assert scene.asked == ["a"]
    scene.recipe("a", schedule="0 4 * * 6", timezone="Europe/Berlin")
    scene.turn()
    scene.at(SATURDAY + HOUR)
    assert scene.asked == ["a", "a"]


def test_one_that_was_broken_from_the_start_joins_when_it_is_repaired(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY)
    base = scene.recipe("_base", schedule="nonsense")
    Path("recipes/b.yaml").write_text("name: b\nextends: _base\n", encoding="utf-8")
    scene.start()
    assert [line["recipe"] for line in scene.of("broken")] == ["b"]
    base.write_text("extends: tiny-ptpc-fp8kv\nrefresh: {schedule: 0 2 28 3 *}\n", encoding="utf-8")
    scene.turn()
    scene.at(SATURDAY)
    assert sorted(scene.asked) == ["a", "b"]


def test_a_full_disk_delays_nothing(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY)
    scene.start()
    folder = fires_path(scene.store, "a").parent
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way", encoding="utf-8")
    scene.at(SATURDAY)
    assert scene.asked == ["a"]
    assert [line["recipe"] for line in scene.of("fault")] == ["a"]


def test_a_disk_that_is_away_for_a_recipe_that_joins_loses_neither_it_nor_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(root: Path, name: str) -> None:
        raise StoreError("the disk is away")

    scene.recipe("a", **WEEKLY)
    scene.start()
    scene.recipe("b", **WEEKLY)
    with monkeypatch.context() as patch:
        patch.setattr(resident, "read_fires", away)
        scene.turn()
    scene.at(SATURDAY)
    assert sorted(scene.asked) == ["a", "b"]
    assert [line["message"] for line in scene.of("fault")] == ["the disk is away"]


def test_a_fault_of_ours_ends_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.recipe("a", **WEEKLY)
    scene.start()
    assert scene.resident is not None
    with monkeypatch.context() as patch:
        patch.setattr(scene.resident, "_reread", lambda: 1 / 0)
        scene.turn()
    assert [line["message"] for line in scene.of("fault")] == ["ZeroDivisionError: division by zero"]
    scene.at(SATURDAY)
    assert scene.asked == ["a"]


def test_two_on_one_store_each_ask_and_either_may_go(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY)
    other = Scene(scene.store, scene.clock)
    scene.start()
    other.start()
    scene.at(SATURDAY)
    other.turn()
    assert (scene.asked, other.asked) == (["a"], ["a"])  # the recipe's lock decides
    scene.ends("a")
    scene.stop()
    other.ends("a", "current")
    other.stop()
    scene.asked.clear()
    scene.start()
    assert scene.asked == []


def test_hundreds_of_times_leave_nothing_behind(scene: Scene) -> None:
    scene.recipe("a", schedule="0 * * * *")
    scene.start()

    def fire(times: int) -> int:
        for _ in range(times):
            scene.clock.passes(HOUR)
            scene.comes()
            scene.ends("a")
        assert len(scene.asked) == times
        scene.asked.clear()
        scene.told.clear()
        gc.collect()
        return len(gc.get_objects())

    threads = threading.active_count()
    before = fire(50)
    assert fire(300) - before < 150
    assert threading.active_count() == threads
    assert [path.name for path in fires_path(scene.store, "a").parent.iterdir()] == ["a.json"]
    assert json.loads(fires_path(scene.store, "a").read_text())["settled"] == scene.clock.now.isoformat()
