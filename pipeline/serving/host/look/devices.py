"""Looks at what lets a process use Instinct GPUs: device files, groups, and the variables that choose among them."""

from __future__ import annotations

from pathlib import Path

from pipeline.serving.host.finding import Outcome
from pipeline.serving.host.subject import Subject
from pipeline.serving.host.visible import CUDA, HIP, ROCR, chosen

_DOCKER = "docker run --device /dev/kfd --device /dev/dri --group-add=video"


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


def groups(subject: Subject) -> Outcome:
    """The user is a member of the groups that own the devices, those of them that this system has."""
    machine = subject.machine
    status = machine.table("proc/self/status")
    if status.get("Uid", "").split()[:1] == ["0"]:
        return Outcome("ok", "root, which needs no group")
    ours = set(status.get("Groups", "").split()) | set(status.get("Gid", "").split()[:1])
    known = {}
    for line in (machine.text("etc/group") or "").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[0] in ("video", "render"):
            known[fields[0]] = fields[2]
    missing = [group for group, number in known.items() if number not in ours]
    if not known:
        return Outcome("skipped", "this system has neither a group video nor render")
    if not missing:
        return Outcome("ok", f"a member of {' and '.join(known)}")
    # Access lists and containers open the devices to others, too.
    open_anyway = kfd(subject).status == "ok" and dri(subject).status == "ok"
    values = {"missing": ",".join(missing), "user": user_of(subject)}
    found = f"not a member of {' or '.join(missing)}"
    return (
        Outcome("warn", f"{found}, but the devices are open", values) if open_anyway else Outcome("fail", found, values)
    )


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
