"""The checks of a machine as a table, and what they find.

What each looks for and why is in `checks.yaml`; the functions that look say what they saw. Nothing is ever changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from quantmint.pipeline.base import hardware
from quantmint.pipeline.base.data import beside
from quantmint.pipeline.base.machine import Machine
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.host.context import (
    CheckContext,
    CheckpointNeeds,
    CheckResult,
    HostFinding,
    Status,
    gather_context,
    plan_target,
)
from quantmint.pipeline.serving.host.detect import CUDA, HIP
from quantmint.pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ
from quantmint.pipeline.serving.plan import LaunchPlan

_DOCKER = "docker run --device /dev/kfd --device /dev/dri --group-add=video"
_NOISE = 1 << 30  # what a driver and a desktop may hold of an idle GPU
_TOLERANCE = 0.95  # of the memory that a plan counts with: drivers keep some for themselves


def _accelerators(subject: CheckContext) -> CheckResult:
    target, found = subject.target, subject.detected
    title = target.accelerator.title
    wanted = title if target.accelerator.kind == "cpu" else f"{target.gpus} x {title}"
    if found is None:
        return CheckResult("fail", subject.unknown, {"wanted": wanted})
    row = found.accelerator
    seen = row.title if row.kind == "cpu" else f"{found.gpus} x {row.title}"
    if target.accelerator.kind == "cpu":
        return CheckResult("ok", seen, {"wanted": "a processor"})
    # `cuda` is any GPU of its kind; every other name is one.
    same = row.kind == "cuda" if target.hardware == "cuda" else row.name == target.hardware
    return CheckResult("ok" if same and found.gpus >= target.gpus else "fail", seen, {"wanted": wanted})


def _partition(subject: CheckContext) -> CheckResult:
    found, counted = subject.detected, subject.target.memory
    memory = "their memory" if counted is None else _gib(counted)
    if found is None or found.compute_partition is None:
        return CheckResult("skipped", "the driver says nothing of partitions", {"memory": memory})
    modes = f"{found.compute_partition} with {found.memory_partition or 'an unknown memory mode'}"
    size = "" if found.hbm_bytes is None else f", {_gib(found.hbm_bytes)} each"
    if not found.partitioned and found.memory_partition in (None, "NPS1"):
        return CheckResult("ok", modes + size, {"memory": memory})
    enough = counted is None or (found.hbm_bytes or 0) >= _TOLERANCE * counted
    return CheckResult("warn" if enough else "fail", modes + size, {"memory": memory})


def _memory_in_use(subject: CheckContext) -> CheckResult:
    tool = "sudo fuser -v /dev/kfd" if subject.kind == "rocm" else "nvidia-smi"
    values = {"share": f"{subject.utilization:.0%}", "command": tool}
    # Of a partition the driver says what the whole device holds: that is nobody's share.
    found = subject.detected
    ours = found is not None and found.accelerator.kind == subject.kind and not found.partitioned
    known = found.memory if found is not None and ours else ()
    used = [(held, whole, index) for index, (whole, held) in enumerate(known) if held is not None and whole]
    if not used:
        return CheckResult("skipped", "the driver does not say how much is in use", values)
    most, whole, index = max(used, key=lambda entry: entry[0] / entry[1])
    if most < _NOISE:
        return CheckResult("ok", f"at most {_gib(most)} in use", values)
    status: Status = "fail" if most > (1 - subject.utilization) * whole else "warn"
    return CheckResult(status, f"{_gib(most)} of {_gib(whole)} in use on GPU {index}", values)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _dri(subject: CheckContext) -> CheckResult:
    machine, found = subject.machine, subject.detected
    minors = [gpu.render for gpu in found.devices if gpu.render is not None] if found is not None else []
    nodes = [machine.path(f"dev/dri/renderD{minor}") for minor in minors] or machine.glob("dev/dri/renderD*")
    return _device(subject, nodes or [machine.path("dev/dri")])


def _device(subject: CheckContext, paths: list[Path]) -> CheckResult:
    def name(path: Path) -> str:
        return f"/{path.relative_to(subject.machine.root)}"

    absent = [path for path in paths if not path.exists()]
    if absent:
        fix = f"load the driver: sudo modprobe amdgpu; in a container: {_DOCKER}"
        return CheckResult("fail", f"{name(absent[0])} is not there", {"fix": fix, "root": "modprobe amdgpu"})
    for path in paths:
        reason = subject.machine.opens(path)
        if reason is not None:
            user = subject.machine.environ.get("USER") or "root"
            fix = f"sudo usermod -a -G video,render {user}, then log in again; in a container: {_DOCKER}"
            values = {"fix": fix, "root": f"usermod -a -G video,render {user}"}
            return CheckResult("fail", f"{name(path)} cannot be opened: {reason}", values)
    return CheckResult("ok", "open" if len(paths) == 1 else f"{len(paths)} render nodes are open")


def _visible_devices(subject: CheckContext) -> CheckResult:
    environ = subject.machine.environ
    hip, cuda = environ.get(HIP) or None, environ.get(CUDA) or None
    if hip is None:
        return CheckResult("ok", "unset" if cuda is None else f"unset; {CUDA}={cuda}")
    fix = f"unset {HIP}" if cuda is not None else f"export {CUDA}={hip}; unset {HIP}"
    if cuda not in {None, hip}:
        return CheckResult("fail", f"{HIP}={hip} and {CUDA}={cuda}", {"fix": fix})
    return CheckResult("warn", f"{HIP}={hip}", {"fix": fix})


_SHARED = 16 << 30
_SHARED_LEAST = 1 << 30  # Docker's default is 64 MB
_PASSING = ("iommu=pt", "iommu.passthrough=1", "iommu=off", "amd_iommu=off", "intel_iommu=off")
_FIRST, _LAST = (parse_version(version)[:2] for version in (OLDEST_READ, NEWEST_READ))


def _numa_balancing(subject: CheckContext) -> CheckResult:
    value = subject.machine.text("proc/sys/kernel/numa_balancing")
    if value is None:
        return CheckResult("skipped", "this kernel has no NUMA balancing")
    return CheckResult("ok" if value == "0" else "warn", value)


def _iommu(subject: CheckContext) -> CheckResult:
    machine = subject.machine
    if not subject.several:
        return CheckResult("skipped", "one GPU has nobody to talk to")
    passing = [word for word in (machine.text("proc/cmdline") or "").split() if word in _PASSING]
    if passing:
        return CheckResult("ok", passing[0])
    if machine.glob("sys/kernel/iommu_groups/*"):
        return CheckResult("warn", "an IOMMU is on, and iommu=pt is not on the kernel's command line")
    return CheckResult("ok", "no IOMMU is on")


def _shared_memory(subject: CheckContext) -> CheckResult:
    if not subject.several:
        return CheckResult("skipped", "one GPU needs none")
    space = subject.machine.space(subject.machine.path("dev/shm"))
    if space is None:
        return CheckResult("fail", "there is no /dev/shm")
    found = f"{_gib(space.total)}, {_gib(space.free)} of it free"
    if space.free < _SHARED_LEAST:
        return CheckResult("fail", found)
    return CheckResult("ok" if space.total >= _SHARED else "warn", found)


def _rdma(subject: CheckContext) -> CheckResult:
    machine = subject.machine
    if subject.target.nodes == 1:
        return CheckResult("skipped", "one node needs no RDMA")
    ports = machine.glob("sys/class/infiniband/*/ports/*")
    if not ports:
        return CheckResult("warn", "no RDMA adapter")
    # "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"
    up = [
        place
        for place in ports
        if "ACTIVE" in (machine.text(place / "state") or "") and "LinkUp" in (machine.text(place / "phys_state") or "")
    ]
    rates = sorted({rate for place in up if (rate := machine.text(place / "rate"))})
    found = f"{len(up)} of {len(ports)} ports active" + (f", {', '.join(rates)}" if rates else "")
    return CheckResult("ok" if len(up) == len(ports) else "warn", found)


def _vllm(subject: CheckContext) -> CheckResult:
    first, last = (".".join(map(str, version)) for version in (_FIRST, _LAST))
    values = {"first": first, "last": last, "fix": f"install vLLM {last}, or plan for this one with care"}
    there = subject.installed
    if there is None or there.vllm is None:
        absent = f"{there.python} has no vLLM" if there is not None else subject.missing
        fix = "`make serving` builds one for a CPU; on a GPU install vLLM's own build and set QUANTMINT_VLLM to it"
        return CheckResult("fail", absent, values | {"fix": fix})
    version = parse_version(there.vllm)[:2]
    if version < _FIRST:
        return CheckResult("fail", there.vllm, values)
    return CheckResult("ok" if version <= _LAST else "warn", there.vllm, values)


def _rocm_version(subject: CheckContext) -> CheckResult:
    values = {"least": "7.0" if subject.target.accelerator.arch == "gfx950" else "6.3"}
    torch = "" if subject.installed is None else subject.installed.versions.get("torch", "").partition("+rocm")[2]
    found = subject.machine.text("opt/rocm/.info/version") or torch
    if not found:
        return CheckResult("skipped", "neither /opt/rocm nor PyTorch says which", values)
    enough = parse_version(found) >= parse_version(values["least"])
    beside = f", PyTorch's is {torch}" if torch not in found else ""
    return CheckResult("ok" if enough else "fail", found + beside, values)


def _aiter_version(subject: CheckContext) -> CheckResult:
    there = subject.installed
    if there is None:
        return CheckResult("skipped", "there is no serving environment")
    version = there.versions.get("amd-aiter") or there.versions.get("aiter")
    return CheckResult("fail", "AITER is not there") if version is None else CheckResult("ok", version)


def _quark(subject: CheckContext) -> CheckResult:
    values = {"distributions": "amd-quark", "python": "python"}
    wanted, there = subject.wanted, subject.installed
    if wanted is None:
        return CheckResult("skipped", "needed where vLLM emulates an MX scheme; --model tells", values)
    needed = hardware.needs(subject.target.hardware, *wanted[:3])
    if not needed:
        title = subject.target.accelerator.title
        return CheckResult("skipped", f"{_scheme(wanted)} is not emulated on {title}", values)
    if there is None:
        return CheckResult("skipped", "there is no serving environment", values)
    values = {"distributions": " ".join(needed), "python": there.python}
    absent = [name for name in needed if name not in there.versions]
    if absent:
        return CheckResult("fail", f"{' and '.join(absent)} is not there", values)
    return CheckResult("ok", ", ".join(f"{name} {there.versions[name]}" for name in needed), values)


def _checkpoint(subject: CheckContext) -> CheckResult:
    target, wanted = subject.target, subject.wanted
    values = {
        "hardware": target.accelerator.title,
        "fix": "serve it elsewhere, or quantize to a scheme that loads here",
    }
    if wanted is None:
        return CheckResult("skipped", "no --model was given", values)
    flags = hardware.local_cpu_flags(subject.machine.text("proc/cpuinfo") or "") if subject.kind == "cpu" else None
    reason = hardware.refusal(target.hardware, *wanted[:3], expert_schemes=wanted.expert_schemes, cpu_flags=flags)
    if reason is not None:
        return CheckResult("fail", reason, values)
    found = f"{_scheme(wanted)}, KV cache {wanted.kv_cache}"
    cautions = hardware.cautions(target.hardware, *wanted[:3], expert_schemes=wanted.expert_schemes, cpu_flags=flags)
    if cautions:
        values["fix"] = "it loads all the same; `quantmint schemes` shows what runs as it is stored"
        return CheckResult("warn", f"{found}: {'; '.join(cautions)}", values)
    return CheckResult("ok", found, values)


def _scheme(wanted: CheckpointNeeds) -> str:
    return "16 bit" if wanted.scheme == "none" else wanted.scheme


CHECK_FUNCTIONS: Mapping[str, Callable[[CheckContext], CheckResult]] = {
    "accelerators": _accelerators,
    "partition": _partition,
    "GPU memory": _memory_in_use,
    "/dev/kfd": lambda subject: _device(subject, [subject.machine.path("dev/kfd")]),
    "/dev/dri": _dri,
    "HIP_VISIBLE_DEVICES": _visible_devices,
    "numa_balancing": _numa_balancing,
    "iommu": _iommu,
    "/dev/shm": _shared_memory,  # noqa: S108 - the name of a check
    "ibstat": _rdma,
    "vllm": _vllm,
    "rocm": _rocm_version,
    "aiter": _aiter_version,
    "amd-quark": _quark,
    "checkpoint": _checkpoint,
}


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One row of `checks.yaml`; its texts have {values} that the look fills."""

    name: str
    kinds: list[str]
    expected: str
    why: str
    fix: str
    source: str
    as_root: Sequence[str] = ()

    def finding(self, subject: CheckContext) -> HostFinding:
        """Look, and say what was seen; a fix only where something is wrong."""
        seen = CHECK_FUNCTIONS[self.name](subject)
        values = dict(seen.values or {})
        wrong = seen.status in ("warn", "fail")
        return HostFinding(
            name=self.name,
            status=seen.status,
            found=seen.found,
            expected=self.expected.format_map(values),
            why=self.why,
            fix=self.fix.format_map(values) if wrong else "",
            source=self.source,
            as_root=tuple(text.format_map(values) for text in self.as_root) if wrong else (),
        )


@cache
def checks() -> Mapping[str, MachineCheck]:
    """Every check by name, in the order of the file."""
    return MappingProxyType({row["name"]: MachineCheck(**row) for row in beside(__file__, "checks.yaml")})


def run_checks(subject: CheckContext, names: Collection[str] | None = None) -> tuple[HostFinding, ...]:
    """Run the checks that are a question for the subject's hardware; of these only ``names`` where they are given."""
    asked = (check for check in checks().values() if names is None or check.name in names)
    return tuple(check.finding(subject) for check in asked if subject.kind in check.kinds)


def preflight(
    plan: LaunchPlan, machine: Machine, *, vllm: str | Path | None = None, wanted: CheckpointNeeds | None = None
) -> tuple[HostFinding, ...]:
    """The checks that a plan names; what is no question here is skipped."""
    if not plan.host:
        return ()
    utilization = float(plan.option("--gpu-memory-utilization") or 0.92)
    subject = gather_context(machine, target=plan_target(plan), vllm=vllm, wanted=wanted, utilization=utilization)
    return run_checks(subject, {check.name for check in plan.host})
