"""Looks at the GPUs themselves: how many of what, whole or partitioned, linked, and free."""

from __future__ import annotations

from pipeline.serving.host.detect import Detected
from pipeline.serving.host.finding import Outcome, Status
from pipeline.serving.host.subject import Subject

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
