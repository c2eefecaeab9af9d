"""How fast known machines move and compute weights: the table `machines.yaml`.

>>> known("two-cores").device_kind
'cpu'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import yaml

Origin = Literal["table", "borrowed"]


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


def rates_of(device: str) -> tuple[Rates, Origin]:
    """The rates of this machine with a device of PyTorch ("cpu", "cuda:0"), or of one with a like device."""
    import torch

    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    return rates_for(name, len(os.sched_getaffinity(0)))


def rates_for(device: str, cores: int) -> tuple[Rates, Origin]:
    """The row of a device by its name ("cpu", "NVIDIA H100 80GB HBM3"), else that of a machine with a like device."""
    for row in _document().values():
        when = row["when"]
        if str(when["device"]) in device and when.get("cores", cores) == cores:
            return _rates(row), "table"
    return known("two-cores" if device == "cpu" else "h100"), "borrowed"


def known(name: str) -> Rates:
    """A row of the table."""
    return _rates(_document()[name])


def _rates(row: Mapping[str, Any]) -> Rates:
    return Rates(machine=row["machine"], **row["rates"])


@cache
def _document() -> Mapping[str, Any]:
    text = resources.files("pipeline.stages.cost").joinpath("machines.yaml").read_text(encoding="utf-8")
    return MappingProxyType(yaml.safe_load(text))
