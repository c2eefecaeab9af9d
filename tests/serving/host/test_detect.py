"""`--target auto`: a machine is told from the files of its drivers, and only what is visible counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.machine import Device
from quantmint.pipeline.serving.host.detect import detect, local_device, select_devices, visible_amd
from quantmint.pipeline.serving.planning.target import ServingTarget
from tests.serving.host import trees
from tests.serving.host.trees import GIB, KEPT, machine

H100 = "GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 551, 4\nGPU-bbbb-2, NVIDIA H100 80GB HBM3, 81559, 551, 70000\n"


def test_eight_mi300x(tmp_path: Path):
    found = detect(machine(trees.instinct(tmp_path)))
    assert found.target == ServingTarget("mi300x", 8, 1, 192 * GIB - KEPT)
    assert (found.compute_partition, found.memory_partition) == ("SPX", "NPS1")
    assert not found.partitioned
    assert [gpu.render for gpu in found.devices] == list(range(128, 136))
    assert {gpu.arch for gpu in found.devices} == {"gfx942"}
    assert [gpu.render for gpu in found.devices] == list(range(128, 136))
    assert {gpu.in_use for gpu in found.devices} == {285 << 20}


def test_eight_mi355x(tmp_path: Path):
    found = detect(machine(trees.mi355x(tmp_path)))
    assert found.target == ServingTarget("mi355x", 8, 1, 288 * GIB - KEPT)
    assert {gpu.arch for gpu in found.devices} == {"gfx950"}


def test_a_partition_is_not_a_whole_gpu(tmp_path: Path):
    found = detect(machine(trees.partitioned(tmp_path)))
    assert (found.hardware, found.gpus, found.hbm_bytes) == ("mi300x", 64, (192 * GIB - KEPT) // 8)
    assert found.partitioned
    assert (found.compute_partition, found.memory_partition) == ("CPX", "NPS1")
    with pytest.raises(UserError, match="gpus is 64: AMD Instinct MI300X has 1 to 8 in a node"):
        _ = found.target
    some = detect(machine(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"}))
    assert some.target == ServingTarget("mi300x", 2, 1, (192 * GIB - KEPT) // 8)
    # The last seven of each card have no files of their own: those of the card's address are taken.
    assert None not in {gpu.device for gpu in found.devices}
    assert len({gpu.device.resolve() for gpu in found.devices if gpu.device}) == 8


def test_a_virtual_function_without_partitions(tmp_path: Path):
    root = trees.instinct(tmp_path, device_id=0x74B5, count=1)
    for name in ("current_compute_partition", "current_memory_partition"):
        (root / "sys/bus/pci/devices/0000:0c:00.0" / name).unlink()
    found = detect(machine(root))
    assert (found.hardware, found.gpus, found.compute_partition) == ("mi300x", 1, None)
    assert not found.partitioned


def test_a_node_that_the_container_may_not_read_is_not_ours(tmp_path: Path):
    root = trees.instinct(tmp_path)
    for node in (4, 5, 6, 7, 8, 9):
        path = root / trees.NODES / f"{node}/properties"
        path.unlink()
        path.mkdir()  # reading it fails, for root too
    assert detect(machine(root)).gpus == 2


def test_an_unknown_instinct_is_named(tmp_path: Path):
    root = trees.instinct(tmp_path, device_id=0x74A2, count=2)
    with pytest.raises(UserError, match=r"device id 0x74a2 \(gfx942\), expected one of 0x74a1 \(mi300x\)") as caught:
        detect(machine(root))
    assert caught.value.hint == "name the most similar accelerator with --target"


def test_different_gpus_side_by_side(tmp_path: Path):
    root = trees.instinct(tmp_path, count=2)
    path = root / trees.NODES / "3/properties"
    path.write_text(path.read_text().replace("device_id 29857", f"device_id {0x74A5}"))
    with pytest.raises(UserError, match="1 x mi300x and 1 x mi325x"):
        detect(machine(root))
    assert detect(machine(root, {"CUDA_VISIBLE_DEVICES": "1"})).hardware == "mi325x"


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": "3"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, 4),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a1b2c3d400000002,GPU-a1b2c3d400000005"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, 1),
    ],
)
def test_visible_instincts(tmp_path: Path, environ: dict[str, str], gpus: int):
    assert detect(machine(trees.instinct(tmp_path), environ)).gpus == gpus


def test_nothing_visible_is_an_error_and_not_a_cpu(tmp_path: Path):
    root = trees.instinct(tmp_path, count=2)
    with pytest.raises(UserError, match="2 AMD GPUs, but"):
        detect(machine(root, {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}))


def test_nvidia_by_its_tool(tmp_path: Path):
    found = detect(machine(tmp_path, smi=H100))
    assert found.target == ServingTarget("h100", 2, 1, 81008 << 20)
    assert [used for _, used in found.memory] == [4 << 20, 70000 << 20]
    assert detect(machine(tmp_path, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, smi=H100)).gpus == 1
    assert detect(machine(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}, smi=H100)).hardware == "cpu"


def test_an_nvidia_gpu_without_a_row_is_a_cuda_gpu(tmp_path: Path):
    found = detect(machine(tmp_path, smi="GPU-c, NVIDIA GB10, [N/A], [N/A], [N/A]\n"))
    assert found.target == ServingTarget("cuda", 1)
    assert detect(machine(tmp_path, smi="NVIDIA-SMI has failed\n")).hardware == "cpu"


def test_neither_is_a_cpu(tmp_path: Path):
    found = detect(machine(trees.healthy(tmp_path)))
    assert found.target == ServingTarget("cpu")
    assert found.to_json()["hbm_bytes"] is None


def test_lists_of_devices():
    uuids = ["GPU-10", "GPU-20", "GPU-21"]
    assert select_devices(None, uuids) == (0, 1, 2)
    assert select_devices("2, 0", uuids) == (2, 0)
    assert select_devices("GPU-10,GPU-21", uuids) == (0, 2)
    assert select_devices("GPU-2", uuids) == ()  # two of them: ambiguous
    assert select_devices("-1,0", uuids) == ()
    assert visible_amd({"CUDA_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "2,0"}, uuids) == (0,)


def test_an_instinct_gpu_is_the_table_s(tmp_path: Path):
    assert local_device("cuda:3", machine(trees.instinct(tmp_path))) == Device("mi300x", "AMD Instinct MI300X")


def test_an_nvidia_gpu_has_its_driver_s_words(tmp_path: Path):
    def smi(argv: object) -> str:
        listed = "GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 551, 4\n"
        return listed if "--query-gpu=name" not in tuple(argv) else "NVIDIA H100 80GB HBM3\n"  # type: ignore[call-overload]

    assert local_device("cuda", replace(machine(tmp_path), run=smi)) == Device("h100", "NVIDIA H100 80GB HBM3")


def test_a_cpu_is_its_model_also_beside_a_gpu(tmp_path: Path):
    root = trees.instinct(tmp_path)
    trees.write(root, "proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n")
    assert local_device("cpu", machine(root)) == Device("cpu", "AMD EPYC 9654 96-Core Processor")


def test_a_machine_without_a_gpu_is_its_cpu(tmp_path: Path):
    found = local_device("cuda", machine(tmp_path))
    assert found.hardware == "cpu"
    assert found.name
