"""What is known of recipes between rounds outlives a collection; what dead processes and old rounds left does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.locks import Lock
from pipeline.refresh.state import RecipeState, write_state
from pipeline.store import Store
from pipeline.store.gc import LOG_S, apply, plan_gc


def old(path: Path, seconds: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("x")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_states_rounds_and_young_logs_stay(store: Store) -> None:
    write_state(store.root, RecipeState(name="a"))
    refresh = store.root / "refresh"
    kept = [
        old(refresh / "a.json", LOG_S * 2),
        old(refresh / "rounds" / "1.json", LOG_S * 2),
        old(refresh / "schedule" / "a.json", LOG_S * 2),
        old(refresh / "logs" / "a" / "1.log", LOG_S / 2),
    ]
    gone = [
        old(refresh / "logs" / "a" / "0.log", LOG_S * 2),
        old(refresh / "logs" / "a" / "0.out", 7200),
        old(refresh / "a.json.tmp", 7200),
        old(refresh / "rounds" / "2.tmp", 7200),
        old(refresh / "devices" / "here-0.lock.0123.probe", 7200),
    ]
    plan = plan_gc(store, keep=0)
    assert {item.path for item in plan.remove} == set(gone)
    apply(plan)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


@pytest.mark.parametrize("name", ["a.lock", "devices/here-0.lock"])
def test_a_dead_fleets_lock_goes_and_a_living_ones_stays(store: Store, name: str) -> None:
    path = store.root / "refresh" / name
    path.parent.mkdir(parents=True)
    code = "import os, sys; from pathlib import Path; from pipeline.locks import Lock\n"
    code += "Lock(Path(sys.argv[1])).acquire(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    old(path, 7200)
    plan = plan_gc(store, keep=0)
    assert [item.path for item in plan.remove] == [path]
    with Lock(path):  # somebody takes it over meanwhile
        apply(plan)
        assert path.exists()
        assert plan_gc(store, keep=0).remove == ()
    assert not path.exists()


def test_what_a_living_fleets_child_writes_stays(store: Store) -> None:
    folder = store.root / "refresh"
    printed = old(folder / "logs" / "a" / "1.out", 7200)
    with Lock(folder / "a.lock"):
        assert plan_gc(store, keep=0).remove == ()
    assert [item.path for item in plan_gc(store, keep=0).remove] == [printed]
