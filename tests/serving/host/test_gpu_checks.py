"""Looks at accelerators and at what lets a process use them, on machines that are well and on machines that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.host import trees
from tests.serving.host.trees import GIB, machine


def test_the_planned_accelerators_are_here(tmp_path: Path, finding):
    box = machine(trees.instinct(tmp_path))
    assert finding("accelerators", box, target="mi300x:8").status == "ok"
    assert finding("accelerators", box, target="mi300x:16").status == "ok"  # eight on each of two nodes
    assert finding("accelerators", box, target="cpu").status == "ok"
    other = finding("accelerators", box, target="mi355x:8")
    assert (other.status, other.found, other.expected) == (
        "fail",
        "8 x AMD Instinct MI300X",
        "8 x AMD Instinct MI355X",
    )
    few = finding("accelerators", machine(box.root, {"CUDA_VISIBLE_DEVICES": "0,1"}), target="mi300x:4")
    assert (few.status, few.found) == ("fail", "2 x AMD Instinct MI300X")


def test_partitions_fail_a_plan_that_counts_on_whole_gpus(tmp_path: Path, finding):
    box = machine(trees.partitioned(tmp_path))
    whole = finding("partition", box, target="mi300x:8")
    assert (whole.status, whole.found) == ("fail", "CPX with NPS1, 24.0 GiB each")
    assert whole.as_root == ("amd-smi set --compute-partition SPX", "amd-smi set --memory-partition NPS1")
    assert finding("partition", box).status == "warn"  # the target is what the machine is


def test_memory_that_others_hold(tmp_path: Path, finding):
    assert finding("GPU memory", machine(trees.instinct(tmp_path / "idle"))).status == "ok"
    some = machine(trees.instinct(tmp_path / "some", used={3: 8 * GIB}))
    assert finding("GPU memory", some).status == "warn"
    full = machine(trees.instinct(tmp_path / "full", used={3: 100 * GIB}))
    seen = finding("GPU memory", full)
    assert (seen.status, seen.found) == ("fail", "100.0 GiB of 192.0 GiB in use on GPU 3")
    assert "fuser" in seen.fix
    assert finding("GPU memory", full, utilization=0.4).status == "warn"
    assert finding("GPU memory", machine(full.root, {"CUDA_VISIBLE_DEVICES": "0,1,2"})).status == "ok"
    assert finding("GPU memory", full, target="h200:1").status == "skipped"
    assert finding("GPU memory", machine(trees.partitioned(tmp_path / "parts"))).status == "skipped"
    nvidia = machine(tmp_path, smi="GPU-a, NVIDIA H200, 143771, 616, 100000\n")
    assert "nvidia-smi" in finding("GPU memory", nvidia).fix


def test_device_files_that_are_not_there(tmp_path: Path, finding):
    root = trees.instinct(tmp_path)
    (root / "dev/kfd").unlink()
    (root / "dev/dri/renderD131").unlink()
    kfd, dri = (finding(name, machine(root)) for name in ("/dev/kfd", "/dev/dri"))
    assert (kfd.status, kfd.found, kfd.as_root) == ("fail", "/dev/kfd does not exist", ("modprobe amdgpu",))
    assert (dri.status, dri.found) == ("fail", "/dev/dri/renderD131 does not exist")
    assert "--device /dev/kfd --device /dev/dri" in kfd.fix
    # A container with two of the eight needs no more than theirs.
    assert finding("/dev/dri", machine(root, {"CUDA_VISIBLE_DEVICES": "0,1"})).status == "ok"
    bare = finding("/dev/dri", machine(trees.healthy(tmp_path / "bare")), target="mi300x:8")
    assert bare.found == "/dev/dri does not exist"


def test_device_files_that_are_closed(tmp_path: Path, finding):
    box = machine(trees.instinct(tmp_path), opens=lambda path: "Permission denied" if path.name == "kfd" else None)
    seen = finding("/dev/kfd", box)
    assert (seen.status, seen.found) == ("fail", "/dev/kfd cannot be opened: Permission denied")
    assert seen.as_root == ("usermod -a -G video,render ann",)
    assert finding("/dev/dri", box).status == "ok"


@pytest.mark.parametrize(
    ("environ", "status", "fix"),
    [
        ({}, "ok", ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok", ""),
        ({"HIP_VISIBLE_DEVICES": ""}, "ok", ""),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, "warn", "export CUDA_VISIBLE_DEVICES=0,1; unset HIP_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, "warn", "unset HIP_VISIBLE_DEVICES"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, "fail", "unset HIP_VISIBLE_DEVICES"),
    ],
)
def test_variables_that_choose_gpus(tmp_path: Path, finding, environ: dict[str, str], status: str, fix: str):
    seen = finding("HIP_VISIBLE_DEVICES", machine(trees.instinct(tmp_path), environ), target="mi300x:1")
    assert (seen.status, seen.fix) == (status, fix)
