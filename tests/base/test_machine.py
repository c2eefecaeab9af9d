"""How many cores are ours, and how long a process has run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.base.machine import cores


@pytest.mark.parametrize(
    ("quota", "asked", "expected"),
    [("max 100000", "", 64), ("350000 100000", "", 4), ("50000 100000", "", 1), ("max 100000", "3", 3),
     ("200000 100000", "3", 2), ("max 100000", "many", 64)],
)  # fmt: skip
def test_cores_are_the_least_of_affinity_quota_and_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, asked: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    (tmp_path / "sys/fs/cgroup/jobs/mine").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/jobs/cpu.max").write_text(f"{quota}\n")  # of the group above ours
    assert cores(tmp_path) == expected


def test_the_age_of_a_process_counts_its_imports() -> None:
    code = "import time; time.sleep(0.3); from pipeline.base.machine import process_age; print(process_age())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.28 < float(done.stdout) < 300
