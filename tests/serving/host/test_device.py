"""What something runs on: the table's name for a promise, the driver's for people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.machine import Device
from pipeline.serving.host.detect import device_here
from tests.serving.host import trees
from tests.serving.host.trees import machine


def test_an_instinct_gpu_is_the_table_s(tmp_path: Path):
    assert device_here("cuda:3", machine(trees.instinct(tmp_path))) == Device("mi300x", "AMD Instinct MI300X")


def test_an_nvidia_gpu_has_its_driver_s_words(tmp_path: Path):
    def smi(argv: object) -> str:
        listed = "GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 551, 4\n"
        return listed if "--query-gpu=name" not in tuple(argv) else "NVIDIA H100 80GB HBM3\n"  # type: ignore[call-overload]

    assert device_here("cuda", replace(machine(tmp_path), run=smi)) == Device("h100", "NVIDIA H100 80GB HBM3")


def test_a_cpu_is_its_model_also_beside_a_gpu(tmp_path: Path):
    root = trees.instinct(tmp_path)
    trees.write(root, "proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n")
    assert device_here("cpu", machine(root)) == Device("cpu", "AMD EPYC 9654 96-Core Processor")


def test_a_machine_without_a_gpu_is_its_cpu(tmp_path: Path):
    found = device_here("cuda", machine(tmp_path))
    assert found.hardware == "cpu"
    assert found.name
