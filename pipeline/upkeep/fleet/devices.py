"""The accelerators of this machine, as fleets share them: each has a lock below ``store/refresh/devices``."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.serving.host.detect import CUDA, HIP, ROCR, amd_gpus, nvidia_smi, select_devices, visible_amd
from quantmint.pipeline.store.locks import HEARTBEAT_S, Lock, is_held
from quantmint.pipeline.upkeep.fleet.records import folder_of


@dataclass(frozen=True, slots=True)
class Devices:
    """The accelerators that a fleet may use.

    ``variable`` is the environment variable that selects devices, None on a machine without accelerators. ``values``
    maps a device's number on this machine to its name in that variable.
    """

    variable: str | None
    values: Mapping[int, str]

    def environment(self, ours: Mapping[str, str], numbers: Iterable[int]) -> dict[str, str]:
        """Return the variables for a child that gets the devices ``numbers``; without any it sees none.

        ``ours`` are this process's variables. Only one of the two selecting variables is left, because ROCm's libraries
        read both and interpret them differently. ROCR_VISIBLE_DEVICES stays, because the numbers count the devices that
        it leaves.
        """
        if self.variable is None:
            return dict(ours)
        plain = {name: value for name, value in ours.items() if name not in (HIP, CUDA)}
        return {**plain, self.variable: ",".join(self.values[number] for number in numbers) or "-1"}


NONE: Final = Devices(None, {})
"""The devices of a fleet that runs its recipes elsewhere."""


def devices_of(machine: Host) -> Devices:
    """Return the devices of a machine that its environment variables leave visible."""
    environ = machine.environ
    uuids = [gpu.uuid for gpu in amd_gpus(machine)]
    if uuids:
        variable: str | None = HIP
        visible = visible_amd(environ, uuids)
        before = environ.get(CUDA) or environ.get(HIP) or None
        places = len(select_devices(environ.get(ROCR) or None, uuids))
    else:
        uuids = [uuid for (uuid,) in nvidia_smi(machine, ("uuid",))]
        variable = CUDA if uuids else None
        visible = select_devices(environ.get(CUDA), uuids)
        before = environ.get(CUDA)
        places = len(uuids)
    values = list(map(str, range(places))) if before is None else [entry.strip() for entry in before.split(",")]
    return Devices(variable, dict(zip(visible, values, strict=False)))


def free_of(root: Path, numbers: Iterable[int]) -> tuple[int, ...]:
    """Return those of these devices whose lock looks free; none while the store cannot be read."""
    try:
        return tuple(number for number in numbers if not is_held(_lock_path(root, number)))
    except OSError:
        return ()


def take(root: Path, numbers: Iterable[int]) -> ExitStack | None:
    """Take the locks of these devices; return a stack that releases them when it is closed.

    Returns None, with none taken, if another process holds one of them. Raises `OSError` or `StoreError` for faults of
    the disk.
    """
    with ExitStack() as locks:
        for path in sorted(_lock_path(root, number) for number in numbers):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(path)
            if not try_lock(lock):
                return None
            locks.callback(lock.release)
        return locks.pop_all()


def try_lock(lock: Lock) -> bool:
    """Take a lock that is free or that a dead process left; return False if a live process holds it.

    To know that a holder on another machine is dead, it waits for up to a heartbeat.
    """
    return lock.acquire(timeout=0) or (not is_held(lock.path) and lock.acquire(timeout=HEARTBEAT_S + 1))


def _lock_path(root: Path, number: int) -> Path:
    return folder_of(root) / "devices" / f"{socket.gethostname()}-{number}.lock"
