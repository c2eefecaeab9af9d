"""Looks at the operating system: NUMA balancing, the IOMMU, shared memory, limits, the disk for compiled kernels."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.serving.host.finding import Outcome, Status
from pipeline.serving.host.look.devices import user_of
from pipeline.serving.host.subject import Subject

_GIB = 1 << 30
_SHARED = 16 * _GIB
_SHARED_LEAST = 1 * _GIB  # Docker's default is 64 MB
_OPEN_FILES = 65535
_CACHE = 10 * _GIB
_PASSING = ("iommu=pt", "iommu.passthrough=1", "iommu=off", "amd_iommu=off", "intel_iommu=off")
_IPC_LOCK = 14  # bit of the capability, linux/capability.h


def numa_balancing(subject: Subject) -> Outcome:
    """The kernel leaves pages where they are."""
    value = subject.machine.text("proc/sys/kernel/numa_balancing")
    if value is None:
        return Outcome("skipped", "this kernel has no NUMA balancing")
    return Outcome("ok" if value == "0" else "warn", value)


def iommu(subject: Subject) -> Outcome:
    """No IOMMU translates between GPUs that talk to each other."""
    machine = subject.machine
    if not subject.several:
        return Outcome("skipped", "one GPU has nobody to talk to")
    words = (machine.text("proc/cmdline") or "").split()
    passing = [word for word in words if word in _PASSING]
    if passing:
        return Outcome("ok", passing[0])
    devices = [] if subject.detected is None else [gpu.device for gpu in subject.detected.devices]
    types = {machine.text(device / "iommu_group" / "type") for device in devices if device is not None} - {None}
    if types == {"identity"}:
        return Outcome("ok", "the GPUs' groups are passed through")
    if types:
        return Outcome("warn", f"the GPUs' groups are of type {', '.join(sorted(str(kind) for kind in types))}")
    if machine.glob("sys/kernel/iommu_groups/*"):
        return Outcome("warn", "an IOMMU is on, and iommu=pt is not on the kernel's command line")
    return Outcome("ok", "no IOMMU is on")


def shared_memory(subject: Subject) -> Outcome:
    """Room for the ranks of a launch to meet."""
    if not subject.several:
        return Outcome("skipped", "one GPU needs none")
    space = subject.machine.space(subject.machine.path("dev/shm"))
    if space is None:
        return Outcome("fail", "there is no /dev/shm")
    found = f"{_gib(space.total)}, {_gib(space.free)} of it free"
    if space.free < _SHARED_LEAST:
        return Outcome("fail", found)
    return Outcome("ok" if space.total >= _SHARED else "warn", found)


def locked_memory(subject: Subject) -> Outcome:
    """RDMA may pin what it moves."""
    machine = subject.machine
    if subject.target.nodes == 1:
        return Outcome("skipped", "one node needs no RDMA")
    values = {"user": user_of(subject)}
    capabilities = int(machine.table("proc/self/status").get("CapEff", "0"), 16)
    if capabilities >> _IPC_LOCK & 1:
        return Outcome("ok", "the capability IPC_LOCK", values)
    soft, hard = _limit(subject, "Max locked memory")
    if soft is None:
        return Outcome("ok", "unlimited", values)
    note = " (the hard limit is unlimited: ulimit -l unlimited is enough)" if hard is None else ""
    return Outcome("fail", f"{soft / 2**20:,.1f} MiB{note}", values)


def open_files(subject: Subject) -> Outcome:
    """As many files and sockets as vLLM will ask for."""
    values = {"user": user_of(subject)}
    if not subject.machine.text("proc/self/limits"):
        return Outcome("skipped", "this system does not say", values)
    hard = _limit(subject, "Max open files")[1]
    if hard is None or hard >= _OPEN_FILES:
        return Outcome("ok", "unlimited" if hard is None else str(hard), values)
    return Outcome("warn", str(hard), values)


def compile_cache(subject: Subject) -> Outcome:
    """A disk that compiled kernels fit on."""
    environ = subject.machine.environ
    home = Path(environ.get("HOME", "/root"))
    caches = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environ.get("VLLM_CACHE_ROOT") or caches / "vllm")
    values = {"folder": folder}
    space = subject.machine.space(subject.machine.path(str(folder)))
    if space is None:
        return Outcome("skipped", f"{folder} is on no disk that can be asked", values)
    status: Status = "ok" if space.free >= _CACHE else "warn" if space.free >= _CACHE // 10 else "fail"
    return Outcome(status, f"{_gib(space.free)} free", values)


def _limit(subject: Subject, name: str) -> tuple[int | None, int | None]:
    """Soft and hard limit of this process, from /proc/self/limits; None is unlimited."""
    text = subject.machine.text("proc/self/limits") or ""
    found = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    if found is None:
        return None, None
    soft, hard = (None if value == "unlimited" else int(value) for value in found.groups())
    return soft, hard


def _gib(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB"
