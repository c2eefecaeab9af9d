"""What a launch is planned for: the machines, as a user names them, and the load.

    >>> parse_target("mi300x:16")
    Target(hardware='mi300x', gpus=8, nodes=2, hbm_bytes=None)

``NAME:GPUS`` fills nodes one after the other; ``NAME:GPUSxNODES`` says how they are shared out. A profile is latency,
streaming, throughput or offline work: the rows of `profiles.yaml`. A workload of ``eval/workloads`` names its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.data import beside, rows
from quantmint.pipeline.base.errors import UserError, did_you_mean

_FORM = re.compile(r"(?P<name>[a-z0-9_.-]+)(?::(?P<gpus>\d+)(?:x(?P<nodes>\d+))?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServingTarget:
    """``nodes`` machines with ``gpus`` accelerators each. ``hbm_bytes`` is measured, or None for the table's."""

    hardware: str
    gpus: int = 1
    nodes: int = 1
    hbm_bytes: int | None = None

    @property
    def accelerator(self) -> accelerators.Hardware:
        """The table's row."""
        return accelerators.hardware(self.hardware)

    @property
    def memory(self) -> int | None:
        """Bytes of one accelerator's memory; None where only the machine knows."""
        return self.hbm_bytes if self.hbm_bytes is not None else self.accelerator.hbm_bytes

    def __str__(self) -> str:
        return f"{self.hardware}:{self.gpus}" + (f"x{self.nodes}" if self.nodes > 1 else "")


def parse_target(text: str) -> ServingTarget:
    """Read ``mi300x:8``, ``mi300x:16`` (two nodes), ``mi300x:4x2``, ``cpu``. UserError says what is wrong with it."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        hint = "NAME:GPUS, as in mi300x:8, or NAME:GPUSxNODES, as in mi300x:8x2"
        raise UserError(f"{text!r} is not a target", hint=hint)
    name = found["name"].lower()
    most = accelerators.hardware(name).gpus_per_node
    gpus, nodes = int(found["gpus"] or 1), int(found["nodes"] or 1)
    if found["nodes"] is None and gpus > most and most > 1:
        if gpus % most:
            raise UserError(
                f"{text}: {gpus} accelerators are no whole number of nodes with {most}",
                hint=f"{name}:GPUSxNODES says how many each node has",
            )
        gpus, nodes = most, gpus // most
    return check_target(ServingTarget(name, gpus, nodes))


def check_target(target: ServingTarget) -> ServingTarget:
    """The same target; UserError for more accelerators than a node has, or for none."""
    row = target.accelerator
    if row.kind == "cpu" and (target.gpus, target.nodes) != (1, 1):
        raise UserError(f"hardware cpu serves with one device, not {target.gpus * target.nodes}")
    if not 1 <= target.gpus <= row.gpus_per_node:
        raise UserError(f"gpus is {target.gpus}: {row.title} has 1 to {row.gpus_per_node} in a node")
    if target.nodes < 1:
        raise UserError(f"nodes is {target.nodes}: expected 1 or more")
    return target


@dataclass(frozen=True, slots=True)
class Profile:
    """One row, with the load at hand: ``concurrency`` requests in flight over all servers of a launch.

    ``max_model_len`` (tokens) is None where the plan shall choose: room for ``longest`` at least, the longest request
    of a workload, 0 where there is none. ``share`` is how much of ``concurrency * request_tokens``, those of a usual
    request, the KV caches must hold before a layout counts as fitting.
    """

    name: str
    concurrency: int
    request_tokens: int
    share: float
    max_model_len: int | None = None
    longest: int = 0

    @property
    def for_throughput(self) -> bool:
        """Whether tokens per second of the machine count for more than those of one request."""
        return self.name in {"throughput", "offline"}


def profile(
    name: str, *, concurrency: int | None = None, max_model_len: int | None = None, longest: int = 0
) -> Profile:
    """The profile of that name; UserError with the nearest name where there is none."""
    if name not in profiles():
        near = did_you_mean(name, profiles())
        raise UserError(f"unknown profile {name!r}{near}: expected one of {', '.join(profiles())}")
    row = profiles()[name]
    return replace(row, concurrency=concurrency or row.concurrency, max_model_len=max_model_len, longest=longest)


@cache
def profiles() -> Mapping[str, Profile]:
    """Every profile by name, in the order of the file."""
    return rows(Profile, beside(__file__, "profiles.yaml"))
