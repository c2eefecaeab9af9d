"""Looks at a machine that serves on its processor."""

from __future__ import annotations

from pipeline.machine import Machine
from pipeline.serving.host.finding import Outcome, Status
from pipeline.serving.host.subject import Subject

_LEAST = 4 << 30  # what vLLM's own processes and a small KV cache take


def cpu_flags(machine: Machine) -> frozenset[str] | None:
    """Instruction sets as /proc/cpuinfo names them; None where it has no such list (it has none on ARM)."""
    for line in (machine.text("proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return None


def flags(subject: Subject) -> Outcome:
    """Instruction sets that vLLM's kernels use."""
    known = cpu_flags(subject.machine)
    if known is None:
        return Outcome("skipped", "this processor lists no flags")
    has = [name for flag, name in (("avx2", "AVX2"), ("avx512f", "AVX-512"), ("amx_tile", "AMX")) if flag in known]
    found = ", ".join(has) or "neither AVX2 nor AVX-512"
    return Outcome("ok" if "avx512f" in known else "warn" if "avx2" in known else "fail", found)


def memory(subject: Subject) -> Outcome:
    """Room for the weights, and for what vLLM needs beside them."""
    weights = 0 if subject.wanted is None or subject.wanted.weights is None else subject.wanted.weights
    wanted = weights + _LEAST
    of_which = f" ({_gib(weights)} of weights)" if weights else ""
    values = {"wanted": f"{_gib(wanted)} free{of_which}"}
    # "MemAvailable:   12345 kB"
    available = subject.machine.table("proc/meminfo").get("MemAvailable", "").split()
    if not available:
        return Outcome("skipped", "this system does not say how much is free", values)
    free = int(available[0]) << 10
    status: Status = "ok" if free >= wanted else "fail" if free < weights else "warn"
    return Outcome(status, f"{_gib(free)} free", values)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
