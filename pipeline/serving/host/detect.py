"""Detect the accelerators of this machine, and which of them a launch may use: for ``--target auto`` and for records.

Instinct GPUs are read from the kernel's files, without ROCm tools: KFD has a node for each compute GPU, or for each
*partition* of one, in the order of ROCm's numbers (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c). NVIDIA GPUs are
read from nvidia-smi; a machine with neither serves on its CPU. Only GPUs that the environment leaves visible count.
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
from quantmint.pipeline.base.machine import Device, Host, cpu_name
from quantmint.pipeline.serving.plan import VisibleDevices
from quantmint.pipeline.serving.planning.target import ServingTarget, check_target

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
AMD = 0x1002
_NODES = "sys/class/kfd/kfd/topology/nodes"
_LOCAL_HEAPS = ("1", "2")  # GPU memory that the host can or cannot map
_MEMORY = ("uuid", "name", "memory.total", "memory.reserved", "memory.used")


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A GPU, or a partition of one, as its driver reports it; fields are None where the driver reports nothing.

    ``memory`` is the bytes of its own memory, ``in_use`` those in use on the whole device. ``render`` is the number of
    its /dev/dri/renderD node, ``device`` its folder on the PCI bus.
    """

    device_id: int
    arch: str
    memory: int
    in_use: int | None
    uuid: str
    compute_partition: str | None
    memory_partition: str | None
    render: int | None
    device: Path | None


def amd_gpus(machine: Host) -> tuple[AmdGpu, ...]:
    """Return every compute GPU of this machine, in the order of ROCm's indices."""
    gpus = []
    for folder in machine.glob(f"{_NODES}/[0-9]*"):
        facts = machine.table(folder / "properties")
        if int(facts.get("simd_count", "0")) == 0 or int(facts.get("vendor_id", AMD)) != AMD:
            continue  # a CPU's node, or another vendor's
        device = _device(machine, facts)
        total = None if device is None else machine.number(device / "mem_info_vram_total")
        minor = int(facts.get("drm_render_minor", "0"))
        # The kernel packs 9.4.2 as 90402; minor and step are hexadecimal digits in the compiler's name.
        version = int(facts.get("gfx_target_version", "0"))
        gpu = AmdGpu(
            device_id=int(facts.get("device_id", "0")),
            arch=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
            memory=_memory(machine, folder) or total or 0,
            in_use=None if device is None else machine.number(device / "mem_info_vram_used"),
            uuid=f"GPU-{int(facts.get('unique_id', '0')):016x}",
            compute_partition=None if device is None else machine.text(device / "current_compute_partition"),
            memory_partition=None if device is None else machine.text(device / "current_memory_partition"),
            render=minor if minor > 0 else None,
            device=device,
        )
        gpus.append(gpu)
    return tuple(gpus)


def _memory(machine: Host, node: Path) -> int:
    banks = (machine.table(bank) for bank in machine.glob(f"{node.relative_to(machine.root)}/mem_banks/*/properties"))
    return sum(int(bank.get("size_in_bytes", "0")) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS)


def _device(machine: Host, facts: dict[str, str]) -> Path | None:
    """Return the GPU's folder on the PCI bus; for a partition, which has none, that of function 0 of its device."""
    location = int(facts.get("location_id", "0"))
    address = f"{int(facts.get('domain', '0')):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.0"
    paths = (f"sys/class/drm/renderD{facts.get('drm_render_minor', '')}/device", f"sys/bus/pci/devices/{address}")
    folders = (machine.path(path) for path in paths)
    return next((folder for folder in folders if (folder / "mem_info_vram_total").exists()), None)


@dataclass(frozen=True, slots=True)
class DetectedAccelerators:
    """The accelerators that a launch could use on this machine.

    ``gpus`` is the number of devices of ROCm or CUDA, which counts partitions of partitioned GPUs. ``hbm_bytes`` is the
    memory of the smallest, None on a CPU. The partitions are modes of Instinct GPUs ("SPX", "NPS1"; "CPX+SPX" if they
    differ). ``memory`` has total and used bytes of each GPU; ``devices`` are the Instinct GPUs.
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
        """The accelerator's row in the hardware table."""
        return accelerators.hardware(self.hardware)

    @property
    def target(self) -> ServingTarget:
        """The machine as a target of one node. Raises `UserError` when its partitions are more GPUs than a node has."""
        return check_target(ServingTarget(self.hardware, self.gpus, hbm_bytes=self.hbm_bytes))

    @property
    def partitioned(self) -> bool:
        """Whether the GPUs are partitions of devices."""
        return self.compute_partition not in (None, "SPX")

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values, without the list of single devices."""
        names = ("hardware", "gpus", "hbm_bytes", "compute_partition", "memory_partition")
        return {name: getattr(self, name) for name in names}


def detect(machine: Host) -> DetectedAccelerators:
    """Return the accelerators of a machine.

    Raises `UserError` for a GPU that the hardware table lacks, for GPUs of different kinds, and when all are hidden.
    """
    instinct = amd_gpus(machine)
    if instinct:
        visible = [instinct[index] for index in visible_amd(machine.environ, [gpu.uuid for gpu in instinct])]
        if not visible:
            raise UserError(
                f"this machine has {len(instinct)} AMD GPUs, but {ROCR} and {CUDA} leave none of them",
                hint=f"unset {ROCR} {CUDA} HIP_VISIBLE_DEVICES, or name the target: --target cpu",
            )
        return DetectedAccelerators(
            hardware=_one_kind([_row(gpu) for gpu in visible]).name,
            gpus=len(visible),
            hbm_bytes=min(gpu.memory for gpu in visible),
            compute_partition="+".join(sorted({gpu.compute_partition or "" for gpu in visible} - {""})) or None,
            memory_partition="+".join(sorted({gpu.memory_partition or "" for gpu in visible} - {""})) or None,
            memory=tuple((gpu.memory, gpu.in_use) for gpu in visible),
            devices=tuple(visible),
        )
    return _nvidia(machine) or DetectedAccelerators(hardware="cpu", gpus=1, hbm_bytes=None)


def _row(gpu: AmdGpu) -> Hardware:
    row = accelerators.by_pci(gpu.device_id)
    if row is None:
        expected = ", ".join(f"{pci} ({row.name})" for row in accelerators.table().values() for pci in row.pci)
        raise UserError(
            f"this machine has an AMD GPU with device id 0x{gpu.device_id:04x} ({gpu.arch}), expected one of"
            f" {expected}",
            hint="name the most similar accelerator with --target",
        )
    return row


def _one_kind(rows: Sequence[Hardware]) -> Hardware:
    counts = Counter(row.name for row in rows)
    if len(counts) > 1:
        kinds = " and ".join(f"{count} x {name}" for name, count in counts.items())
        raise UserError(
            f"this machine has {kinds}, expected GPUs of one kind, as each gets the same share of the work",
            hint=f"make only the GPUs of one kind visible: {CUDA}=0,1,...",
        )
    return rows[0]


def nvidia_smi(machine: Host, fields: Sequence[str], *options: str) -> list[list[str]]:
    """Return one row for each GPU with one cell for each of the ``fields``, by nvidia-smi's query.

    Empty without nvidia-smi or with an unknown field. ``options`` are further arguments.
    """
    query = f"--query-gpu={','.join(fields)}"
    output = machine.run(("nvidia-smi", query, "--format=csv,noheader,nounits", *options)) or ""
    rows = [[cell.strip() for cell in row] for row in csv.reader(output.splitlines())]
    return [row for row in rows if len(row) == len(fields)]


def _nvidia(machine: Host) -> DetectedAccelerators | None:
    rows = nvidia_smi(machine, _MEMORY)
    rows = [rows[index] for index in select_devices(machine.environ.get(CUDA), [row[0] for row in rows])]
    if not rows:
        return None
    general = accelerators.hardware("cuda")
    # Total minus what the driver reserves is what CUDA reports, on an H200 to the last MiB.
    memory = tuple(((_mib(total) or 0) - (_mib(reserved) or 0), _mib(in_use)) for _, _, total, reserved, in_use in rows)
    return DetectedAccelerators(
        hardware=_one_kind([accelerators.by_name(name) or general for _, name, *_ in rows]).name,
        gpus=len(rows),
        hbm_bytes=min(total for total, _ in memory) or None,
        memory=memory,
    )


def _mib(cell: str) -> int | None:
    """Return the bytes of a cell in MiB.

    None for "[N/A]", as for memory shared with the CPU or hidden from a partition.
    """
    return int(cell) << 20 if cell.isdigit() else None


def select_devices(value: str | None, uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the indices into ``uuids`` that a visible-devices variable selects, in its order; all of them for None.

    Entries are numbers or UUIDs. As in the runtimes of AMD and NVIDIA, a UUID may be abbreviated, and the first entry
    that matches no device, or several, ends the list.
    """
    if value is None:
        return tuple(range(len(uuids)))
    indices: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        indices += matches
    return tuple(indices)


def visible_amd(environ: Mapping[str, str], uuids: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the AMD GPUs that vLLM sees.

    ROCR's variable limits them first, then CUDA's, or HIP's if that is unset; an empty variable counts as unset.
    """
    by_rocr = select_devices(environ.get(ROCR) or None, uuids)
    remaining = select_devices(environ.get(CUDA) or environ.get(HIP) or None, [uuids[index] for index in by_rocr])
    return tuple(by_rocr[index] for index in remaining)


def visible_devices(environ: Mapping[str, str], kind: str) -> VisibleDevices | None:
    """Return the GPUs that ``environ`` leaves to a launch on ``kind`` (rocm, cuda, cpu); None when it limits nothing.

    Entries are passed on unchanged: only the runtime can interpret UUIDs and numbers of MIG slices. Raises `UserError`
    when HIP's variable and CUDA's name different GPUs, because vLLM on ROCm would not start.
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
    # Behind this variable the runtime numbers devices from 0.
    names = tuple(str(number) for number in range(len(_entries(environ[ROCR]))))
    return VisibleDevices(names, f"{ROCR}={environ[ROCR]}", limit)


def _entries(value: str) -> tuple[str, ...]:
    """Return the entries of a visible-devices variable up to the first that means "none", as the runtimes do."""
    entries = (entry.strip() for entry in value.split(","))
    return tuple(takewhile(lambda entry: entry not in ("", "-1", "NoDevFiles"), entries))


def local_device(kind: str, machine: Host | None = None) -> Device:
    """Return the record of a device by PyTorch's name ("cpu", "cuda:1", "auto"). Raises `UserError` as in `detect`."""
    machine = machine or Host()
    detected = None if kind.startswith("cpu") else detect(machine)
    if detected is None or detected.hardware == "cpu":
        return Device("cpu", cpu_name(machine))
    names = nvidia_smi(machine, ("name",)) if detected.accelerator.kind == "cuda" else []
    return Device(detected.hardware, names[0][0] if names else detected.accelerator.title)
