"""What a server is for: latency, streaming, throughput or offline work, with the load that is planned for.

    >>> profile("throughput", concurrency=256).request_tokens
    2048

The rows are `profiles.yaml`. A workload of ``eval/workloads`` names its profile.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType

import yaml

from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class Profile:
    """One row, with the load at hand.

    ``concurrency`` counts requests in flight over all servers of a launch. ``max_model_len`` (tokens of a prompt with
    its answer) is None where the plan shall choose. ``request_tokens`` are those of a usual request, and ``share`` is
    how much of ``concurrency * request_tokens`` the KV caches must hold before a layout counts as fitting.
    """

    name: str
    title: str
    about: str
    watch: tuple[str, ...]
    concurrency: int
    request_tokens: int
    share: float
    max_model_len: int | None = None

    @property
    def for_throughput(self) -> bool:
        """Whether tokens per second of the machine count for more than those of one request."""
        return self.name in {"throughput", "offline"}


def profile(name: str, *, concurrency: int | None = None, max_model_len: int | None = None) -> Profile:
    """The profile of that name; UserError with the nearest name where there is none, or for a number below one."""
    if name not in table():
        near = difflib.get_close_matches(name, table(), n=1)
        raise UserError(
            f"unknown profile {name!r}: expected one of {', '.join(table())}",
            hint=f"did you mean {near[0]!r}?" if near else None,
        )
    for noun, number in (("concurrency", concurrency), ("context", max_model_len)):
        if number is not None and number < 1:
            raise UserError(f"{noun} is {number}: expected 1 or more")
    row = table()[name]
    return replace(row, concurrency=concurrency or row.concurrency, max_model_len=max_model_len)


@cache
def table() -> Mapping[str, Profile]:
    """Every profile by name, in the order of the file."""
    text = resources.files("pipeline.serving.planning").joinpath("profiles.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text).items()
    return MappingProxyType({name: Profile(name=name, **{**row, "watch": tuple(row["watch"])}) for name, row in rows})
