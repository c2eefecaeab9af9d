"""What this machine is: ``--target auto``.

    >>> detect(Machine()).target
    Target(hardware='mi300x', gpus=8, nodes=1, hbm_bytes=206141652992)

Instinct GPUs are read from the kernel's files (`topology.py`), NVIDIA's are asked of nvidia-smi; a machine with neither
serves on its CPU. Only GPUs that the environment leaves visible count.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserError
from pipeline.machine import Machine
from pipeline.serving import hardware as accelerators
from pipeline.serving.hardware import Hardware
from pipeline.serving.host.topology import AmdGpu, amd_gpus
from pipeline.serving.host.visible import CUDA, ROCR, visible_amd, visible_cuda
from pipeline.serving.planning.target import Target

_SMI = ("nvidia-smi", "--query-gpu=uuid,name,memory.total,memory.reserved,memory.used", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A visible GPU: bytes of memory in all, and of them in use (None where the driver does not say)."""

    memory: int
    used: int | None


@dataclass(frozen=True, slots=True)
class Detected:
    """The accelerators that a launch could use here.

    ``hardware`` is a name of the table; ``gpus`` counts what ROCm or CUDA numbers, so partitions where GPUs are
    partitioned; ``hbm_bytes`` is the memory of the smallest, as its driver says, None on a CPU. ``xgmi`` says whether
    every one of several Instinct GPUs has a link to every other, None where that is no question. ``compute_partition``
    and ``memory_partition`` are the modes of Instinct GPUs ("SPX", "NPS1"; "CPX+SPX" where they differ), None where
    the driver has none. ``devices`` are the Instinct GPUs.
    """

    hardware: str
    gpus: int
    hbm_bytes: int | None
    xgmi: bool | None = None
    compute_partition: str | None = None
    memory_partition: str | None = None
    memory: tuple[Gpu, ...] = ()
    devices: tuple[AmdGpu, ...] = ()

    @property
    def accelerator(self) -> Hardware:
        """The table's row."""
        return accelerators.hardware(self.hardware)

    @property
    def target(self) -> Target:
        """The machine as a target: one node, with the memory that its drivers report.

        UserError where partitions are more GPUs than such a node has, which no launch is planned over.
        """
        most = self.accelerator.gpus_per_node
        if self.gpus > most:
            raise UserError(
                f"this machine's {self.accelerator.title} are partitioned ({self.compute_partition} with"
                f" {self.memory_partition}): {self.gpus} GPUs, expected up to {most} in a node",
                hint="sudo amd-smi set --compute-partition SPX makes them whole; or choose some: "
                f"{CUDA}={','.join(str(number) for number in range(most))}",
            )
        return Target(self.hardware, self.gpus, hbm_bytes=self.hbm_bytes)

    @property
    def partitioned(self) -> bool:
        """Whether a GPU of this machine is a part of a device."""
        return self.compute_partition not in (None, "SPX")

    def to_json(self) -> dict[str, Any]:
        """The facts without the single devices."""
        return {
            "hardware": self.hardware,
            "gpus": self.gpus,
            "hbm_bytes": self.hbm_bytes,
            "xgmi": self.xgmi,
            "compute_partition": self.compute_partition,
            "memory_partition": self.memory_partition,
        }


def detect(machine: Machine) -> Detected:
    """Say what a machine is. UserError for a GPU that the table does not know, and for different ones side by side."""
    instinct = amd_gpus(machine)
    if instinct:
        found = [instinct[index] for index in visible_amd(machine.environ, [gpu.uuid for gpu in instinct])]
        if not found:
            raise UserError(
                f"this machine has {len(instinct)} AMD GPUs, but {ROCR} and {CUDA} leave none of them",
                hint=f"unset {ROCR} {CUDA} HIP_VISIBLE_DEVICES, or name the target: --target cpu",
            )
        return _instinct(found)
    return _nvidia(machine) or Detected(hardware="cpu", gpus=1, hbm_bytes=None)


def _instinct(gpus: Sequence[AmdGpu]) -> Detected:
    row = _one_kind([_row(gpu) for gpu in gpus])
    nodes = {gpu.node for gpu in gpus}
    return Detected(
        hardware=row.name,
        gpus=len(gpus),
        hbm_bytes=min(gpu.memory for gpu in gpus),
        xgmi=all(nodes - {gpu.node} <= gpu.peers for gpu in gpus) if len(gpus) > 1 else None,
        compute_partition=_mode([gpu.compute_partition for gpu in gpus]),
        memory_partition=_mode([gpu.memory_partition for gpu in gpus]),
        memory=tuple(Gpu(gpu.memory, gpu.used) for gpu in gpus),
        devices=tuple(gpus),
    )


def _row(gpu: AmdGpu) -> Hardware:
    row = accelerators.by_pci(gpu.device_id)
    if row is None:
        known = [row for row in accelerators.table().values() if row.pci]
        near = [row.name for row in known if row.arch == gpu.arch]
        raise UserError(
            f"this machine has an AMD GPU with device id 0x{gpu.device_id:04x} ({gpu.arch}), expected one of "
            + ", ".join(f"{identity} ({row.name})" for row in known for identity in row.pci),
            hint="name what it is most like: --target "
            + (" or --target ".join(near) if near else "cpu, where nothing is served on it"),
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


def _mode(modes: Sequence[str | None]) -> str | None:
    return "+".join(sorted({mode for mode in modes if mode})) or None


def _nvidia(machine: Machine) -> Detected | None:
    listed = machine.run(_SMI)
    rows = [[cell.strip() for cell in row] for row in csv.reader((listed or "").splitlines()) if len(row) == 5]
    rows = [rows[index] for index in visible_cuda(machine.environ, [row[0] for row in rows])]
    if not rows:
        return None
    general = accelerators.hardware("cuda")
    # What the driver reserves is nobody's: the rest is what CUDA says there is, seen on an H200 to the last MiB.
    memory = tuple(Gpu((_mib(whole) or 0) - (_mib(reserved) or 0), _mib(used)) for _, _, whole, reserved, used in rows)
    return Detected(
        hardware=_one_kind([accelerators.by_name(name) or general for _, name, *_ in rows]).name,
        gpus=len(rows),
        hbm_bytes=min(gpu.memory for gpu in memory) or None,
        memory=memory,
    )


def _mib(cell: str) -> int | None:
    """ "[N/A]" stands where GPU and CPU share their memory, and for what a partition may not see."""
    return int(cell) << 20 if cell.isdigit() else None
