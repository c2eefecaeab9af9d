"""Ports of the loopback interface: one that is free, one that was asked for, and who holds it where it is not free.

with reserved(8000) as port: ...     # UserError: port 8000 is held by nginx (pid 812)
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import UserError

_HOST = "127.0.0.1"
_LISTEN = "0A"
#: Addresses in /proc/net/tcp and tcp6 on which a listener takes what comes to 127.0.0.1: itself, and every interface.
_LOOPBACK = {"0100007F", "00000000", "0" * 32, "0000000000000000FFFF00000100007F", "0000000000000000FFFF000000000000"}


class Listener(NamedTuple):
    """A process that listens; ``pid`` is None where this user, or this container, cannot see it."""

    pid: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.pid is None else f"{self.name} (pid {self.pid})"


def listener(port: int, *, proc: Path = Path("/proc")) -> Listener | None:
    """Who listens on a port of this machine's loopback interface; None where nobody does."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            address, _, number = fields[1].rpartition(":")
            if fields[3] == _LISTEN and int(number, 16) == port and address in _LOOPBACK:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for entry in proc.glob("[0-9]*"):
        try:
            if _holds(entry, inodes):
                return Listener(int(entry.name), (entry / "comm").read_text(encoding="utf-8").strip())
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
    return Listener(None, "a process that this user cannot see")


def _holds(process: Path, inodes: Collection[str]) -> bool:
    for descriptor in (process / "fd").iterdir():
        # A busy process closes some while they are read: this one did, with the descriptor that listed them.
        with suppress(OSError):
            if str(descriptor.readlink()) in inodes:
                return True
    return False


@contextmanager
def reserved(port: int | None) -> Iterator[int]:
    """A port that the kernel gives to nobody else during the block: the one asked for, or any that is free.

    Bound but not listening, with SO_REUSEADDR: that keeps it from being handed out, and lets a server that sets the
    same option, as vLLM does, listen on it. UserError names the process that holds the port that was asked for.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((_HOST, port or 0))
        except OSError as error:
            assert port is not None  # noqa: S101 - the kernel has free ports
            raise taken(port, error) from error
        yield held.getsockname()[1]


def taken(port: int, error: Exception) -> UserError:
    """What to say of a port that cannot be had."""
    if isinstance(error, PermissionError):
        return UserError(f"port {port} needs more rights than this user has", hint="Choose one above 1023 with --port.")
    holder = listener(port)
    by = "" if holder is None else f" by {holder}"
    return UserError(f"port {port} is held{by}", hint="End that process, or choose another port with --port.")
