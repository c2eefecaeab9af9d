"""What this machine is, for ``--target auto`` and for records: its accelerators, and those that a launch may use.

Instinct GPUs are read from the kernel's files, no ROCm tool is needed: KFD has a node for each GPU that computes, or
for each *partition* of one, in the order of ROCm's numbers (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c). NVIDIA's
are asked of nvidia-smi; a machine with neither serves on its CPU. Only GPUs that the environment leaves visible count.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import Hardware
from quantmint.pipeline.base.machine import Device, Machine, cpu_name
from quantmint.pipeline.serving.plan import VisibleDevices
from quantmint.pipeline.serving.planning.target import ServingTarget, check_target

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
AMD = 0x1002
_NODES = "sys/class/kfd/kfd/topology/nodes"
_LOCAL_HEAPS = ("1", "2")  # memory of the GPU, seen by the host or not
_MEMORY = ("uuid", "name", "memory.total", "memory.reserved", "memory.used")


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A GPU, or a partition of one, as its driver sees it; None is what that does not say.

    ``memory`` and ``used`` are bytes: of its own banks, and of the whole device that anybody holds. ``render`` numbers
    /dev/dri/renderD*. ``device`` is its folder on the bus.
    """

    device_id: int
    arch: str
    memory: int
    used: int | None
    uuid: str
    compute_partition: str | None
    memory_partition: str | None
    render: int | None
    device: Path | None


def amd_gpus(machine: Machine) -> tuple[AmdGpu, ...]:
    """Every GPU of this machine that computes, in the order of ROCm's indices."""
    found = []
    for folder in machine.glob(f"{_NODES}/[0-9]*"):
        facts = machine.table(folder / "properties")
        if int(facts.get("simd_count", "0")) == 0 or int(facts.get("vendor_id", AMD)) != AMD:
            continue  # a CPU's node, or one that is not ours
        device = _device(machine, facts)
        whole = None if device is None else machine.number(device / "mem_info_vram_total")
        minor = int(facts.get("drm_render_minor", "0"))
        # The kernel packs 9.4.2 as 90402; minor and step are hexadecimal digits in the compiler's name.
        version = int(facts.get("gfx_target_version", "0"))
        gpu = AmdGpu(
            device_id=int(facts.get("device_id", "0")),
            arch=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
            memory=_memory(machine, folder) or whole or 0,
            used=None if device is None else machine.number(device / "mem_info_vram_used"),
            uuid=f"GPU-{int(facts.get('unique_id', '0')):016x}",
            compute_partition=None if device is None else machine.text(device / "current_compute_partition"),
            memory_partition=None if device is None else machine.text(device / "current_memory_partition"),
            render=minor if minor > 0 else None,
            device=device,
        )
        found.append(gpu)
    return tuple(found)


def _memory(machine: Machine, node: Path) -> int:
    banks = (machine.table(bank) for bank in machine.glob(f"{node.relative_to(machine.root)}/mem_banks/*/properties"))
    return sum(int(bank.get("size_in_bytes", "0")) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS)


def _device(machine: Machine, facts: dict[str, str]) -> Path | None:
    """The device's folder on the bus, else by its address with function 0: a partition's own node has no such files."""
    location = int(facts.get("location_id", "0"))
    address = f"{int(facts.get('domain', '0')):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
    places = (f"sys/class/drm/renderD{facts.get('drm_render_minor', '')}/device", f"sys/bus/pci/devices/{address}")
    folders = (machine.path(place) for place in places)
    return next((folder for folder in folders if (folder / "mem_info_vram_total").exists()), None)


@dataclass(frozen=True, slots=True)
class DetectedAccelerators:
    """The accelerators that a launch could use here.

    ``gpus`` counts what ROCm or CUDA numbers, so partitions where GPUs are partitioned; ``hbm_bytes`` is the memory of
    the smallest, None on a CPU. The partitions are modes of Instinct GPUs ("SPX", "NPS1"; "CPX+SPX" where they
    differ). ``memory`` has the bytes of each GPU, and of them those in use. ``devices`` are the Instinct GPUs.
    """

    hardware: str
    gpus: int
    hbm_bytes: int | None
    compute_partition: str | None = None
    memory_partition: str | None = None
    memory: tuple[tuple[int, int | None], ...] = ()
    devices: tuple[AmdGpu, ...] = ()

    @property
    def accelerator(self) -> Hardware:
        """The table's row."""
        return accelerators.hardware(self.hardware)

    @property
    def target(self) -> ServingTarget:
        """The machine as a target of one node; UserError where its partitions are more GPUs than a node has."""
        return check_target(ServingTarget(self.hardware, self.gpus, hbm_bytes=self.hbm_bytes))

    @property
    def partitioned(self) -> bool:
        """Whether a GPU of this machine is a part of a device."""
        return self.compute_partition not in (None, "SPX")

    def to_json(self) -> dict[str, Any]:
        """The facts without the single devices."""
        names = ("hardware", "gpus", "hbm_bytes", "compute_partition", "memory_partition")
        return {name: getattr(self, name) for name in names}


def detect(machine: Machine) -> DetectedAccelerators:
    """Say what a machine is. UserError for a GPU that the table does not know, and for different ones side by side."""
    instinct = amd_gpus(machine)
    if instinct:
        found = [instinct[index] for index in visible_amd(machine.environ, [gpu.uuid for gpu in instinct])]
        if not found:
            raise UserError(
                f"this machine has {len(instinct)} AMD GPUs, but {ROCR} and {CUDA} leave none of them",
                hint=f"unset {ROCR} {CUDA} HIP_VISIBLE_DEVICES, or name the target: --target cpu",
            )
        return DetectedAccelerators(
            hardware=_one_kind([_row(gpu) for gpu in found]).name,
            gpus=len(found),
            hbm_bytes=min(gpu.memory for gpu in found),
            compute_partition="+".join(sorted({gpu.compute_partition or "" for gpu in found} - {""})) or None,
            memory_partition="+".join(sorted({gpu.memory_partition or "" for gpu in found} - {""})) or None,
            memory=tuple((gpu.memory, gpu.used) for gpu in found),
            devices=tuple(found),
        )
    return _nvidia(machine) or DetectedAccelerators(hardware="cpu", gpus=1, hbm_bytes=None)


def _row(gpu: AmdGpu) -> Hardware:
    row = accelerators.by_pci(gpu.device_id)
    if row is None:
        known = ", ".join(f"{pci} ({row.name})" for row in accelerators.table().values() for pci in row.pci)
        raise UserError(
            f"this machine has an AMD GPU with device id 0x{gpu.device_id:04x} ({gpu.arch}), expected one of {known}",
            hint="name what it is most like with --target",
        )
    return row


def _one_kind(rows: Sequence[Hardware]) -> Hardware:
    counts = Counter(row.name for row in rows)
    if len(counts) > 1:
        kinds = " and ".join(f"{count} x {name}" for name, count in counts.items())
        raise UserError(
            f"this machine has {kinds}, expected GPUs of one kind: a server's share of the work is the same on each",
            hint=f"leave the ones that serve visible: {CUDA}=0,1,...",
        )
    return rows[0]


def nvidia_smi(machine: Machine, fields: Sequence[str], *more: str) -> list[list[str]]:
    """Rows of as many cells as there are fields; none where a field is not known here."""
    query = f"--query-gpu={','.join(fields)}"
    printed = machine.run(("nvidia-smi", query, "--format=csv,noheader,nounits", *more)) or ""
    rows = [[cell.strip() for cell in row] for row in csv.reader(printed.splitlines())]
    return [row for row in rows if len(row) == len(fields)]


def _nvidia(machine: Machine) -> DetectedAccelerators | None:
    rows = nvidia_smi(machine, _MEMORY)
    rows = [rows[index] for index in select_devices(machine.environ.get(CUDA), [row[0] for row in rows])]
    if not rows:
        return None
    general = accelerators.hardware("cuda")
    # What the driver reserves is nobody's: the rest is what CUDA says there is, seen on an H200 to the last MiB.
    memory = tuple(((_mib(whole) or 0) - (_mib(reserved) or 0), _mib(used)) for _, _, whole, reserved, used in rows)
    return DetectedAccelerators(
        hardware=_one_kind([accelerators.by_name(name) or general for _, name, *_ in rows]).name,
        gpus=len(rows),
        hbm_bytes=min(whole for whole, _ in memory) or None,
        memory=memory,
    )


def _mib(cell: str) -> int | None:
    """ "[N/A]" stands where GPU and CPU share their memory, and for what a partition may not see."""
    return int(cell) << 20 if cell.isdigit() else None


def select_devices(value: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices into ``uuids`` that a list of numbers and UUIDs names, in its order; all of them for None.

    As in the runtimes of both makers, a UUID may be cut short, and the first entry that names nothing ends the list.
    """
    if value is None:
        return tuple(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found += matches
    return tuple(found)


def visible_amd(environ: Mapping[str, str], uuids: Sequence[str]) -> tuple[int, ...]:
    """Indices of AMD's GPUs that vLLM sees: of ROCR's those in CUDA's variable, else HIP's; empty means unset."""
    first = select_devices(environ.get(ROCR) or None, uuids)
    second = select_devices(environ.get(CUDA) or environ.get(HIP) or None, [uuids[index] for index in first])
    return tuple(first[index] for index in second)


def visible_devices(environ: Mapping[str, str], kind: str) -> VisibleDevices | None:
    """Return the GPUs that ``environ`` leaves to a launch on ``kind`` (rocm, cuda, cpu); None where it limits nothing.

    Entries are passed on as they stand: UUIDs, and numbers of a MIG slice, mean something to the runtime alone. Raises
    UserError where HIP's variable and CUDA's name different GPUs, where vLLM on ROCm would not start.
    """
    if kind == "cpu":
        return None
    if kind != "rocm":
        return None if CUDA not in environ else VisibleDevices(_entries(environ[CUDA]), f"{CUDA}={environ[CUDA]}")
    limit = {ROCR: environ[ROCR]} if environ.get(ROCR) else {}
    if environ.get(HIP) and environ.get(CUDA) and _entries(environ[HIP]) != _entries(environ[CUDA]):
        raise UserError(
            f"{HIP}={environ[HIP]} and {CUDA}={environ[CUDA]} name different GPUs", hint=f"Leave {HIP} unset."
        )
    for name in (CUDA, HIP):
        if environ.get(name):
            return VisibleDevices(_entries(environ[name]), f"{name}={environ[name]}", limit)
    if not limit:
        return None
    # The numbers begin anew behind this variable.
    names = tuple(str(number) for number in range(len(_entries(environ[ROCR]))))
    return VisibleDevices(names, f"{ROCR}={environ[ROCR]}", limit)


def _entries(value: str) -> tuple[str, ...]:
    """The entries of a list of devices up to the first that means none, as the runtimes read it."""
    entries = (entry.strip() for entry in value.split(","))
    return tuple(takewhile(lambda entry: entry not in ("", "-1", "NoDevFiles"), entries))


def local_device(kind: str, machine: Machine | None = None) -> Device:
    """This device that PyTorch calls ``kind`` ("cpu", "cuda:1"); `UserError` for an Instinct that no table knows."""
    machine = machine or Machine()
    found = None if kind.startswith("cpu") else detect(machine)
    if found is None or found.hardware == "cpu":
        return Device("cpu", cpu_name(machine))
    told = nvidia_smi(machine, ("name",)) if found.accelerator.kind == "cuda" else []
    return Device(found.hardware, told[0][0] if told else found.accelerator.title)
