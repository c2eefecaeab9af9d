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
    """How many threads this process should compute with: what it is pinned to, its control group's quota, and
    ``OMP_NUM_THREADS``, which ``--threads`` sets, whichever is least.
    """
    found = len(os.sched_getaffinity(0))
    for folder in control_groups(root):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            found = min(found, max(round(int(quota) / int(period)), 1))  # "max" is none
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(min(found, int(asked)), 1) if asked.isdigit() else found


def process_age() -> float:
    """Seconds since this process was started: what a person has waited, imports and all."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_stat(os.getpid())[1]) / os.sysconf("SC_CLK_TCK")


def process_stat(pid: int) -> tuple[str, str]:
    """State letter and start time (clock ticks since boot) of a process; empty where they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return fields[0], fields[19]


def cache_folder() -> Path:
    """Where what can be fetched or found again is kept for this user; it need not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantmint"


class Space(NamedTuple):
    """Bytes of a file system: all of them, and those that this user may still fill."""

    total: int
    free: int


def run_command(argv: Sequence[str]) -> str | None:
    """Standard output of a command; None where it is absent, fails or does not end within a minute."""
    try:
        done = subprocess.run(list(argv), check=False, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def open_device(path: Path) -> str | None:
    """Return why a device cannot be opened for reading and writing; None where it can.

    It is opened, not asked with access(2): a container's device rules apply to open(2) only.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return None


def file_system(path: Path) -> Space | None:
    """Return the file system that holds a path, or will hold it once it is made; None where none can be asked."""
    for place in (path, *path.parents):
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        return Space(usage.total, usage.free)
    return None


@dataclass(frozen=True, slots=True)
class Machine:
    """A host. Paths are relative to ``root``; the functions ask what no file says."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str | None] = run_command
    opens: Callable[[Path], str | None] = open_device
    space: Callable[[Path], Space | None] = file_system

    def path(self, at: str) -> Path:
        """A path below the root; a leading slash is its root's."""
        return self.root / at.lstrip("/")

    def text(self, at: str | Path) -> str | None:
        """A file's text without the white space around it; None where it cannot be read."""
        try:
            return (self.root / at).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, at: str | Path) -> int | None:
        """A file's integer, decimal or with 0x; None where there is none."""
        try:
            return int(self.text(at) or "", 0)
        except ValueError:
            return None

    def table(self, at: str | Path) -> dict[str, str]:
        """Lines of a name and a value, a blank or a colon between them; empty where the file cannot be read."""
        rows = (line.replace(":", " ", 1).split(maxsplit=1) for line in (self.text(at) or "").splitlines())
        return {row[0]: row[1] if len(row) > 1 else "" for row in rows if row}

    def glob(self, pattern: str) -> list[Path]:
        """Paths below the root that match, those of numbered names in the order of their numbers."""
        return sorted(self.root.glob(pattern), key=_natural)


@dataclass(frozen=True, slots=True)
class Device:
    """``hardware`` is a name of the table, ``name`` what the driver or the kernel calls the device."""

    hardware: str
    name: str


def cpu_name(machine: Machine) -> str:
    """Return the CPU's model as the kernel has it; the architecture where it has none."""
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
