"""Memory limits of the control groups that this process runs in: those of a container, a job or a user's session."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control group (cgroup v2) and of its ancestors, innermost first.

    Empty where ``proc/self/cgroup`` below ``root`` cannot be read.
    """
    try:
        group = (root / "proc/self/cgroup").read_text().strip().rpartition("::/")[2]
    except OSError:
        return []
    # In a container its own group is the root of what it sees.
    top = root / "sys/fs/cgroup"
    inner = top / group
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(top))]


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the least memory limit of this process's control groups, in bytes; None where none has a limit."""
    limits = []
    for folder in control_groups(root):
        with suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))  # "max" is none
    return min(limits, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Return the least memory, in bytes, that any control group of this process has left; None where none has a limit.

    Page cache that a group may give back (``inactive_file``) counts as free.
    """
    left = []
    for folder in control_groups(root):
        with suppress(OSError, ValueError):
            limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
            left.append(max(limit - used + int(counts.get("inactive_file", 0)), 0))
    return min(left, default=None)
