"""What a round may grow by is measured for beginnings: a walk over a large store takes seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from pipeline.fleet import budgets
from pipeline.fleet.budgets import Budgets
from pipeline.fleet.events import Event
from pipeline.fleet.requests import Options, Request
from pipeline.fleet.round import run
from pipeline.refresh.due import Due
from tests.refresh.world import World

CHILD = """
import json, pathlib, sys
for number in range(40):
    print(f"[{number + 1}/40] s{number}: started", file=sys.stderr, flush=True)
place = pathlib.Path(sys.argv[sys.argv.index("--store") + 1]) / sys.argv[1]
place.write_bytes(b"x" * 100_000)
print(json.dumps({"verdict": "PASS", "published": []}))
"""


def look(names: Sequence[str]) -> tuple[Due, ...]:
    return tuple(Due(name, name, "due", "its base moved", stages=(("source", "rerun"),), inputs=name) for name in names)


def test_a_round_measures_for_beginnings_and_sees_what_a_recipe_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its messages, and each second of a wait, woke it to walk the whole store."""
    really, happened = budgets.bytes_below, list[str]()

    def counted(folders: Iterable[Path], linked: set[tuple[int, int]] | None = None) -> int:
        happened.append("walk")
        return really(folders, linked)

    def hear(event: Event) -> None:
        happened.append(event.kind)

    monkeypatch.setattr(budgets, "bytes_below", counted)
    options = Options(store=tmp_path, jobs=1, max_disk=150_000, command=(sys.executable, "-S", "-c", CHILD))
    summary = run([Request(name) for name in ("a", "b", "c")], options, on_event=hear, look=look)
    assert [(ended.recipe, ended.state) for ended in summary.ended] == [("a", "ran"), ("b", "ran"), ("c", "left")]
    assert summary.ended[-1].reason == "the round's disk is used up"
    assert summary.grown_bytes is not None
    assert summary.grown_bytes >= 200_000
    first, last = happened.index("queued"), len(happened) - happened[::-1].index("finished")
    assert happened[first:last].count("walk") == 3  # for each of the three
    assert json.dumps(summary.to_json())


def test_a_release_that_is_linked_counts_once(tmp_path: Path) -> None:
    """Its files have a name in the store and one among the releases."""
    for place in ("store", "published"):
        (tmp_path / place).mkdir()
    (tmp_path / "store" / "old").write_bytes(b"x" * 40)
    (tmp_path / "published" / "old").hardlink_to(tmp_path / "store" / "old")
    made = Budgets(None, 100, began=0.0)
    made.watch([tmp_path / "store"])
    made.watch([tmp_path / "published"])
    assert made.grown_bytes() == 0
    (tmp_path / "store" / "new").write_bytes(b"x" * 10)
    (tmp_path / "published" / "new").hardlink_to(tmp_path / "store" / "new")
    assert made.grown_bytes() == 10


def test_a_folder_below_another_counts_once(tmp_path: Path) -> None:
    (tmp_path / "store" / "published").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    made = Budgets(None, 100, began=0.0)
    made.watch([tmp_path / "store"])
    made.watch([tmp_path / "store" / "published", tmp_path / "elsewhere"])
    for place in ("store/a", "store/published/b", "elsewhere/c"):
        (tmp_path / place).write_bytes(b"x" * 10)
    assert made.grown_bytes() == 30
    made.measure()
    assert made.left_bytes() == 70
    (tmp_path / "store" / "d").write_bytes(b"x" * 10)
    made.measure()
    assert made.left_bytes() == 70  # it stands
    made.spent()
    made.measure()
    assert made.left_bytes() == 60


def test_another_release_beside_the_current_one_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link that readers follow ends in the release that was the current one when the round began."""
    world.recipe()
    world.release()
    child = """
import json, os, pathlib
place = pathlib.Path("published/.releases/r/v20261122-00000000")
place.mkdir()
(place / "model").write_bytes(b"x" * 100_000)
print(json.dumps({"verdict": "PASS", "published": []}))
"""
    world.recipe(gate={"accuracy": {"margin": 0.03}})
    options = Options(store=world.store.root, max_disk=10**9, command=(sys.executable, "-S", "-c", child))
    summary = run([Request("r.yaml")], options, on_event=lambda _: None, look=lambda names: world.look(*names))
    assert [ended.state for ended in summary.ended] == ["ran"]
    assert summary.grown_bytes is not None
    assert summary.grown_bytes >= 100_000
