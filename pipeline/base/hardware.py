"""The accelerators that a checkpoint can be served on, as a table, with what vLLM cannot load on each.

    >>> refusal("cpu", "mxfp4", "auto", "quark")[:55]
    "vLLM's CPU build has no kernel for MXFP4 linear layers:"
    >>> refusal("mi300x", "mxfp4", "auto", "quark") is None
    True

The table is `hardware.yaml`; it is read before hours of quantization are spent on a checkpoint that nothing loads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from quantmint.pipeline.base.data import load_table, rows
from quantmint.pipeline.base.errors import UserError, did_you_mean


@dataclass(frozen=True, slots=True)
class Hardware:
    """An accelerator of the hardware table.

    ``pci`` are device ids ("0x74a1"), ``names`` further names that drivers report besides ``title``. ``bandwidth`` is
    the memory bandwidth in TB/s, None where unknown; ``tflops`` are (input type, dense TFLOPS) pairs; ``hbm_gib`` is
    the memory in GiB. ``mx_scales`` are the roundings of MX scales that its kernels have (`schemes.MxScales`).
    """

    name: str
    title: str
    kind: Literal["rocm", "cuda", "cpu"]
    arch: str | None
    hbm_gib: int | None
    gpus_per_node: int
    pci: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    bandwidth: float | None = None
    tflops: tuple[tuple[str, float], ...] = ()
    mx_scales: tuple[str, ...] = ("even",)

    @property
    def bytes_per_second(self) -> float:
        """Return the memory bandwidth in bytes/s. Raises `TypeError` where it is unknown."""
        return float(self.bandwidth) * 1e12  # type: ignore[arg-type]

    def flops(self, dtype: str) -> float:
        """Return the dense operations per second on inputs of a type. Raises `KeyError` where unknown."""
        return dict(self.tflops)[dtype] * 1e12

    def multiplies(self, scheme: str) -> bool:
        """Return whether vLLM here multiplies a scheme's weights and activations in their stored formats."""
        return any(_holding("native", self.name, scheme, "auto", ""))

    @property
    def fp8_max(self) -> float:
        """Return the largest FP8 magnitude: 240 on gfx942, which computes in e4m3fnuz, else e4m3fn's 448."""
        return 240.0 if self.arch == "gfx942" else 448.0

    @property
    def hbm_bytes(self) -> int | None:
        """Return the bytes of one accelerator's memory; None where the table does not fix it."""
        return None if self.hbm_gib is None else self.hbm_gib << 30


AITER_ROUNDS_UP: Final = "0.1.16"
"""First release of AITER whose HIP and FlyDSL kernels round the scales of MX inputs up where nothing else is asked
(ROCm/aiter #3212, merged on 2 June 2026); its Triton kernels still round to even. No post of 0.1.15 has the change."""


def mx_scales_by_aiter(version: str) -> Literal["even", "up"] | None:
    """Return how an AITER of this version rounds the scales of MX inputs by default; None where it does not say.

    >>> mx_scales_by_aiter("0.1.15.post3"), mx_scales_by_aiter("0.1.17"), mx_scales_by_aiter("0.1.16.dev3+g1a2b3c")
    ('even', 'up', None)
    """
    release = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    first = tuple(map(int, AITER_ROUNDS_UP.split(".")))
    if release is None or (tuple(map(int, release.groups())) == first and "dev" in version):
        return None  # a build between two releases may be older than the change
    return "up" if tuple(map(int, release.groups())) >= first else "even"


@dataclass(frozen=True, slots=True)
class _Rule:
    when: Mapping[str, frozenset[str]]
    why: str
    unless_cpu_has: tuple[str, ...]
    needs: tuple[str, ...]

    def holds(self, facts: Mapping[str, Collection[str | None]]) -> bool:
        return all(not values.isdisjoint(facts[field]) for field, values in self.when.items())


def hardware(name: str) -> Hardware:
    """Return the accelerator of that name. Raises `UserError` with the valid names."""
    accelerators = table()
    if name not in accelerators:
        raise UserError(
            f"unknown hardware {name!r}: expected one of {', '.join(accelerators)}{did_you_mean(name, accelerators)}"
        )
    return accelerators[name]


@cache
def table() -> Mapping[str, Hardware]:
    """Return every accelerator by name, in the order of the file."""
    return rows(Hardware, load_table(__file__, "hardware.yaml")["hardware"], "tflops")


def by_pci(device_id: int) -> Hardware | None:
    """Return AMD's accelerator (vendor 0x1002) with that PCI device id; None if the table lacks it."""
    return next((row for row in table().values() if f"0x{device_id:04x}" in row.pci), None)


def by_name(reported: str) -> Hardware | None:
    """Return the accelerator that a driver reports under this name; None if the table lacks it.

    A name that begins with a title matches too: "NVIDIA H200 NVL" is an H200.
    """
    words = reported.split()
    for row in table().values():
        title = row.title.split()
        if row.arch and (reported in row.names or words[: len(title)] == title):
            return row
    return None


def refusal(
    name: str,
    scheme: str | Collection[str],
    kv_cache: str,
    checkpoint_format: str,
    *,
    expert_schemes: Collection[str] = (),
    cpu_flags: Collection[str] | None = None,
) -> str | None:
    """Return why vLLM cannot load such a checkpoint there, in one sentence with the way out; None when it can.

    ``scheme`` is one, or all of a checkpoint that mixes several. ``kv_cache`` is "auto" or "fp8". ``expert_schemes``
    are those of routed experts, none for a dense model. ``cpu_flags`` are those of the serving CPU
    (`local_cpu_flags`); without them a rule that depends on one is a caution and not a refusal.
    """
    for rule in _holding("refusals", name, scheme, kv_cache, checkpoint_format, expert_schemes):
        if not rule.unless_cpu_has or (cpu_flags is not None and not set(rule.unless_cpu_has) & set(cpu_flags)):
            return rule.why
    return None


def cautions(
    name: str,
    scheme: str | Collection[str],
    kv_cache: str,
    checkpoint_format: str,
    *,
    expert_schemes: Collection[str] = (),
    cpu_flags: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Return sentences on what to know before serving such a checkpoint there, although it loads.

    Arguments as for `refusal`.
    """
    remarks = [rule.why for rule in _holding("cautions", name, scheme, kv_cache, checkpoint_format, expert_schemes)]
    if cpu_flags is None:
        remarks += [
            f"{rule.why} (the CPU must have {' or '.join(rule.unless_cpu_has)})"
            for rule in _holding("refusals", name, scheme, kv_cache, checkpoint_format, expert_schemes)
            if rule.unless_cpu_has
        ]
    return tuple(remarks)


def needs(name: str, scheme: str | Collection[str], kv_cache: str, checkpoint_format: str) -> tuple[str, ...]:
    """Return the Python packages that the serving environment needs besides vLLM. Arguments as for `refusal`."""
    requirements = [rule.needs for rule in _holding("cautions", name, scheme, kv_cache, checkpoint_format)]
    return tuple(dict.fromkeys(distribution for some in requirements for distribution in some))


def native_on(scheme: str) -> tuple[str, ...]:
    """Return the names of accelerators that multiply a scheme's weights and activations in their stored formats.

    "cuda" stands for all NVIDIA GPUs.
    """
    general = [name for name, row in table().items() if row.kind != "cuda" or row.arch is None]
    return tuple(name for name in general if table()[name].multiplies(scheme))


def local_cpu_flags(cpuinfo: str | None = None) -> frozenset[str] | None:
    """Return this CPU's instruction-set flags as in /proc/cpuinfo; None where it lists none, as on ARM."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return None
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return None


def _holding(
    section: str,
    name: str,
    scheme: str | Collection[str],
    kv_cache: str,
    checkpoint_format: str,
    expert_schemes: Collection[str] = (),
) -> Iterator[_Rule]:
    accelerator = hardware(name)
    facts: Mapping[str, Collection[str | None]] = {
        "hardware": (accelerator.name,),
        "kind": (accelerator.kind,),
        "arch": (accelerator.arch,),
        "scheme": (scheme,) if isinstance(scheme, str) else scheme,
        "kv_cache": (kv_cache,),
        "format": (checkpoint_format,),
        "expert_schemes": expert_schemes,
    }
    return (rule for rule in _rules(section) if rule.holds(facts))


@cache
def _rules(section: str) -> tuple[_Rule, ...]:
    return tuple(
        _Rule(
            when=MappingProxyType({field: frozenset(values) for field, values in row["when"].items()}),
            why=": ".join(row[part] for part in ("why", "instead") if part in row),
            unless_cpu_has=tuple(row.get("unless_cpu_has", ())),
            needs=tuple(row.get("needs", ())),
        )
        for row in load_table(__file__, "hardware.yaml")[section]
    )
