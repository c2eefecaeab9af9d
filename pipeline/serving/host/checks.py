"""Check whether a machine is ready to serve: one function a row of `checks.yaml`, which has texts and sources.

Checks only read; they change nothing on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from quantmint.pipeline.base import hardware
from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.host.context import (
    CheckContext,
    CheckpointNeeds,
    HostCheckResult,
    HostFinding,
    Status,
    gather_context,
    plan_target,
)
from quantmint.pipeline.serving.host.detect import CUDA, HIP
from quantmint.pipeline.serving.knobs.table import NEWEST_READ, OLDEST_READ
from quantmint.pipeline.serving.plan import LaunchPlan

_DOCKER = "docker run --device /dev/kfd --device /dev/dri --group-add=video"
_IDLE_USE = 1 << 30  # bytes that a driver and a desktop may use of an idle GPU
_TOLERANCE = 0.95  # of the memory that a plan assumes: drivers reserve some


def _accelerators(context: CheckContext) -> HostCheckResult:
    target, detected = context.target, context.detected
    title = target.accelerator.title
    expected = title if target.accelerator.kind == "cpu" else f"{target.gpus} x {title}"
    if detected is None:
        return HostCheckResult("fail", context.detection_error, {"expected": expected})
    row = detected.accelerator
    present = row.title if row.kind == "cpu" else f"{detected.gpus} x {row.title}"
    if target.accelerator.kind == "cpu":
        return HostCheckResult("ok", present, {"expected": "a processor"})
    # `cuda` stands for any NVIDIA GPU; every other name for one kind of GPU.
    same = row.kind == "cuda" if target.hardware == "cuda" else row.name == target.hardware
    return HostCheckResult("ok" if same and detected.gpus >= target.gpus else "fail", present, {"expected": expected})


def _partition(context: CheckContext) -> HostCheckResult:
    detected, assumed = context.detected, context.target.memory
    memory = "their memory" if assumed is None else _gib(assumed)
    if detected is None or detected.compute_partition is None:
        return HostCheckResult("skipped", "the driver does not report partitions", {"memory": memory})
    modes = f"{detected.compute_partition} with {detected.memory_partition or 'an unknown memory mode'}"
    size = "" if detected.hbm_bytes is None else f", {_gib(detected.hbm_bytes)} each"
    if not detected.partitioned and detected.memory_partition in (None, "NPS1"):
        return HostCheckResult("ok", modes + size, {"memory": memory})
    enough = assumed is None or (detected.hbm_bytes or 0) >= _TOLERANCE * assumed
    return HostCheckResult("warn" if enough else "fail", modes + size, {"memory": memory})


def _memory_in_use(context: CheckContext) -> HostCheckResult:
    tool = "sudo fuser -v /dev/kfd" if context.kind == "rocm" else "nvidia-smi"
    values = {"share": f"{context.utilization:.0%}", "command": tool}
    # For a partition the driver reports the memory in use on the whole device, which says nothing about the partition.
    detected = context.detected
    applies = detected is not None and detected.accelerator.kind == context.kind and not detected.partitioned
    memory = detected.memory if detected is not None and applies else ()
    gpus = [(in_use, total, index) for index, (total, in_use) in enumerate(memory) if in_use is not None and total]
    if not gpus:
        return HostCheckResult("skipped", "the driver does not report how much is in use", values)
    in_use, total, index = max(gpus, key=lambda gpu: gpu[0] / gpu[1])
    if in_use < _IDLE_USE:
        return HostCheckResult("ok", f"at most {_gib(in_use)} in use", values)
    status: Status = "fail" if in_use > (1 - context.utilization) * total else "warn"
    return HostCheckResult(status, f"{_gib(in_use)} of {_gib(total)} in use on GPU {index}", values)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _dri(context: CheckContext) -> HostCheckResult:
    machine, detected = context.machine, context.detected
    minors = [gpu.render for gpu in detected.devices if gpu.render is not None] if detected is not None else []
    nodes = [machine.path(f"dev/dri/renderD{minor}") for minor in minors] or machine.glob("dev/dri/renderD*")
    return _device(context, nodes or [machine.path("dev/dri")])


def _device(context: CheckContext, paths: list[Path]) -> HostCheckResult:
    def name(path: Path) -> str:
        return f"/{path.relative_to(context.machine.root)}"

    absent = [path for path in paths if not path.exists()]
    if absent:
        fix = f"load the driver: sudo modprobe amdgpu; in a container: {_DOCKER}"
        return HostCheckResult("fail", f"{name(absent[0])} does not exist", {"fix": fix, "root": "modprobe amdgpu"})
    for path in paths:
        reason = context.machine.opens(path)
        if reason is not None:
            user = context.machine.environ.get("USER") or "root"
            fix = f"sudo usermod -a -G video,render {user}, then log in again; in a container: {_DOCKER}"
            values = {"fix": fix, "root": f"usermod -a -G video,render {user}"}
            return HostCheckResult("fail", f"{name(path)} cannot be opened: {reason}", values)
    return HostCheckResult("ok", "open" if len(paths) == 1 else f"{len(paths)} render nodes are open")


def _visible_devices(context: CheckContext) -> HostCheckResult:
    environ = context.machine.environ
    hip, cuda = environ.get(HIP) or None, environ.get(CUDA) or None
    if hip is None:
        return HostCheckResult("ok", "unset" if cuda is None else f"unset; {CUDA}={cuda}")
    fix = f"unset {HIP}" if cuda is not None else f"export {CUDA}={hip}; unset {HIP}"
    if cuda not in {None, hip}:
        return HostCheckResult("fail", f"{HIP}={hip} and {CUDA}={cuda}", {"fix": fix})
    return HostCheckResult("warn", f"{HIP}={hip}", {"fix": fix})


_SHARED = 16 << 30
_SHARED_MINIMUM = 1 << 30  # Docker's default is 64 MB
_PASS_THROUGH = ("iommu=pt", "iommu.passthrough=1", "iommu=off", "amd_iommu=off", "intel_iommu=off")
_FIRST, _LAST = (parse_version(version)[:2] for version in (OLDEST_READ, NEWEST_READ))


def _numa_balancing(context: CheckContext) -> HostCheckResult:
    value = context.machine.text("proc/sys/kernel/numa_balancing")
    if value is None:
        return HostCheckResult("skipped", "this kernel has no NUMA balancing")
    return HostCheckResult("ok" if value == "0" else "warn", value)


def _iommu(context: CheckContext) -> HostCheckResult:
    machine = context.machine
    if not context.multi_gpu:
        return HostCheckResult("skipped", "a single GPU exchanges nothing with others")
    options = [word for word in (machine.text("proc/cmdline") or "").split() if word in _PASS_THROUGH]
    if options:
        return HostCheckResult("ok", options[0])
    if machine.glob("sys/kernel/iommu_groups/*"):
        return HostCheckResult("warn", "an IOMMU is on, and iommu=pt is not on the kernel's command line")
    return HostCheckResult("ok", "no IOMMU is on")


def _shared_memory(context: CheckContext) -> HostCheckResult:
    if not context.multi_gpu:
        return HostCheckResult("skipped", "a single GPU needs none")
    space = context.machine.space(context.machine.path("dev/shm"))
    if space is None:
        return HostCheckResult("fail", "there is no /dev/shm")
    observation = f"{_gib(space.total)}, {_gib(space.free)} of it free"
    if space.free < _SHARED_MINIMUM:
        return HostCheckResult("fail", observation)
    return HostCheckResult("ok" if space.total >= _SHARED else "warn", observation)


def _rdma(context: CheckContext) -> HostCheckResult:
    machine = context.machine
    if context.target.nodes == 1:
        return HostCheckResult("skipped", "one node needs no RDMA")
    ports = machine.glob("sys/class/infiniband/*/ports/*")
    if not ports:
        return HostCheckResult("warn", "no RDMA adapter")
    # The files say "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)".
    active = [
        port
        for port in ports
        if "ACTIVE" in (machine.text(port / "state") or "") and "LinkUp" in (machine.text(port / "phys_state") or "")
    ]
    rates = sorted({rate for port in active if (rate := machine.text(port / "rate"))})
    observation = f"{len(active)} of {len(ports)} ports active" + (f", {', '.join(rates)}" if rates else "")
    return HostCheckResult("ok" if len(active) == len(ports) else "warn", observation)


def _vllm(context: CheckContext) -> HostCheckResult:
    first, last = (".".join(map(str, version)) for version in (_FIRST, _LAST))
    values = {"first": first, "last": last, "fix": f"install vLLM {last}, or plan for this one with care"}
    installed = context.installed
    if installed is None or installed.vllm is None:
        absence = f"{installed.python} has no vLLM" if installed is not None else context.environment_error
        fix = "`make serving` installs one for a CPU; on a GPU install vLLM's own build and set QUANTMINT_VLLM to it"
        return HostCheckResult("fail", absence, values | {"fix": fix})
    version = parse_version(installed.vllm)[:2]
    if version < _FIRST:
        return HostCheckResult("fail", installed.vllm, values)
    return HostCheckResult("ok" if version <= _LAST else "warn", installed.vllm, values)


def _rocm_version(context: CheckContext) -> HostCheckResult:
    values = {"least": "7.0" if context.target.accelerator.arch == "gfx950" else "6.3"}
    torch = "" if context.installed is None else context.installed.versions.get("torch", "").partition("+rocm")[2]
    version = context.machine.text("opt/rocm/.info/version") or torch
    if not version:
        return HostCheckResult("skipped", "neither /opt/rocm nor PyTorch names a version", values)
    enough = parse_version(version) >= parse_version(values["least"])
    note = f", PyTorch's is {torch}" if torch not in version else ""
    return HostCheckResult("ok" if enough else "fail", version + note, values)


def _aiter_version(context: CheckContext) -> HostCheckResult:
    installed = context.installed
    if installed is None:
        return HostCheckResult("skipped", "there is no serving environment")
    version = installed.versions.get("amd-aiter") or installed.versions.get("aiter")
    return HostCheckResult("fail", "AITER is not installed") if version is None else HostCheckResult("ok", version)


def _quark(context: CheckContext) -> HostCheckResult:
    values = {"distributions": "amd-quark", "python": "python"}
    checkpoint, installed = context.checkpoint, context.installed
    if checkpoint is None:
        return HostCheckResult(
            "skipped", "only emulated MX schemes need it; --model names a checkpoint to check", values
        )
    needed = hardware.needs(context.target.hardware, *checkpoint.served)
    if not needed:
        title = context.target.accelerator.title
        return HostCheckResult("skipped", f"{_scheme(checkpoint)} is not emulated on {title}", values)
    if installed is None:
        return HostCheckResult("skipped", "there is no serving environment", values)
    values = {"distributions": " ".join(needed), "python": installed.python}
    absent = [name for name in needed if name not in installed.versions]
    if absent:
        return HostCheckResult("fail", f"{' and '.join(absent)} is not installed", values)
    return HostCheckResult("ok", ", ".join(f"{name} {installed.versions[name]}" for name in needed), values)


def _checkpoint(context: CheckContext) -> HostCheckResult:
    target, checkpoint = context.target, context.checkpoint
    values = {
        "hardware": target.accelerator.title,
        "fix": "serve it elsewhere, or quantize to a scheme that loads here",
    }
    if checkpoint is None:
        return HostCheckResult("skipped", "no --model was given", values)
    flags = hardware.local_cpu_flags(context.machine.text("proc/cpuinfo") or "") if context.kind == "cpu" else None
    experts = checkpoint.expert_schemes
    reason = hardware.refusal(target.hardware, *checkpoint.served, expert_schemes=experts, cpu_flags=flags)
    if reason is not None:
        return HostCheckResult("fail", reason, values)
    observation = f"{_scheme(checkpoint)}, KV cache {checkpoint.kv_cache}"
    cautions = hardware.cautions(target.hardware, *checkpoint.served, expert_schemes=experts, cpu_flags=flags)
    if cautions:
        values["fix"] = "it loads nevertheless; `quantmint schemes` shows which schemes run natively"
        return HostCheckResult("warn", f"{observation}: {'; '.join(cautions)}", values)
    return HostCheckResult("ok", observation, values)


def _scheme(checkpoint: CheckpointNeeds) -> str:
    return "16 bit" if checkpoint.scheme == "none" else checkpoint.scheme


CHECK_FUNCTIONS: Mapping[str, Callable[[CheckContext], HostCheckResult]] = {
    "accelerators": _accelerators,
    "partition": _partition,
    "GPU memory": _memory_in_use,
    "/dev/kfd": lambda context: _device(context, [context.machine.path("dev/kfd")]),
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
    """One row of `checks.yaml`; the check function fills the {placeholders} of its texts."""

    name: str
    kinds: list[str]
    expected: str
    why: str
    fix: str
    source: str
    as_root: Sequence[str] = ()

    def run(self, context: CheckContext) -> HostFinding:
        """Run the check. The finding's ``fix`` is empty text unless its status is "warn" or "fail"."""
        result = CHECK_FUNCTIONS[self.name](context)
        values = dict(result.values or {})
        wrong = result.status in ("warn", "fail")
        return HostFinding(
            name=self.name,
            status=result.status,
            found=result.observation,
            expected=self.expected.format_map(values),
            why=self.why,
            fix=self.fix.format_map(values) if wrong else "",
            source=self.source,
            as_root=tuple(text.format_map(values) for text in self.as_root) if wrong else (),
        )


@cache
def checks() -> Mapping[str, MachineCheck]:
    """Return every check by name, in the order of `checks.yaml`."""
    return MappingProxyType({row["name"]: MachineCheck(**row) for row in load_table(__file__, "checks.yaml")})


def run_checks(context: CheckContext, names: Collection[str] | None = None) -> tuple[HostFinding, ...]:
    """Run the checks for the target's kind of hardware, in the order of `checks.yaml`; with ``names`` only those."""
    chosen = (check for check in checks().values() if names is None or check.name in names)
    return tuple(check.run(context) for check in chosen if context.kind in check.kinds)


def preflight(
    plan: LaunchPlan, machine: Host, *, vllm: str | Path | None = None, checkpoint: CheckpointNeeds | None = None
) -> tuple[HostFinding, ...]:
    """Run the checks that a plan requires of the machine; checks for other kinds of hardware are left out."""
    if not plan.host:
        return ()
    utilization = float(plan.option("--gpu-memory-utilization") or 0.92)
    target = plan_target(plan)
    context = gather_context(machine, target=target, vllm=vllm, checkpoint=checkpoint, utilization=utilization)
    return run_checks(context, {check.name for check in plan.host})
