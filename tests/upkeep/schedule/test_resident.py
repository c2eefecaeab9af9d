"""What a resident scheduler looks at when; its clock is the test's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quantmint.pipeline.upkeep.schedule.resident import Schedules

SATURDAY = datetime(2026, 3, 28, 2, tzinfo=UTC)  # 03:00 in Berlin, the day before its clocks go ahead
WEEKLY = {"schedule": "0 3 * * 6", "timezone": "Europe/Berlin"}
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@dataclass
class Scene:
    """Recipes in ./recipes and a scheduler. ``told`` are the recipes that it found broken."""

    told: list[str] = field(default_factory=list)

    def recipe(self, name: str, **refresh: object) -> Path:
        path = Path("recipes") / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        section = json.dumps(refresh)  # which is YAML
        path.write_text(f"name: {name}\nextends: tiny-ptpc-fp8kv\nrefresh: {section}\n", encoding="utf-8")
        return path

    def start(self, *given: str, at: datetime = SATURDAY - HOUR) -> list[str]:
        """The recipes that are looked at right away."""
        self.schedules = Schedules(given, lambda event, text, **facts: self.told.append(str(facts["recipe"])))
        return sorted(plan.given for plan in self.schedules.start(at))

    def came(self, at: datetime) -> list[str]:
        return sorted(plan.given for plan in self.schedules.came(at))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.chdir(tmp_path)
    return Scene()


def test_everything_is_looked_at_at_the_start_and_at_its_times_once_each(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY)
    scene.recipe("b", schedule="30 * * * *")
    scene.recipe("never")
    assert scene.start() == ["a", "b"]
    assert {name: time.astimezone(UTC) for name, time in scene.schedules.coming(SATURDAY - HOUR).items()} == {
        "a": SATURDAY,
        "b": SATURDAY - HOUR / 2,
    }
    assert scene.came(SATURDAY - HOUR / 2) == ["b"]
    assert scene.came(SATURDAY - timedelta(seconds=1)) == []
    assert scene.came(SATURDAY) == ["a"]
    assert scene.came(SATURDAY + timedelta(seconds=20)) == []
    after = scene.schedules.coming(SATURDAY)["a"].astimezone(UTC)
    assert after == SATURDAY + 7 * DAY - HOUR  # an hour less passes until 03:00 by the summer's clock


def test_named_recipes_are_asked_for_as_they_were_named(scene: Scene, tmp_path: Path) -> None:
    scene.recipe("a", **WEEKLY)
    path = scene.recipe("b", **WEEKLY).rename(tmp_path / "b.yaml")
    scene.recipe("c", **WEEKLY)
    scene.recipe("never")
    assert scene.start("a", str(path), "never") == sorted(["a", str(path)])
    assert scene.told == ["never"]


def test_a_machine_that_slept_looks_once(scene: Scene) -> None:
    scene.recipe("a", schedule="*/10 * * * *")
    scene.start()
    late = SATURDAY + 9 * HOUR + timedelta(minutes=7)
    assert scene.came(late) == ["a"]
    assert scene.came(late + timedelta(minutes=3)) == ["a"]


def test_the_hour_that_comes_twice_is_two_to_those_who_follow_the_clock(scene: Scene) -> None:
    scene.recipe("a", schedule="*/30 * * * *", timezone="Europe/Berlin")
    scene.recipe("b", schedule="30 2 * * *", timezone="Europe/Berlin")
    begin = datetime(2026, 10, 24, 23, 45, tzinfo=UTC)  # 01:45; from 03:00 it is 02:00 again
    scene.start(at=begin)
    came = [name for quarter in range(1, 10) for name in scene.came(begin + quarter * HOUR / 4)]
    assert came.count("a") == 5  # 02:00, 02:30, 02:00, 02:30, 03:00
    assert came.count("b") == 1


def test_recipes_come_go_and_change_while_it_runs(scene: Scene) -> None:
    first = scene.recipe("a", **WEEKLY)
    scene.start()
    assert not scene.schedules.changed()
    scene.recipe("b", schedule="5 3 * * 6", timezone="Europe/Berlin")
    first.unlink()
    assert scene.schedules.changed()
    scene.schedules.read()
    assert not scene.schedules.changed()
    assert list(scene.schedules.coming(SATURDAY)) == ["b"]
    assert scene.came(SATURDAY) == []
    assert scene.came(SATURDAY + timedelta(minutes=5)) == ["b"]


@pytest.mark.parametrize("broken", ["", "name: a\nextends: nowhere\n"])
def test_a_recipe_that_is_broken_meanwhile_keeps_its_schedule(scene: Scene, broken: str) -> None:
    path = scene.recipe("a", **WEEKLY)
    scene.start()
    path.write_text(broken, encoding="utf-8")
    scene.schedules.read()
    assert scene.told == ["a"]
    assert scene.came(SATURDAY) == ["a"]
    scene.recipe("a", schedule="0 4 * * 6", timezone="Europe/Berlin")
    scene.schedules.read()
    assert scene.came(SATURDAY + HOUR) == ["a"]


def test_one_that_was_broken_from_the_start_joins_when_it_is_repaired(scene: Scene) -> None:
    scene.recipe("a", **WEEKLY)
    base = scene.recipe("_base", schedule="nonsense")
    Path("recipes/b.yaml").write_text("name: b\nextends: _base\n", encoding="utf-8")
    scene.start()
    assert scene.told == ["b"]
    base.write_text("extends: tiny-ptpc-fp8kv\nrefresh: {schedule: 0 2 28 3 *}\n", encoding="utf-8")
    assert scene.schedules.changed()
    scene.schedules.read()
    assert scene.came(SATURDAY) == ["a", "b"]
