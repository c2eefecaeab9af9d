"""What a round may grow by is measured for beginnings: a walk over a large store takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from pipeline.upkeep.fleet import account
from pipeline.upkeep.fleet.account import Growth
from pipeline.upkeep.fleet.jobs import Request
from tests.upkeep.fleet.staged import Stage, by_name


def test_a_round_measures_for_beginnings_and_sees_what_a_recipe_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its messages, and each second of a wait, woke it to walk the whole store."""
    really, happened = account.bytes_below, list[str]()

    def counted(folders: Iterable[Path]) -> int:
        happened.append("walk")
        return really(folders)

    monkeypatch.setattr(account, "bytes_below", counted)
    for name in "abc":
        stage.recipe(name, f"grow {stage.store}")
    fleet = stage.fleet(lambda event: happened.append(event.kind), jobs=1, max_disk=150_000)
    fleet.add(Request(name) for name in "abc")
    fleet.close()
    summary = fleet.run()
    assert {name: one.state for name, one in by_name(summary).items()} == {"a": "ran", "b": "ran", "c": "left"}
    assert by_name(summary)["c"].reason == "the round's disk is used up"
    assert (summary.grown_bytes or 0) >= 200_000
    first, last = happened.index("queued"), len(happened) - happened[::-1].index("finished")
    assert happened[first:last].count("walk") == 3  # for each of the three


def test_a_release_that_is_linked_counts_once(tmp_path: Path) -> None:
    """Its files have a name in the store and one among the releases."""
    for place in ("store", "published"):
        (tmp_path / place).mkdir()
    (tmp_path / "store" / "old").write_bytes(b"x" * 40)
    (tmp_path / "published" / "old").hardlink_to(tmp_path / "store" / "old")
    made = Growth(100, tmp_path / "store")
    made.watch([tmp_path / "published"])
    assert made.grown() == 0
    (tmp_path / "store" / "new").write_bytes(b"x" * 10)
    (tmp_path / "published" / "new").hardlink_to(tmp_path / "store" / "new")
    assert made.grown() == 10


def test_a_folder_below_another_counts_once(tmp_path: Path) -> None:
    (tmp_path / "store" / "published").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    made = Growth(100, tmp_path / "store")
    made.watch([tmp_path / "store" / "published", tmp_path / "elsewhere"])
    for place in ("store/a", "store/published/b", "elsewhere/c"):
        (tmp_path / place).write_bytes(b"x" * 10)
    assert made.left(measure=True) == 70
    (tmp_path / "store" / "d").write_bytes(b"x" * 10)
    assert made.left(measure=True) == 70  # it stands
    made.changed()
    assert made.left(measure=True) == 60
