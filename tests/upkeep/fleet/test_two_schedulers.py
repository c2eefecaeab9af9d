"""Two fleets on one store: no stage is made twice, nobody waits for ever, and who is killed is succeeded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

from quantmint.pipeline.store.locks import STALE_AFTER_S
from tests.hub.standin import HubStandIn
from tests.processes import processes_naming
from tests.upkeep.fleet.world import FLEET, World, build, environment, made
from tests.warm.executable import programs, warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPES = ("south-block", "south-block-hub")
_APART = ("unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")
_ELSEWHERE = """
import runpy, socket, sys
socket.sethostname("elsewhere")
sys.argv = ["quantmint", *sys.argv[1:]]
runpy.run_module("quantmint", run_name="__main__")
"""
_PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("two")
    with HubStandIn() as hub, warm_python(home, environment(hub, home)) as python:
        yield build(home, hub, python, {name: FLEET[name] for name in RECIPES})
        assert programs(python) == []
    assert not processes_naming(str(home))


class Scheduler:
    """`quantmint requantize --due` that goes on while we look."""

    def __init__(self, world: World, name: str, *, elsewhere: bool = False) -> None:
        self._answer, self._said = world.home / f"{name}.json", world.home / f"{name}.log"
        command = [str(world.python), "-m", "quantmint"]
        if elsewhere:
            command = [*_APART, sys.executable, "-c", _ELSEWHERE]
        with self._answer.open("wb") as answer, self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [*command, "requantize", "--due", "--json"],
                cwd=world.home, env=world.environment, stdin=subprocess.DEVNULL, stdout=answer, stderr=said,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._said.read_text(encoding="utf-8", errors="replace")

    def states(self) -> dict[str, str]:
        """How it left each recipe, once it has ended by itself."""
        assert self.process.wait(_PATIENCE_S) == 0, self.said
        return {one["recipe"]: one["state"] for one in json.loads(self._answer.read_text())["ended"]}

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def until(reached: Callable[[], object], *running: Scheduler) -> None:
    """Wait for something that one of them brings about."""
    end = time.monotonic() + _PATIENCE_S
    while not reached():
        assert time.monotonic() < end, "\n".join(one.said for one in running)
        assert any(one.process.poll() is None for one in running), "\n".join(one.said for one in running)
        time.sleep(0.05)


def new_entries(world: World, before: dict[str, int]) -> dict[str, int]:
    return {path: when for path, when in world.entries().items() if path not in before}


def holder(world: World) -> str | None:
    """Whose recipe's lock there is."""
    for name in RECIPES:
        path = world.store / "refresh" / f"{name}.lock"
        try:
            return f"{name} {json.loads(path.read_text())['host']} {json.loads(path.read_text())['pid']}"
        except (OSError, ValueError):
            continue
    return None


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_two_that_start_together_share_the_work_and_do_nothing_twice(world: World) -> None:
    both = Scheduler(world, "one"), Scheduler(world, "two")
    left = [one.states() for one in both]
    for name in RECIPES:
        assert sorted(states[name] for states in left) == ["current", "ran"]
    runs = world.runs()
    assert {name: len(found) for name, found in runs.items()} == dict.fromkeys(RECIPES, 1)
    counted = Counter(found for one in runs.values() for run in one for found in made(run).values())
    assert set(counted.values()) == {1}
    assert not list(world.store.rglob("*.lock*"))


def test_who_is_killed_is_succeeded_and_nothing_finished_is_done_again(world: World) -> None:
    world.move_base("south")
    before, runs = world.entries(), {run["started"] for found in world.runs().values() for run in found}
    first = Scheduler(world, "killed")
    until(lambda: any(path.startswith("canary/") for path in new_entries(world, before)), first)
    frozen = programs(world.python)
    signal_all(frozen, signal.SIGSTOP)  # in the middle until the other one has started, however busy the machine is
    second = Scheduler(world, "succeeds")
    until(lambda: "waits" in second.said, second)
    first.kill()
    signal_all(frozen, signal.SIGCONT)
    finished = new_entries(world, before)

    assert set(second.states().values()) <= {"ran", "current"}

    now = world.entries()
    assert {path: now[path] for path in finished} == finished, "what was finished stays as it was"
    began = [run for found in world.runs().values() for run in found if run["started"] not in runs]
    (killed,) = [run for run in began if run["verdict"] is None]
    assert killed["exit_code"] in {None, 143}, "a run ends by SIGTERM with its scheduler, or has no time to say so"
    counted = Counter(found for run in began if run["verdict"] for found in made(run).values())
    assert set(counted.values()) == {1}
    everything = world.run("due")
    assert (everything.code, {one["state"] for one in everything.answer["recipes"]}) == (0, {"current"})


def test_who_dies_on_another_machine_is_succeeded_when_its_heartbeat_is_old(world: World) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run([*_APART, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no namespaces can be made here: that takes root and `unshare`")
    world.move_base("south")
    before = world.entries()
    there = Scheduler(world, "elsewhere", elsewhere=True)
    until(lambda: any(path.startswith("inspect/") for path in new_entries(world, before)), there)
    assert "elsewhere" in (holder(world) or "")
    here = Scheduler(world, "here")
    until(lambda: here.said.count("started") or "waiting" in here.said, here)
    there.kill()
    finished = new_entries(world, before)
    assert "elsewhere" in (holder(world) or ""), "nobody knows yet that it died"
    for lock in world.store.rglob("*.lock"):  # the minute goes by
        told = json.loads(lock.read_text())
        if told["host"] == "elsewhere":
            old = lock.stat().st_mtime - 2 * STALE_AFTER_S
            os.utime(lock, (old, old))

    assert set(here.states().values()) == {"ran"}

    now = world.entries()
    assert {path: now[path] for path in finished} == finished
    assert world.run("due").code == 0
    assert not list(Path(world.store).rglob("*.lock"))
