"""Recipes beside each other on the devices of one machine, which another fleet may want too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest

from pipeline.fleet.devices import Device, Devices, give_back, take
from pipeline.fleet.events import Event
from pipeline.fleet.requests import Request
from pipeline.fleet.summary import Summary
from tests.fleet.staged import Stage, by_name


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``devices(4)``: the machine has so many Instinct GPUs."""

    def have(count: int) -> None:
        found = Devices("HIP_VISIBLE_DEVICES", tuple(Device(number, str(number)) for number in range(count)))
        monkeypatch.setattr("pipeline.fleet.round.devices_of", lambda *_: found)

    return have


def test_each_has_as_many_as_its_target(stage: Stage, devices: Callable[[int], None]) -> None:
    devices(4)
    stage.recipe("two", f"wait {stage.folder / 'go'}", gpus=2, priority=2)
    stage.recipe("one", gpus=1, priority=1)
    stage.recipe("cpu")
    stage.recipe("eight", gpus=8)

    def hear(event: Event) -> None:
        if event.kind == "finished" and event.recipe == "cpu":
            (stage.folder / "go").touch()  # all three ran beside each other

    fleet = stage.fleet(hear)
    fleet.add(Request(name) for name in stage.recipes)
    fleet.close()
    ended = by_name(fleet.run())
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
    summaries: list[Summary] = []
    fleets = [stage.fleet(), stage.fleet()]
    for fleet, names in zip(fleets, ("ab", "cd"), strict=True):
        fleet.add(Request(name) for name in names)
        fleet.close()
    threads = [threading.Thread(target=lambda fleet=fleet: summaries.append(fleet.run())) for fleet in fleets]
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
    held = take(stage.store, (0,), {})
    assert held is not None
    assert by_name(stage.run())["a"].verdict == "PASS"
    assert stage.seen("a")[0]["devices"] == ["1", None]
    give_back(held)
