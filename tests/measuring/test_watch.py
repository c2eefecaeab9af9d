"""How much of a core the load generator uses, and when."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from pipeline.measuring.client import Processes, Used, busiest
from pipeline.measuring.reading import Reading
from pipeline.measuring.watch import LoadWatch, Seen
from pipeline.processes import run_logged

TICK = os.sysconf("SC_CLK_TCK")
CLIENT = """
import sys, time
def work(): end = time.monotonic() + 2.2; [None for _ in iter(lambda: time.monotonic() < end, False)]
def rest(): time.sleep(2.2)
{before}()
print("Starting main benchmark run...", flush=True)
{after}()
"""


class Clock:
    """Says the same of the machine every time."""

    def read(self) -> Reading | None:
        return Reading((1000.0,))


def test_only_the_measured_run_counts(tmp_path: Path) -> None:
    seen: dict[str, Seen] = {}

    def follow(before: str, after: str) -> None:
        log = tmp_path / f"{before}.log"
        log.write_text("Starting main benchmark run...\nof another cell\n")
        code = CLIENT.format(before=before, after=after)
        with LoadWatch(Clock(), log) as watch:
            run_logged([sys.executable, "-c", code], log, what="it", env={}, started=watch.follow)
        seen[before] = watch.seen(2.2)

    threads = [threading.Thread(target=follow, args=order) for order in (("work", "rest"), ("rest", "work"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    idle, busy = seen["work"].client_cpu, seen["rest"].client_cpu
    assert idle is not None
    assert busy is not None
    assert idle < busy / 2
    assert seen["rest"].readings
    assert all(reading == Reading((1000.0,)) for reading in seen["rest"].readings)


def test_a_load_whose_beginning_is_not_seen_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LoadWatch(Clock(), log) as watch:
        run_logged([sys.executable, "-c", "import time; time.sleep(1.2)"], log, what="it", env={}, started=watch.follow)
    assert watch.seen(10.0) == Seen((), None)


@pytest.mark.parametrize(
    ("cpu", "share"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1.0),
        ([0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5], 1.0),  # the busiest five seconds
        ([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], 0.2),  # a burst of one second holds up nobody
        ([0, 0.5, 1], 0.5),  # shorter than the window: all of it
        ([9, 0, 0, 0, 0, 0], 0.0),
        ([3], None),
    ],
)
def test_the_busiest_window(cpu: list[float], share: float | None) -> None:
    assert busiest([Used(float(at), used) for at, used in enumerate(cpu)], window=5.0) == share


def stat(proc: Path, pid: int, parent: int, ticks: int, name: str = "python") -> None:
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, *[str(ticks)] * 4, *["0"] * 5]
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")


def test_processes_below_another_are_added_up(tmp_path: Path) -> None:
    stat(tmp_path, 10, 1, 1000)  # the supervisor itself
    stat(tmp_path, 11, 10, 25, "a) b (c")
    stat(tmp_path, 12, 11, 50)
    stat(tmp_path, 13, 1, 1000)  # somebody else
    (tmp_path / "meminfo").write_text("")
    watched = Processes(10, tmp_path)
    first = watched.cpu_seconds()
    assert first is not None
    stat(tmp_path, 12, 11, 100)
    second = watched.cpu_seconds()
    assert second is not None
    assert (first, second) == (4 * 75 / TICK, 4 * 125 / TICK)
    assert Processes(13, tmp_path).cpu_seconds() is None
