"""The machines and the load that a launch is planned for.

    >>> parse_target("mi300x:16")
    Target(hardware='mi300x', gpus=8, nodes=2, hbm_bytes=None)

``NAME:GPUS`` fills nodes one after the other; ``NAME:GPUSxNODES`` sets the GPUs of each node. The profiles latency,
streaming, throughput and offline are the rows of `profiles.yaml`; a workload of ``eval/workloads`` names one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from quantmint.pipeline.base import hardware as accelerators
from quantmint.pipeline.base.data import load_table, rows
from quantmint.pipeline.base.errors import UserError, did_you_mean

_FORM = re.compile(r"(?P<name>[a-z0-9_.-]+)(?::(?P<gpus>\d+)(?:x(?P<nodes>\d+))?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServingTarget:
    """``nodes`` machines with ``gpus`` accelerators each; ``hbm_bytes`` is measured memory, None for the table's."""

    hardware: str
    gpus: int = 1
    nodes: int = 1
    hbm_bytes: int | None = None

    @property
    def accelerator(self) -> accelerators.Hardware:
        """The accelerator's row in the hardware table."""
        return accelerators.hardware(self.hardware)

    @property
    def memory(self) -> int | None:
        """Bytes of one accelerator's memory; None when neither a measurement nor the table has it."""
        return self.hbm_bytes if self.hbm_bytes is not None else self.accelerator.hbm_bytes

    def __str__(self) -> str:
        return f"{self.hardware}:{self.gpus}" + (f"x{self.nodes}" if self.nodes > 1 else "")


def parse_target(text: str) -> ServingTarget:
    """Parse ``mi300x:8``, ``mi300x:16`` (two nodes), ``mi300x:4x2`` or ``cpu``.

    Raises `UserError` for anything else.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        hint = "NAME:GPUS, as in mi300x:8, or NAME:GPUSxNODES, as in mi300x:8x2"
        raise UserError(f"{text!r} is not a target", hint=hint)
    name = match["name"].lower()
    per_node = accelerators.hardware(name).gpus_per_node
    gpus, nodes = int(match["gpus"] or 1), int(match["nodes"] or 1)
    if match["nodes"] is None and gpus > per_node and per_node > 1:
        if gpus % per_node:
            raise UserError(
                f"{text}: {gpus} accelerators do not fill a whole number of nodes with {per_node} each",
                hint=f"{name}:GPUSxNODES sets how many each node has",
            )
        gpus, nodes = per_node, gpus // per_node
    return check_target(ServingTarget(name, gpus, nodes))


def check_target(target: ServingTarget) -> ServingTarget:
    """Return the target itself. Raises `UserError` for more accelerators than a node has, or for none."""
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
    """A load profile: ``concurrency`` requests in flight over all servers of a launch.

    ``request_tokens`` is the length of a typical request. ``share`` is the part of ``concurrency * request_tokens``
    that the KV caches should hold. ``max_model_len`` (tokens) None lets the planner choose, with room for at least
    ``longest``, the longest request of a workload (0 without one).
    """

    name: str
    concurrency: int
    request_tokens: int
    share: float
    max_model_len: int | None = None
    longest: int = 0

    @property
    def for_throughput(self) -> bool:
        """Whether the machine's tokens per second count for more than the speed of one request."""
        return self.name in {"throughput", "offline"}


def profile(
    name: str, *, concurrency: int | None = None, max_model_len: int | None = None, longest: int = 0
) -> Profile:
    """Return the profile with that name and the load at hand. Raises `UserError`, with the nearest name, if unknown."""
    if name not in profiles():
        near = did_you_mean(name, profiles())
        raise UserError(f"unknown profile {name!r}{near}: expected one of {', '.join(profiles())}")
    row = profiles()[name]
    return replace(row, concurrency=concurrency or row.concurrency, max_model_len=max_model_len, longest=longest)


@cache
def profiles() -> Mapping[str, Profile]:
    """Return every profile by name, in the order of `profiles.yaml`."""
    return rows(Profile, load_table(__file__, "profiles.yaml"))
