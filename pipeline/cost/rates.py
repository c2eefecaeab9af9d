"""How fast a machine moves and computes weights: probed here and remembered, or taken from a table of known ones.

    >>> known("two-cores").device_kind
    'cpu'

The table is `machines.yaml`. What was probed is a file in the store, by what identifies a machine; losing it costs
another probe.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from pipeline.canonical import fingerprint

Origin = Literal["probed", "table", "borrowed"]
_MEMORY = "machine-rates.json"


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes or operations a second, of all cores together; sizes in bytes.

    ``read``: from the page cache into memory. ``disk``: from the disk. ``write``: into the page cache. ``sync``: from
    there to the disk. ``hash``: SHA-256 of one thread, because a file's bytes are hashed one after the other. ``load``:
    from a mapped file to the device, by one thread. ``kernels``: bytes of 16-bit weight, by kernel. ``link``: between
    memory and device, one way while the other is busy too; None where they are one. ``flops``: operations of bfloat16
    products on the device. ``scores``: attention weights through a softmax there. ``resident``: memory of an
    interpreter that has imported what the stages need.
    """

    machine: str
    device_kind: str
    read: float
    disk: float
    write: float
    sync: float
    hash: float
    load: float
    kernels: Mapping[str, float]
    link: float | None
    flops: float
    scores: float
    resident: int

    def kernel(self, name: str) -> float:
        """The rate of a kernel; the slowest that is known, for one that nobody has measured."""
        return self.kernels.get(name) or min(self.kernels.values())


@dataclass(frozen=True, slots=True)
class Identity:
    """What rates depend on: one that differs in any of it is another machine."""

    processor: str
    cores: int
    device: str
    torch: str
    filesystem: str


def identify(device: str, store: Path) -> Identity:
    """This machine, with the device that computes and the filesystem that the store is on."""
    import torch

    return Identity(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
        filesystem=_filesystem(store),
    )


def rates_for(identity: Identity, store: Path) -> tuple[Rates, Origin]:
    """What was probed on this machine, else its row of the table, else the row of a machine with a like device."""
    remembered = _remembered(store).get(fingerprint(asdict(identity)))
    if remembered is not None:
        with suppress(TypeError, KeyError):
            return Rates(**remembered["rates"]), "probed"
    rows = _document()
    for row in rows.values():
        if all(str(text) in str(getattr(identity, name)) for name, text in row["when"].items()):
            return _rates(row), "table"
    return known("two-cores" if identity.device == "cpu" else "h100"), "borrowed"


def remember(identity: Identity, rates: Rates, store: Path) -> None:
    """Keep what was probed, for this machine's next plan."""
    everything = {**_remembered(store), fingerprint(asdict(identity)): {**asdict(identity), "rates": asdict(rates)}}
    store.mkdir(parents=True, exist_ok=True)
    partial = store / f"{_MEMORY}.{os.getpid()}.partial"
    partial.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    partial.replace(store / _MEMORY)


def known(name: str) -> Rates:
    """A row of the table."""
    return _rates(_document()[name])


def _rates(row: Mapping[str, Any]) -> Rates:
    return Rates(machine=row["machine"], **row["rates"])


@cache
def _document() -> Mapping[str, Any]:
    text = resources.files("pipeline.cost").joinpath("machines.yaml").read_text(encoding="utf-8")
    return MappingProxyType(yaml.safe_load(text))


def _remembered(store: Path) -> dict[str, Any]:
    try:
        memory = json.loads((store / _MEMORY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def _processor() -> str:
    import platform

    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _filesystem(path: Path) -> str:
    """Type of the filesystem that a path is on, or will be."""
    path = path.absolute()
    best, kind = "", "unknown"
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mounted, found, *_ = line.split()
            if path.is_relative_to(mounted) and len(mounted) >= len(best):
                best, kind = mounted, found
    return kind
