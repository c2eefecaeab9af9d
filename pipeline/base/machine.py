"""Read the facts of a machine: its files, variables, devices, file systems and commands."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quantmint.calibration.container import control_groups

_TIMEOUT = 60


def cores(root: Path = Path("/")) -> int:
    """Return the number of threads to compute with: the least of CPU affinity, the control group's quota and
    ``OMP_NUM_THREADS`` (set by ``--threads``).
    """
    count = len(os.sched_getaffinity(0))
    for folder in control_groups(root):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            count = min(count, max(round(int(quota) / int(period)), 1))  # "max" is none
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return max(min(count, int(limit)), 1) if limit.isdigit() else count


def process_age() -> float:
    """Return the seconds since this process started, imports included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_stat(os.getpid())[1]) / os.sysconf("SC_CLK_TCK")


def process_stat(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time (clock ticks since boot); empty where unreadable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return fields[0], fields[19]


def cache_folder() -> Path:
    """Return this user's cache folder, for files that can be fetched again; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantmint"


class Space(NamedTuple):
    """Bytes of a file system: the total, and those that this user may still write."""

    total: int
    free: int


def run_command(argv: Sequence[str]) -> str | None:
    """Return a command's standard output; None where it is absent, fails or runs for over a minute."""
    try:
        done = subprocess.run(list(argv), check=False, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def open_device(path: Path) -> str | None:
    """Return why a device cannot be opened for reading and writing; None where it can.

    It is really opened, since a container's device rules apply to open(2) but not to access(2).
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return None


def file_system(path: Path) -> Space | None:
    """Return the space of the file system that holds a path, or will hold it; None where it cannot be read."""
    for place in (path, *path.parents):
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        return Space(usage.total, usage.free)
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """A host, as its files and commands describe it.

    Paths are relative to ``root``. Tests replace ``run`` (a command's output), ``opens`` (why a device cannot be
    opened) and ``space`` (of a file system).
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str | None] = run_command
    opens: Callable[[Path], str | None] = open_device
    space: Callable[[Path], Space | None] = file_system

    def path(self, at: str) -> Path:
        """Return a path below the root, with or without a leading slash."""
        return self.root / at.lstrip("/")

    def text(self, at: str | Path) -> str | None:
        """Return a file's text, stripped; None where it cannot be read."""
        try:
            return (self.root / at).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, at: str | Path) -> int | None:
        """Return a file's integer, decimal or with 0x; None where it holds none."""
        try:
            return int(self.text(at) or "", 0)
        except ValueError:
            return None

    def table(self, at: str | Path) -> dict[str, str]:
        """Return a file of lines "name value" or "name: value" as a mapping; empty where it cannot be read."""
        rows = (line.replace(":", " ", 1).split(maxsplit=1) for line in (self.text(at) or "").splitlines())
        return {row[0]: row[1] if len(row) > 1 else "" for row in rows if row}

    def glob(self, pattern: str) -> list[Path]:
        """Return the matching paths below the root, with numbers in names sorted by value."""
        return sorted(self.root.glob(pattern), key=_natural)


@dataclass(frozen=True, slots=True)
class Device:
    """A device: ``hardware`` is its name in the table, ``name`` the one that the driver or kernel reports."""

    hardware: str
    name: str


def cpu_name(machine: Host) -> str:
    """Return the CPU's model from /proc/cpuinfo, or the architecture."""
    for line in (machine.text("proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _natural(path: Path) -> list[tuple[int, str]]:
    digits = "".join(c if c.isdigit() else " " for c in path.as_posix()).split()
    return [*((int(number), "") for number in digits), (0, path.as_posix())]


def versions(*distributions: str) -> dict[str, str]:
    """Return installed versions by distribution, "absent" for a missing one; nothing is imported."""
    return {name: _version(name) for name in distributions}


@cache  # plans ask for a dozen each, many recipes are planned at once, and metadata is slow to parse
def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"
