"""`quantmint requantize` as a person calls it; what is due is staged, and children do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import quantmint.pipeline.commands.requantize  # noqa: F401  (it binds the real `look`, before a test stages one)
from quantmint.pipeline.upkeep.due.due import Due
from quantmint.pipeline.upkeep.fleet.jobs import Options
from tests.upkeep.fleet.staged import Stage

Quantmint = Callable[..., Any]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path)

    def look(recipes: Sequence[str], **_: object) -> tuple[Due, ...]:
        return made.look(recipes)

    monkeypatch.setattr("quantmint.pipeline.upkeep.due.due.look", look)
    monkeypatch.setattr(Options, "command_line", lambda _, recipe: [*made.options().program, "run", recipe])
    return made


def test_a_round(stage: Stage, quantmint: Quantmint) -> None:
    stage.recipe("a")
    stage.recipe("b", "fail")
    stage.broken("c")
    ended = quantmint("requantize", "a", "b", "c", "--store", stage.store, "--jobs", 2)
    assert ended.code == 2
    assert "a: queued: base a -> b\n" in ended.err
    assert "b: FAIL in" in ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert ["a", "PASS", "0"] in [words[:3] for words in lines]
    assert ["b", "FAIL", "1"] in [words[:3] for words in lines]
    assert "c: c.yaml:3:1: found x" in ended.out
    assert "b: lost 5 %" in ended.out
    again = quantmint("requantize", "a", "--store", stage.store)
    assert (again.code, len(stage.seen("a"))) == (0, 1)


def test_as_json(stage: Stage, quantmint: Quantmint) -> None:
    stage.recipe("a", "broken no such flag")
    ended = quantmint("requantize", "a", "--store", stage.store, "--json", "--max-disk", 1)
    assert ended.code == 5
    told = ended.json
    (one,) = told["ended"]
    assert (one["state"], one["reason"], one["changes"]) == ("failed", "no such flag", ["base a -> b"])
    assert told["grown_bytes"] > 0


def test_what_would_run(stage: Stage, quantmint: Quantmint) -> None:
    stage.recipe("a")
    stage.recipe("b", priority=3)
    stage.recipe("long")
    stage.remember("long", last_duration_s=7200.0)
    stage.recipe("done")
    (stage.children / "done.done").touch()
    ended = quantmint("requantize", *stage.recipes, "--store", stage.store, "--dry-run", "--max-hours", 1)
    assert ended.code == 0
    rows = [line.split() for line in ended.out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[1] for row in rows] == ["b", "a"]
    assert "long: left: it took 2 h 00 min the last time, and 1 h 00 min are left" in ended.out
    assert "done: current: nothing changed" in ended.out
    assert not stage.seen("a")
    told = quantmint("requantize", "a", "--store", stage.store, "--dry-run", "--json").json
    assert [(run["recipe"], run["needs"], run["reason"]) for run in told["runs"]] == [("a", 0, "base a -> b")]


def test_what_is_wrong_with_a_command(stage: Stage, quantmint: Quantmint) -> None:
    assert quantmint("requantize", "--store", stage.store).code == 2, "no recipe is named, and ./recipes has none"
    for words in (["--jobs", 0], ["--max-hours", 0]):
        assert quantmint("requantize", "a", *words).code == 2
    for words in (["--on", "head:8265"], ["--on", "ray://head"]):
        assert quantmint("requantize", "a", "--store", stage.store, *words).code == 2
