"""Sweeps that are killed, that meet each other, whose records are damaged."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import processes_naming
from tests.serving.tuning.sweeping import run, starts, sweep_of

pytestmark = pytest.mark.slow

Surface = Callable[..., Path]
AXES = {"--max-num-seqs": ["8", "32"], "--max-num-batched-tokens": ["1024"]}


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    (folder / "sweep.json").write_text(json.dumps(AXES))
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serving.tuning.sweeping", str(folder), *arguments],
        cwd=root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def records(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in (folder / "store" / "tune").glob("*/record.json")}


def test_killed_at_any_moment_a_sweep_loses_no_trial_and_does_none_twice(surface: Surface) -> None:
    folder = surface(throughput={"--max-num-seqs": {"32": 1.4}}, start=0.2, bench=0.2)
    moments = random.Random(4)  # noqa: S311 - moments, not secrets
    kills, before = 0, records(folder)
    for _ in range(12):
        process = start(folder)
        try:
            process.wait(timeout=moments.uniform(0.8, 4.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        after = records(folder)
        assert before.items() <= after.items()  # nothing lost, nothing measured anew
        before = after
        if process.returncode == 0:
            break
    assert kills
    found = run(folder, sweep_of(folder, dict(AXES)))
    assert found["serve"] == {"knobs": {"--max-num-seqs": 32}}
    trials = Counter(json.dumps(entry, sort_keys=True) for entry in _knobs(folder))
    committed = len(records(folder))
    assert committed == 5 + 3 * 2
    assert sum(trials.values()) <= committed + kills  # a kill costs the trial that it cut off, and no other
    deadline = time.monotonic() + 20
    while processes_naming(str(folder / "model")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_naming(str(folder / "model")) == ()


def _knobs(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in entry.items() if k != "--port"} for entry in starts(folder)]


def test_two_sweeps_measure_one_after_the_other_and_nothing_twice(surface: Surface) -> None:
    folder = surface(bench=0.1)
    both = [start(folder), start(folder)]
    told = [process.communicate(timeout=300)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert len(starts(folder)) == len(records(folder)) == 5
    assert sum("another sweep is measuring" in text for text in told) == 1
    assert sum("cached" in text for text in told) == 1
