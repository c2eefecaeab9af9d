"""Looks at GPUs: how many of what, whole, linked and free; and what lets a process use them. Each says what it saw."""

from __future__ import annotations

from pathlib import Path

from pipeline.serving.host.detect import CUDA, HIP, ROCR, Detected, chosen
from pipeline.serving.host.subject import Outcome, Status, Subject

_DOCKER = "docker run --device /dev/kfd --device /dev/dri --group-add=video"
_NOISE = 1 << 30  # what a driver and a desktop may hold of an idle GPU
_TOLERANCE = 0.95  # of the memory that a plan counts with: drivers keep some for themselves


def accelerators(subject: Subject) -> Outcome:
    """As many of the planned accelerators as one node needs."""
    target, found = subject.target, subject.detected
    title = target.accelerator.title
    wanted = title if target.accelerator.kind == "cpu" else f"{target.gpus} x {title}"
    if found is None:
        return Outcome("fail", subject.unknown, {"wanted": wanted})
    row = found.accelerator
    seen = row.title if row.kind == "cpu" else f"{found.gpus} x {row.title}"
    if target.accelerator.kind == "cpu":
        return Outcome("ok", seen, {"wanted": "a processor"})
    # `cuda` is any GPU of its kind; every other name is one.
    same = row.kind == "cuda" if target.hardware == "cuda" else row.name == target.hardware
    return Outcome("ok" if same and found.gpus >= target.gpus else "fail", seen, {"wanted": wanted})


def partition(subject: Subject) -> Outcome:
    """Whole GPUs; or parts, if the plan counts with their memory."""
    found, counted = subject.detected, subject.target.memory
    memory = "their memory" if counted is None else _gib(counted)
    if found is None or found.compute_partition is None:
        return Outcome("skipped", "the driver says nothing of partitions", {"memory": memory})
    modes = f"{found.compute_partition} with {found.memory_partition or 'an unknown memory mode'}"
    size = "" if found.hbm_bytes is None else f", {_gib(found.hbm_bytes)} each"
    if not found.partitioned and found.memory_partition in (None, "NPS1"):
        return Outcome("ok", modes + size, {"memory": memory})
    enough = counted is None or (found.hbm_bytes or 0) >= _TOLERANCE * counted
    return Outcome("warn" if enough else "fail", modes + size, {"memory": memory})


def xgmi(subject: Subject) -> Outcome:
    """Every GPU linked to every other."""
    found = subject.detected
    if subject.target.gpus == 1:
        return Outcome("skipped", "one GPU has nobody to talk to")
    if found is None or found.xgmi is None:
        return Outcome("skipped", "this machine does not have several Instinct GPUs")
    if found.xgmi:
        return Outcome("ok", f"all {found.gpus} GPUs are linked to each other")
    return Outcome("warn", _without_links(found))


def _without_links(found: Detected) -> str:
    nodes = {gpu.node: index for index, gpu in enumerate(found.devices)}
    apart = [
        f"{nodes[gpu.node]}-{nodes[other]}"
        for gpu in found.devices
        for other in sorted(set(nodes) - gpu.peers)
        if gpu.node < other
    ]
    shown = ", ".join(apart[:4]) + (f" and {len(apart) - 4} more" if len(apart) > 4 else "")
    return f"no link between the GPUs {shown}"


def memory_in_use(subject: Subject) -> Outcome:
    """GPUs that nobody else fills."""
    tool = "sudo fuser -v /dev/kfd" if subject.kind == "rocm" else "nvidia-smi"
    values = {"share": f"{subject.utilization:.0%}", "command": tool}
    # Of a partition the driver says what the whole device holds: that is nobody's share.
    found = subject.detected
    ours = found is not None and found.accelerator.kind == subject.kind and not found.partitioned
    known = found.memory if found is not None and ours else ()
    used = [(gpu.used, gpu.memory, index) for index, gpu in enumerate(known) if gpu.used is not None and gpu.memory]
    if not used:
        return Outcome("skipped", "the driver does not say how much is in use", values)
    most, whole, index = max(used, key=lambda entry: entry[0] / entry[1])
    if most < _NOISE:
        return Outcome("ok", f"at most {_gib(most)} in use", values)
    status: Status = "fail" if most > (1 - subject.utilization) * whole else "warn"
    return Outcome(status, f"{_gib(most)} of {_gib(whole)} in use on GPU {index}", values)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def kfd(subject: Subject) -> Outcome:
    """ROCm's compute device can be opened."""
    return _device(subject, [subject.machine.path("dev/kfd")])


def dri(subject: Subject) -> Outcome:
    """So can the render node of each GPU; all that are there where the driver does not say which belongs to which."""
    machine, found = subject.machine, subject.detected
    minors = [gpu.render for gpu in found.devices if gpu.render is not None] if found is not None else []
    nodes = [machine.path(f"dev/dri/renderD{minor}") for minor in minors] or machine.glob("dev/dri/renderD*")
    return _device(subject, nodes or [machine.path("dev/dri")])


def _device(subject: Subject, paths: list[Path]) -> Outcome:
    def name(path: Path) -> str:
        return f"/{path.relative_to(subject.machine.root)}"

    absent = [path for path in paths if not path.exists()]
    if absent:
        fix = f"load the driver: sudo modprobe amdgpu; in a container: {_DOCKER}"
        return Outcome("fail", f"{name(absent[0])} is not there", {"fix": fix, "root": "modprobe amdgpu"})
    for path in paths:
        reason = subject.machine.opens(path)
        if reason is not None:
            user = user_of(subject)
            fix = f"sudo usermod -a -G video,render {user}, then log in again; in a container: {_DOCKER}"
            values = {"fix": fix, "root": f"usermod -a -G video,render {user}"}
            return Outcome("fail", f"{name(path)} cannot be opened: {reason}", values)
    return Outcome("ok", "open" if len(paths) == 1 else f"{len(paths)} render nodes are open")


def group_video(subject: Subject) -> Outcome:
    """The user is in the group that owns the devices on older systems."""
    return _member(subject, "video")


def group_render(subject: Subject) -> Outcome:
    """The user is in the group that owns them on current ones."""
    return _member(subject, "render")


def _member(subject: Subject, group: str) -> Outcome:
    machine, values = subject.machine, {"user": user_of(subject)}
    devices = [machine.path("dev/kfd"), *machine.glob("dev/dri/renderD*")]
    lines = (line.split(":") for line in (machine.text("etc/group") or "").splitlines())
    number = next((int(fields[2]) for fields in lines if len(fields) > 2 and fields[0] == group), None)
    owned = [path for path in devices if number is not None and machine.owned_by(path) == number]
    if not owned:
        return Outcome("skipped", f"a group {group} owns no device here", values)
    status = machine.table("proc/self/status")
    if status.get("Uid", "").split()[:1] == ["0"]:
        return Outcome("ok", "root, which needs no group", values)
    if str(number) in {*status.get("Groups", "").split(), *status.get("Gid", "").split()[:1]}:
        return Outcome("ok", f"a member of {group}", values)
    # Access lists and containers open the devices to others, too.
    if all(machine.opens(path) is None for path in owned):
        return Outcome("warn", f"not a member of {group}, but the devices are open", values)
    return Outcome("fail", f"not a member of {group}, which owns {len(owned)} devices", values)


def visible_devices(subject: Subject) -> Outcome:
    """The three variables do not contradict each other."""
    environ = subject.machine.environ
    hip, cuda, rocr = (environ.get(name) or None for name in (HIP, CUDA, ROCR))
    if hip is not None and cuda is not None and hip != cuda:
        return Outcome("fail", f"{HIP}={hip} and {CUDA}={cuda}", {"fix": f"unset {HIP}"})
    if rocr is not None and (second := cuda or hip) is not None:
        left = len(rocr.split(","))
        if len(chosen(second, [""] * left)) < len(second.split(",")) and not second.startswith("GPU-"):
            found = f"{ROCR}={rocr} leaves {left} GPUs, numbered from 0, but {CUDA if cuda else HIP}={second}"
            return Outcome("fail", found, {"fix": f"unset {ROCR}"})
    if hip is not None:
        fix = f"unset {HIP}" if cuda is not None else f"export {CUDA}={hip}; unset {HIP}"
        return Outcome("warn", f"{HIP}={hip}", {"fix": fix})
    return Outcome("ok", "unset" if cuda is None else f"unset; {CUDA}={cuda}")


def user_of(subject: Subject) -> str:
    """The user's name, for a command that somebody else may run."""
    return subject.machine.environ.get("USER") or subject.machine.environ.get("LOGNAME") or "root"
