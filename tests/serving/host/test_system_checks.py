"""Looks at the operating system, the network and the processor, on machines that are well and on ones that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantmint.pipeline.base.machine import Space, file_system, open_device, run_command
from tests.serving.host import trees
from tests.serving.host.trees import GIB, machine


def test_numa_balancing(tmp_path: Path, finding):
    root = trees.instinct(tmp_path, count=1)
    assert finding("numa_balancing", machine(root)).status == "ok"
    trees.write(root, "proc/sys/kernel/numa_balancing", 1)
    seen = finding("numa_balancing", machine(root))
    assert (seen.status, seen.found, seen.expected) == ("warn", "1", "0")
    assert seen.as_root == ("echo 0 > /proc/sys/kernel/numa_balancing",)
    (root / "proc/sys/kernel/numa_balancing").unlink()
    assert finding("numa_balancing", machine(root)).status == "skipped"


def test_iommu(tmp_path: Path, finding):
    root = trees.instinct(tmp_path, count=2)
    assert finding("iommu", machine(root)).found == "iommu=pt"
    assert finding("iommu", machine(root), target="mi300x:1").status == "skipped"
    trees.write(root, "proc/cmdline", "ro quiet")
    assert finding("iommu", machine(root)).found == "no IOMMU is on"
    (root / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    seen = finding("iommu", machine(root))
    assert (seen.status, len(seen.as_root)) == ("warn", 2)


@pytest.mark.parametrize(
    ("space", "status"),
    [
        (Space(64 * GIB, 60 * GIB), "ok"),
        (Space(16 * GIB, 2 * GIB), "ok"),
        (Space(8 * GIB, 8 * GIB), "warn"),
        (Space(64 << 20, 64 << 20), "fail"),  # Docker's default
        (Space(64 * GIB, 1 << 20), "fail"),  # what crashed processes left behind fills it
        (None, "fail"),
    ],
)
def test_shared_memory(tmp_path: Path, finding, space: Space | None, status: str):
    box = machine(trees.instinct(tmp_path, count=2), space=lambda path: space)
    assert finding("/dev/shm", box).status == status
    assert finding("/dev/shm", box, target="mi300x:1").status == "skipped"


def test_rdma(tmp_path: Path, finding):
    root = trees.instinct(tmp_path)
    assert finding("ibstat", machine(root)).status == "skipped"
    assert finding("ibstat", machine(root), target="mi300x:16").found == "no RDMA adapter"
    trees.infiniband(root, [("4: ACTIVE", "5: LinkUp")] * 2)
    seen = finding("ibstat", machine(root), target="mi300x:16")
    assert (seen.status, seen.found) == ("ok", "2 of 2 ports active, 400 Gb/sec (4X NDR)")
    trees.infiniband(root, [("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled")])
    seen = finding("ibstat", machine(root), target="mi300x:16")
    assert (seen.status, seen.found) == ("warn", "1 of 2 ports active, 400 Gb/sec (4X NDR)")
    assert "ibstat" in seen.fix
    trees.infiniband(root, [("4: ACTIVE", "5: LinkUp"), ("4: ACTIVE", "6: LinkErrorRecovery")])
    assert finding("ibstat", machine(root), target="mi300x:16").status == "warn"


def test_the_real_questions(tmp_path: Path):
    assert open_device(tmp_path / "none") == "No such file or directory"
    assert open_device(Path("/dev/null")) is None
    assert file_system(tmp_path / "not" / "made" / "yet") is not None
    assert run_command(["sh", "-c", "echo hello"]) == "hello\n"
    assert run_command(["sh", "-c", "exit 3"]) is None
    assert run_command(["no-such-command-anywhere"]) is None
