"""Looks at the operating system, the network, the processor and the serving environment. Each says what it saw."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.base import hardware as accelerators
from pipeline.base.errors import UserError
from pipeline.base.hardware import local_cpu_flags
from pipeline.serving.environment import parse_version
from pipeline.serving.host.gpus import user_of
from pipeline.serving.host.subject import Outcome, Status, Subject, Wanted
from pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ
from pipeline.serving.running.deployment import listener

_GIB = 1 << 30
_SHARED = 16 * _GIB
_SHARED_LEAST = 1 * _GIB  # Docker's default is 64 MB
_OPEN_FILES = 65535
_CACHE = 10 * _GIB
_PASSING = ("iommu=pt", "iommu.passthrough=1", "iommu=off", "amd_iommu=off", "intel_iommu=off")
_IPC_LOCK = 14  # bit of the capability, linux/capability.h
_LEAST = 4 << 30  # what vLLM's own processes and a small KV cache take
_FIRST, _LAST = (parse_version(version)[:2] for version in (OLDEST_READ, NEWEST_READ))
_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "a CPU"}
_BUILD_FIXES = {
    "rocm": "install vLLM's ROCm build in an environment of its own, or use the image rocm/vllm; set QUANTMINT_VLLM",
    "cuda": "install vllm in an environment of its own, or use the image vllm/vllm-openai; set QUANTMINT_VLLM",
    "cpu": "`make serving` builds vLLM for a CPU",
}


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


def port(subject: Subject) -> Outcome:
    """A server could listen there."""
    values = {"port": subject.port}
    if subject.port is None:
        return Outcome("skipped", "no --port was given", values)
    reason = subject.machine.binds(subject.port)
    if reason is None:
        return Outcome("ok", f"{subject.port} is free", values)
    holder = listener(subject.port)
    why = f"is not free: {reason}" if holder is None else f"is held by {holder}"
    return Outcome("fail", f"{subject.port} {why}", values)


def rdma(subject: Subject) -> Outcome:
    """Adapters whose ports are up: what ibstat shows, from the files that it reads."""
    machine = subject.machine
    if subject.target.nodes == 1:
        return Outcome("skipped", "one node needs no RDMA")
    ports = machine.glob("sys/class/infiniband/*/ports/*")
    if not ports:
        return Outcome("warn", "no RDMA adapter")
    # "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"
    up = [
        place
        for place in ports
        if "ACTIVE" in (machine.text(place / "state") or "") and "LinkUp" in (machine.text(place / "phys_state") or "")
    ]
    down = [f"{place.parent.parent.name} port {place.name}" for place in ports if place not in up]
    rates = sorted({rate for place in up if (rate := machine.text(place / "rate"))})
    found = f"{len(up)} of {len(ports)} ports active" + (f", {', '.join(rates)}" if rates else "")
    if down:
        found += f"; down: {', '.join(down[:4])}" + (" ..." if len(down) > 4 else "")
    return Outcome("ok" if up and not down else "warn", found)


def flags(subject: Subject) -> Outcome:
    """Instruction sets that vLLM's kernels use."""
    known = local_cpu_flags(subject.machine.text("proc/cpuinfo") or "")
    if known is None:
        return Outcome("skipped", "this processor lists no flags")
    has = [name for flag, name in (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("amx_tile", "AMX")) if flag in known]
    found = ", ".join(has) or "neither AVX2 nor AVX-512"
    return Outcome("ok" if "avx512f" in known else "warn" if "avx2" in known else "fail", found)


def memory(subject: Subject) -> Outcome:
    """Room for the weights, and for what vLLM needs beside them."""
    weights = 0 if subject.wanted is None or subject.wanted.weights is None else subject.wanted.weights
    wanted = weights + _LEAST
    of_which = f" ({_gib(weights)} of weights)" if weights else ""
    values = {"wanted": f"{_gib(wanted)} free{of_which}"}
    # "MemAvailable:   12345 kB"
    available = subject.machine.table("proc/meminfo").get("MemAvailable", "").split()
    if not available:
        return Outcome("skipped", "this system does not say how much is free", values)
    free = int(available[0]) << 10
    status: Status = "ok" if free >= wanted else "fail" if free < weights else "warn"
    return Outcome(status, f"{_gib(free)} free", values)


def vllm(subject: Subject) -> Outcome:
    """There is a vLLM, of a version that the table of knobs knows."""
    first, last = (".".join(map(str, version)) for version in (_FIRST, _LAST))
    values = {"first": first, "last": last, "fix": f"install vLLM {last}, or plan for this one with care"}
    there = subject.installed
    if there is None or there.vllm is None:
        absent = f"{there.python} has no vLLM" if there is not None else subject.missing
        fix = "`make serving` builds one for a CPU; on a GPU install vLLM's own build and set QUANTMINT_VLLM to it"
        return Outcome("fail", absent, values | {"fix": fix})
    try:
        version = parse_version(there.vllm)[:2]
    except UserError:
        return Outcome("warn", f"{there.vllm}, which is no release", values)
    if version < _FIRST:
        return Outcome("fail", there.vllm, values)
    return Outcome("ok" if version <= _LAST else "warn", there.vllm, values)


def build(subject: Subject) -> Outcome:
    """That vLLM computes on this hardware."""
    values = {"kind": _BUILDS[subject.kind], "fix": _BUILD_FIXES[subject.kind]}
    there = subject.installed
    if there is None or there.vllm is None:
        return Outcome("skipped", "there is no vLLM", values)
    if there.build is None:
        return Outcome("fail", f"{there.python} has no torch", values)
    found = f"built for {_BUILDS[there.build]} (torch {there.versions.get('torch', 'of unknown version')})"
    return Outcome("ok" if there.build == subject.kind else "fail", found, values)


def quark(subject: Subject) -> Outcome:
    """What emulates microscaling formats is there, if they are emulated."""
    values = {"distributions": "amd-quark", "python": "python"}
    wanted, there = subject.wanted, subject.installed
    if wanted is None:
        return Outcome("skipped", "needed where vLLM emulates an MX scheme; --model tells", values)
    needed = accelerators.needs(subject.target.hardware, wanted.scheme, wanted.kv_cache, wanted.checkpoint_format)
    if not needed:
        title = subject.target.accelerator.title
        return Outcome("skipped", f"{_scheme(wanted)} is not emulated on {title}", values)
    if there is None:
        return Outcome("skipped", "there is no serving environment", values)
    values = {"distributions": " ".join(needed), "python": there.python}
    absent = [name for name in needed if name not in there.versions]
    if absent:
        return Outcome("fail", f"{' and '.join(absent)} is not there", values)
    return Outcome("ok", ", ".join(f"{name} {there.versions[name]}" for name in needed), values)


def checkpoint(subject: Subject) -> Outcome:
    """vLLM has the kernels that this checkpoint asks for."""
    target, wanted = subject.target, subject.wanted
    values = {
        "hardware": target.accelerator.title,
        "fix": "serve it elsewhere, or quantize to a scheme that loads here",
    }
    if wanted is None:
        return Outcome("skipped", "no --model was given", values)
    flags = local_cpu_flags(subject.machine.text("proc/cpuinfo") or "") if subject.kind == "cpu" else None
    asked = (target.hardware, wanted.scheme, wanted.kv_cache, wanted.checkpoint_format)
    reason = accelerators.refusal(*asked, cpu_flags=flags)
    if reason is not None:
        return Outcome("fail", reason, values)
    found = f"{_scheme(wanted)}, KV cache {wanted.kv_cache}"
    cautions = accelerators.cautions(*asked, cpu_flags=flags)
    if cautions:
        values["fix"] = "it loads all the same; `quantmint schemes` shows what runs as it is stored"
        return Outcome("warn", f"{found}: {'; '.join(cautions)}", values)
    return Outcome("ok", found, values)


def _scheme(wanted: Wanted) -> str:
    return "16 bit" if wanted.scheme == "none" else wanted.scheme
