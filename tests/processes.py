"""What runs on this machine: for tests that leave nothing behind."""

from __future__ import annotations

from pathlib import Path


def processes_naming(needle: str) -> tuple[str, ...]:
    """Command lines of the processes that name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if needle in line:
            found.append(line)
    return tuple(found)


def below(pid: int) -> dict[int, str]:
    """The processes that one has started, and those have, with their command lines; zombies are none."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(pid, []))
    for one in found:
        found += children.get(one, [])  # the list grows while it is read
    return {one: line for one in found if (line := _line_of(one)) is not None}


def _line_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
