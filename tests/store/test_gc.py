from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.store.entries import Entry
from quantmint.pipeline.store.gc import QUARANTINE_S, UNFINISHED_S, GcPlan, RunLog, apply, plan_gc
from quantmint.pipeline.store.locks import Lock
from quantmint.pipeline.store.tree import Store

Make = Callable[..., Entry]
HOUR = 3600.0


def run(store: Store, recipe: str, *entries: Entry) -> Path:
    log = RunLog.start(store.root, recipe, "0" * 64, [(entry.stage, entry.fingerprint) for entry in entries])
    return log.finish("PASS", 0).path


def removed(plan: GcPlan) -> set[Path]:
    return {item.path for item in plan.remove}


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * HOUR
    for part in [*path.rglob("*"), path]:
        os.utime(part, (then, then))


def test_entries_of_recent_runs_are_kept(store: Store, make: Make) -> None:
    old, shared, new, lonely = (make(store, number) for number in range(4))
    first = run(store, "a", old, shared)
    run(store, "a", new, shared)
    run(store, "b", shared)
    for entry in (old, shared, new, lonely):
        age(entry.path, 2)
    plan = plan_gc(store, keep=1)
    assert removed(plan) == {old.path, lonely.path, first}
    assert plan.freed_bytes == sum(
        path.stat().st_size for entry in (old, lonely) for path in entry.path.rglob("*") if path.is_file()
    )
    assert old.path.exists(), "a plan touches nothing"
    assert apply(plan) == plan.freed_bytes
    assert not old.path.exists()
    assert not lonely.path.exists()
    assert store.find(new.stage, new.fingerprint) == new
    assert store.find(shared.stage, shared.fingerprint) == shared
    assert not any((store.root / "trash").iterdir())
    assert plan_gc(store, keep=1).remove == ()
    assert removed(plan_gc(store, keep=2)) == set()


def test_young_entries_are_kept(store: Store, make: Make) -> None:
    entry = make(store)
    now = time.time()
    assert removed(plan_gc(store, keep=1, now=now + 0.9 * HOUR)) == set()
    assert removed(plan_gc(store, keep=1, now=now + 1.1 * HOUR)) == {entry.path}


def test_locked_entries_are_kept(store: Store, make: Make) -> None:
    entry = make(store)
    age(entry.path, 2)
    other = "f" * 64
    with store.working("quantize", other) as work, store.working("quantize", entry.fingerprint):
        (work.path / "shard").touch()
        age(work.path, 2)
        assert removed(plan_gc(store, keep=0)) == set()
    assert removed(plan_gc(store, keep=0)) == {entry.path, work.path}


def test_a_run_that_begins_between_plan_and_removal(store: Store, make: Make) -> None:
    wanted, other = make(store, 1), make(store, 2)
    age(wanted.path, 2)
    age(other.path, 2)
    plan = plan_gc(store, keep=1)
    assert removed(plan) == {wanted.path, other.path}
    run(store, "a", wanted)
    assert apply(plan) < plan.freed_bytes
    assert wanted.path.exists()
    assert not other.path.exists()


def test_a_process_that_comes_at_the_last_moment(store: Store, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = make(store)
    plan = plan_gc(store, keep=0, now=time.time() + 2 * HOUR)
    monkeypatch.setattr("quantmint.pipeline.store.gc.plan_gc", lambda *args, **kwargs: plan)
    with store.working(entry.stage, entry.fingerprint):
        assert apply(plan) == 0
    assert store.find(entry.stage, entry.fingerprint) == entry
    assert apply(plan) == plan.freed_bytes
    assert store.find(entry.stage, entry.fingerprint) is None


def test_a_working_folder_is_kept_for_the_run_that_broke(store: Store) -> None:
    with store.working("quantize", "f" * 64) as work:
        (work.path / "shard").touch()
    age(work.path, 2)
    RunLog.start(store.root, "a", "0" * 64, [("quantize", "f" * 64)]).finish(None, 5)
    assert removed(plan_gc(store, keep=1)) == set()
    (plan_item,) = plan_gc(store, keep=0).remove[:1]
    assert plan_item.path == work.path
    store.entry_path("quantize", "f" * 64).mkdir()
    (store.entry_path("quantize", "f" * 64) / "record.json").touch()
    assert work.path in removed(plan_gc(store, keep=1)), "its entry has been made since"


def test_a_run_that_goes_on_is_kept(store: Store, make: Make) -> None:
    entry, other = make(store, 1), make(store, 2)
    RunLog.start(store.root, "a", "0" * 64, [(entry.stage, entry.fingerprint)])
    run(store, "a", other)
    now = time.time()
    assert entry.path not in removed(plan_gc(store, keep=1, now=now + 2 * HOUR))
    assert entry.path in removed(plan_gc(store, keep=1, now=now + UNFINISHED_S + HOUR))


def test_a_killed_run_keeps_nothing_beside_newer_ones(
    store: Store, make: Make, forked: Callable[[Callable[[], None]], int], code_of: Callable[[int], int]
) -> None:
    entry, other = make(store, 1), make(store, 2)
    plan = [(entry.stage, entry.fingerprint)]

    def begin() -> None:
        RunLog.start(store.root, "a", "0" * 64, plan)

    assert code_of(forked(begin)) == 0
    assert entry.path not in removed(plan_gc(store, keep=1, now=time.time() + 2 * HOUR)), "the newest: it may go on"
    run(store, "a", other)
    assert entry.path in removed(plan_gc(store, keep=1, now=time.time() + 2 * HOUR))


def test_leftovers_are_removed_after_their_grace_period(store: Store, make: Make, warnings: list[str]) -> None:
    entry = make(store, 1)
    entry.file("a.bin").unlink()
    assert store.find(entry.stage, entry.fingerprint) is None
    (aside,) = (store.root / "quarantine").iterdir()
    stage = store.root / "quantize"
    half = stage / ("e" * 64)
    half.mkdir()
    trash = store.root / "trash" / "old"
    trash.mkdir(parents=True)
    scraps = [stage / f"{'d' * 64}.lock.abc", stage / f"{'d' * 64}.record", stage / f"{'d' * 64}.lock"]
    (store.root / "runs").mkdir()
    scraps.append(store.root / "runs" / "x.tmp")
    for scrap in scraps:
        scrap.touch()
    mine = [stage / "notes.txt", store.root / "README", store.root / "Other" / "x"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    now = time.time()
    assert removed(plan_gc(store, keep=1, now=now)) == {trash}
    assert removed(plan_gc(store, keep=1, now=now + 2 * HOUR)) == {trash, half, *scraps}
    plan = plan_gc(store, keep=1, now=now + QUARANTINE_S + HOUR)
    assert removed(plan) == {trash, half, aside, *scraps}
    for path in (half, *scraps):
        age(path, 2)
    apply(plan, now=now + QUARANTINE_S + HOUR)
    assert [path for path in (trash, half, aside, *scraps) if path.exists()] == []
    assert all(path.exists() for path in mine)


@pytest.mark.slow
def test_killed_at_every_step(
    store: Store, make: Make, warnings: list[str], killed_at_every_step: Callable[[Callable[[], None]], Iterator[int]]
) -> None:
    def collect() -> None:
        apply(plan_gc(store, keep=0))

    entry = make(store)
    age(entry.path, 2)
    outcomes = set()
    for _ in killed_at_every_step(collect):
        found = store.find(entry.stage, entry.fingerprint)
        outcomes.add(found is None)
        if found is not None:
            found.verify()
        collect()  # the same command again
        assert not entry.path.exists()
        assert not any((store.root / "trash").iterdir())
        shutil.rmtree(store.root)
        age(make(store).path, 2)
    assert outcomes == {True, False}
    assert warnings == []


def old(path: Path, seconds: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("x")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_the_refresh_folder_is_kept(store: Store) -> None:
    refresh = store.root / "refresh"
    kept = [old(refresh / name, 2e7) for name in ("a.json", "logs/a/1.log", "devices/here-0.lock")]
    assert plan_gc(store, keep=0).remove == ()
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("folder", ["answers", "launches"])
def test_measurements_that_no_run_asks_for_go_after_a_month(store: Store, folder: str) -> None:
    newer, older = (store.root / folder / (digit * 64) for digit in "ab")
    for place, days in ((newer, 29), (older, 31)):
        old(place / "measured.json", days * 86400)
        os.utime(place, (time.time() - days * 86400,) * 2)
    plan = plan_gc(store, keep=1)
    assert removed(plan) == {older}
    assert plan.remove[0].why.endswith("that no run has asked for in a month")


@pytest.mark.parametrize("moment", ["lock", "rename"])
@pytest.mark.parametrize("kind", ["entry", "work"])
def test_a_run_that_begins_while_things_are_removed_keeps_them(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch, moment: str, kind: str
) -> None:
    """It names its entry first and looks for it then: after `gc` decided, or a moment before it renames."""
    entry = make(store)
    wanted = entry.path
    if kind == "work":
        wanted = entry.path.rename(entry.path.with_name(f"{entry.fingerprint}.work"))
        (wanted / "record.json").unlink()
    age(wanted, 2)
    found: list[object] = []

    def begin() -> None:
        if not found:
            RunLog.start(store.root, "a", "0" * 64, [(entry.stage, entry.fingerprint)])
            found.append(store.find(entry.stage, entry.fingerprint))

    if moment == "lock":
        monkeypatch.setattr(Lock, "acquire", before(Lock.acquire, lambda *_, **__: begin()))
    else:
        monkeypatch.setattr(Path, "rename", before(Path.rename, lambda path, *_: path == wanted and begin()))
    assert apply(plan_gc(store, keep=1)) == 0
    assert found == [entry if kind == "entry" else None]
    assert wanted.is_dir()
    assert not any((store.root / "trash").glob("*"))


def before(original: Callable[..., Any], action: Callable[..., object]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        action(*arguments, **named)
        return original(*arguments, **named)

    return called
