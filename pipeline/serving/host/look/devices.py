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
