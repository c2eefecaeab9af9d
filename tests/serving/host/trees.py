"""Folders that look like other machines: the files of sysfs, procfs and /dev that a look at a host reads.

Values are those of the kernel's drivers on such machines: amdkfd's topology with the CPUs first, amdgpu's files of each
device on the bus, partitions with render nodes on platform devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmint.pipeline.base.machine import Host, Space

GIB = 1 << 30
#: What the driver keeps for itself of the memory of a card.
KEPT = 16 << 20
SERVING = {"vllm": "0.32.0+rocm700", "torch": "2.9.1+rocm7.0", "amd-aiter": "0.1.9"}
PYTHON = "/opt/serving/bin/python"
NODES = "sys/class/kfd/kfd/topology/nodes"


def write(root: Path, at: str, text: str | int) -> Path:
    path = root / at
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


def healthy(root: Path) -> Path:
    """A well kept Linux without a GPU: balancing off, IOMMU passing through."""
    write(root, "proc/sys/kernel/numa_balancing", 0)
    write(root, "proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet iommu=pt")
    write(root, "proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse avx2 avx512f avx512_bf16")
    write(root, "proc/meminfo", "MemTotal:       65536000 kB\nMemFree: 1024 kB\nMemAvailable:   33554432 kB")
    write(root, "etc/group", "root:x:0:\nvideo:x:44:ann\nrender:x:109:ann\nann:x:1000:")
    return root


def instinct(
    root: Path,
    *,
    device_id: int = 0x74A1,
    gfx: int = 90402,
    simds: int = 1216,
    memory: int = 192 * GIB - KEPT,
    count: int = 8,
    partitions: int = 1,
    modes: tuple[str, str] = ("SPX", "NPS1"),
    used: Mapping[int, int] | None = None,
) -> Path:
    """``count`` Instinct cards behind two CPUs, each seen as ``partitions`` nodes."""
    healthy(root)
    for cpu in (0, 1):
        write(root, f"{NODES}/{cpu}/properties", "cpu_cores_count 96\nsimd_count 0\nmem_banks_count 1\nvendor_id 0")
        write(root, f"{NODES}/{cpu}/mem_banks/0/properties", f"heap_type 0\nsize_in_bytes {1 << 40}\nflags 0")
    write(root, "dev/kfd", "")
    for card in range(count):
        address = f"0000:{0x0C + 8 * card:02x}:00.0"
        pci = f"sys/bus/pci/devices/{address}"
        write(root, f"{pci}/vendor", "0x1002")
        write(root, f"{pci}/device", f"0x{device_id:04x}")
        write(root, f"{pci}/mem_info_vram_total", memory)
        write(root, f"{pci}/mem_info_vram_used", (used or {}).get(card, 285 << 20))
        write(root, f"{pci}/current_compute_partition", modes[0])
        write(root, f"{pci}/current_memory_partition", modes[1])
        for part in range(partitions):
            number = card * partitions + part
            node, minor = 2 + number, 128 + number
            write(root, f"dev/dri/renderD{minor}", "")
            if part == 0:
                render = root / f"sys/class/drm/renderD{minor}"
                render.mkdir(parents=True)
                (render / "device").symlink_to(root / pci)
            else:
                write(root, f"sys/class/drm/renderD{minor}/device/uevent", "DRIVER=amdgpu_xcp")
            write(
                root,
                f"{NODES}/{node}/properties",
                f"cpu_cores_count 0\nsimd_count {simds // partitions}\nmem_banks_count 1\n"
                f"gfx_target_version {gfx}\nvendor_id 4098\ndevice_id {device_id}\n"
                f"location_id {(0x0C + 8 * card) << 8 | part}\ndomain 0\ndrm_render_minor {minor}\n"
                f"hive_id 11638818706288400384\nunique_id {0xA1B2C3D400000000 + number}\nnum_xcc {8 // partitions}",
            )
            write(
                root,
                f"{NODES}/{node}/mem_banks/0/properties",
                f"heap_type 1\nsize_in_bytes {memory // partitions}\nflags 0\nwidth 8192\nmem_clk_max 1300",
            )
    return root


def mi355x(root: Path, count: int = 8) -> Path:
    return instinct(root, device_id=0x75A3, gfx=90500, simds=1024, memory=288 * GIB - KEPT, count=count)


def partitioned(root: Path, count: int = 8) -> Path:
    """MI300X cards in CPX: eight GPUs each, with an eighth of the memory."""
    return instinct(root, count=count, partitions=8, modes=("CPX", "NPS1"))


def infiniband(root: Path, states: Sequence[tuple[str, str]]) -> None:
    for number, (state, physical) in enumerate(states):
        at = f"sys/class/infiniband/mlx5_{number}/ports/1"
        write(root, f"{at}/state", state)
        write(root, f"{at}/phys_state", physical)
        write(root, f"{at}/rate", "400 Gb/sec (4X NDR)")


def machine(root: Path, environ: Mapping[str, str] | None = None, **changes: Any) -> Host:
    """A machine below ``root`` on which every question to the kernel is answered well, but for the ``changes``.

    ``installed`` (distribution: version) is the serving environment's, ``smi`` what nvidia-smi prints.
    """
    answer = json.dumps(changes.pop("installed", SERVING))
    smi = changes.pop("smi", None)

    def run(argv: Sequence[str]) -> str | None:
        return smi if argv[0] == "nvidia-smi" else answer

    given: dict[str, Any] = {
        "environ": {"USER": "ann", "HOME": "/home/ann", **(environ or {})},
        "run": run,
        "opens": lambda path: None,
        "space": lambda path: Space(64 * GIB, 60 * GIB),
    }
    return Host(root=root, **given | changes)
