"""Number of usable cores, available memory, and the age of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantmint.calibration.container import memory_left, memory_limit
from quantmint.pipeline.base.machine import cores
from quantmint.pipeline.quantize.device import device_memory


@pytest.mark.parametrize(
    ("quota", "asked", "expected"),
    [("max 100000", "", 64), ("350000 100000", "", 4), ("50000 100000", "", 1), ("max 100000", "3", 3),
     ("200000 100000", "3", 2), ("max 100000", "many", 64)],
)  # fmt: skip
def test_cores_are_the_least_of_affinity_quota_and_omp_num_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, asked: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    (tmp_path / "sys/fs/cgroup/jobs/mine").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/jobs/cpu.max").write_text(f"{quota}\n")  # of the group above ours
    assert cores(tmp_path) == expected


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """A machine whose root group has no limit, as everywhere but in a container, and whose others have one each."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    for name, limit, used in (("jobs", str(8 << 30), 5 << 30), ("jobs/mine", str(4 << 30), 1 << 30)):
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {1 << 30}\n")
    return tmp_path


def test_memory_is_the_least_that_any_parent_control_group_leaves(groups: Path) -> None:
    assert memory_limit(groups) == 4 << 30
    assert memory_left(groups) == 4 << 30  # each of the two leaves that: 8 - 5 + 1 above, 4 - 1 + 1 in ours
    (groups / "sys/fs/cgroup/jobs/memory.current").write_text(f"{7 << 30}\n")
    assert memory_left(groups) == 2 << 30
    (groups / "sys/fs/cgroup/jobs/mine/memory.max").write_text("max\n")
    assert memory_limit(groups) == 8 << 30
    (groups / "sys/fs/cgroup/jobs/memory.max").write_text("max\n")
    assert (memory_limit(groups), memory_left(groups)) == (None, None)
    assert memory_limit(groups / "elsewhere") is None


def test_a_plans_memory_ends_at_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = device_memory("cpu")
    monkeypatch.setattr("quantmint.pipeline.quantize.device.memory_limit", lambda: 1 << 30)
    assert device_memory("cpu") == 1 << 30
    monkeypatch.setattr("quantmint.pipeline.quantize.device.memory_limit", lambda: whole + 1)
    assert device_memory("cpu") <= whole + 1


def test_the_age_of_a_process_counts_its_imports() -> None:
    code = "import time; time.sleep(0.3); from quantmint.pipeline.base.machine import process_age; print(process_age())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.28 < float(done.stdout) < 300
