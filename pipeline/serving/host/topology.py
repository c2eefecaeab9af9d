"""AMD's GPUs as the kernel driver lists them, in sysfs: no ROCm tool is needed.

KFD has a node for each GPU that computes, one a *partition* where a GPU is partitioned; amdgpu has a card for each
device on the bus. ROCm numbers GPUs in the order of KFD's nodes. A node that the container's device rules deny has
properties that cannot be read: it is not ours.

Fields: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c and include/uapi/linux/kfd_sysfs.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.machine import Machine

AMD = 0x1002
_NODES = "sys/class/kfd/kfd/topology/nodes"
_XGMI = 11  # HSA_IOLINKTYPE_XGMI
_LOCAL_HEAPS = ("1", "2")  # memory of the GPU, seen by the host or not


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A GPU, or a partition of one.

    ``arch`` is the compiler's name ("gfx942"). ``memory`` and ``used`` are bytes: of its own banks, and of the whole
    device that anybody holds (None where amdgpu does not say). ``peers`` are the nodes that XGMI links lead to.
    ``compute_partition`` and ``memory_partition`` are the device's modes ("SPX", "NPS1"), None where it has none.
    ``render`` numbers /dev/dri/renderD*, None for a driver too old to say. ``device`` is its folder on the bus.
    """

    node: int
    device_id: int
    arch: str
    memory: int
    used: int | None
    uuid: str
    peers: frozenset[int]
    compute_partition: str | None
    memory_partition: str | None
    render: int | None
    device: Path | None


def amd_gpus(machine: Machine) -> tuple[AmdGpu, ...]:
    """Every GPU of this machine that computes, in the order of ROCm's indices."""
    return tuple(_gpus(machine))


def _gpus(machine: Machine) -> Iterator[AmdGpu]:
    for folder in machine.glob(f"{_NODES}/[0-9]*"):
        facts = machine.table(folder / "properties")
        if int(facts.get("simd_count", "0")) == 0 or int(facts.get("vendor_id", AMD)) != AMD:
            continue  # a CPU's node, or one that is not ours
        device = _device(machine, facts)
        whole = None if device is None else machine.number(device / "mem_info_vram_total")
        minor = int(facts.get("drm_render_minor", "0"))
        yield AmdGpu(
            node=int(folder.name),
            device_id=int(facts.get("device_id", "0")),
            arch=_arch(int(facts.get("gfx_target_version", "0"))),
            memory=_memory(machine, folder) or whole or 0,
            used=None if device is None else machine.number(device / "mem_info_vram_used"),
            uuid=f"GPU-{int(facts.get('unique_id', '0')):016x}",
            peers=frozenset(_xgmi(machine, folder)),
            compute_partition=None if device is None else machine.text(device / "current_compute_partition"),
            memory_partition=None if device is None else machine.text(device / "current_memory_partition"),
            render=minor if minor > 0 else None,
            device=device,
        )


def _arch(version: int) -> str:
    """The kernel packs 9.4.2 as 90402; minor and step are hexadecimal digits in the compiler's name."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _memory(machine: Machine, node: Path) -> int:
    banks = (machine.table(bank) for bank in machine.glob(f"{node.relative_to(machine.root)}/mem_banks/*/properties"))
    return sum(int(bank.get("size_in_bytes", "0")) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS)


def _xgmi(machine: Machine, node: Path) -> Iterator[int]:
    for at in machine.glob(f"{node.relative_to(machine.root)}/io_links/*/properties"):
        link = machine.table(at)
        if int(link.get("type", "0")) == _XGMI and "node_to" in link:
            yield int(link["node_to"])


def _device(machine: Machine, facts: dict[str, str]) -> Path | None:
    """The folder of the device on the bus.

    A partition's own render node belongs to a platform device without these files, so the address leads there, with
    function 0: a partition's number may stand in its place.
    """
    location = int(facts.get("location_id", "0"))
    address = f"{int(facts.get('domain', '0')):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
    places = (f"sys/class/drm/renderD{facts.get('drm_render_minor', '')}/device", f"sys/bus/pci/devices/{address}")
    folders = (machine.path(place) for place in places)
    return next((folder for folder in folders if (folder / "mem_info_vram_total").exists()), None)
