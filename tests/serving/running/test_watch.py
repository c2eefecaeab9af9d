"""How much of a core the load generator uses, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quantmint.pipeline.base.processes import run_logged
from quantmint.pipeline.serving.running.load_watch import CpuSample, LoadSamples, LoadWatch, busiest_share, event_loops
from quantmint.pipeline.serving.running.sensors import SensorReading

CLIENT = """
import sys, time
def work(): end = time.monotonic() + 2.2; [None for _ in iter(lambda: time.monotonic() < end, False)]
def rest(): time.sleep(2.2)
{before}()
print("Starting main benchmark run...", flush=True)
{after}()
"""


def clock() -> SensorReading:
    """Says the same of the machine every time."""
    return SensorReading((1000.0,))


def test_only_the_measured_run_counts(tmp_path: Path) -> None:
    seen: dict[str, LoadSamples] = {}

    def follow(before: str, after: str) -> None:
        log = tmp_path / f"{before}.log"
        log.write_text("Starting main benchmark run...\nof another cell\n")
        code = CLIENT.format(before=before, after=after)
        with LoadWatch(clock, log) as watch:
            run_logged([sys.executable, "-c", code, "bench", "serve"], log, what="it", env={}, started=watch.follow)
        seen[before] = watch.samples(2.2)

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
    assert all(reading == SensorReading((1000.0,)) for reading in seen["rest"].readings)


def test_a_load_whose_beginning_is_not_seen_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LoadWatch(clock, log) as watch:
        run_logged([sys.executable, "-c", "import time; time.sleep(1.2)"], log, what="it", env={}, started=watch.follow)
    assert watch.samples(10.0) == LoadSamples((), None)


def test_a_helper_that_is_soon_gone_held_up_nobody() -> None:
    client = [CpuSample(float(at), 0.4 * at) for at in range(11)]
    helper = [CpuSample(1.0, 0.0), CpuSample(2.0, 1.0)]
    assert busiest_share({1: client, 2: helper}, end=10.0) == pytest.approx(0.4)
    assert busiest_share({1: client[:1]}, end=10.0) is None


def test_the_event_loop_is_the_first_thread_of_what_is_no_engine() -> None:
    code = """
import os, sys, threading, time
def work():
    while time.thread_time() < 0.4: pass
if open("/proc/self/cmdline").read().startswith("VLLM::"): work()
else:
    other = threading.Thread(target=work); other.start(); other.join()
    while time.thread_time() < 0.2: pass
print("done", flush=True); time.sleep(60)
"""
    run = f"""
import subprocess, sys
for name in ("serve", "VLLM::EngineCore"):
    subprocess.Popen([name, "-c", {code!r}], executable=sys.executable)
sys.stdin.read()
"""
    started = subprocess.Popen(
        [sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert started.stdout is not None
        assert [started.stdout.readline() for _ in range(2)] == [b"done\n"] * 2
        (used,) = event_loops(started.pid).values()
        assert 0.15 < used < 0.38
        assert event_loops(started.pid, ["serve"]).keys() == event_loops(started.pid).keys()
        assert not event_loops(started.pid, ["bench", "serve"]), "a load generator's helper counts as its event loop"
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
