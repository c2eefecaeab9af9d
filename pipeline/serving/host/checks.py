"""The checks of a machine as a table, and what they find.

The texts are `checks.yaml`; the functions that look are in `looks.py`. Nothing is ever changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType

import yaml

from pipeline.base.machine import Machine
from pipeline.serving.host import looks
from pipeline.serving.host.subject import Finding, Outcome, Subject, Wanted, look, target_of
from pipeline.serving.plan import LaunchPlan

LOOKS: Mapping[str, Callable[[Subject], Outcome]] = MappingProxyType(
    {
        "accelerators": looks.accelerators,
        "partition": looks.partition,
        "GPU memory": looks.memory_in_use,
        "/dev/kfd": looks.kfd,
        "/dev/dri": looks.dri,
        "group video": partial(looks.group, name="video"),
        "group render": partial(looks.group, name="render"),
        "HIP_VISIBLE_DEVICES": looks.visible_devices,
        "numa_balancing": looks.numa_balancing,
        "iommu": looks.iommu,
        "/dev/shm": looks.shared_memory,  # noqa: S108 - the name of a check
        "ibstat": looks.rdma,
        "port": looks.port,
        "vllm": looks.vllm,
        "amd-quark": looks.quark,
        "checkpoint": looks.checkpoint,
    }
)


@dataclass(frozen=True, slots=True)
class Check:
    """One row of `checks.yaml`; its texts have {values} that the look fills."""

    name: str
    kinds: list[str]
    expected: str
    why: str
    fix: str
    source: str

    def finding(self, subject: Subject) -> Finding:
        """Look, and say what was seen; a fix only where something is wrong."""
        seen = LOOKS[self.name](subject)
        values = dict(seen.values or {})
        wrong = seen.status in ("warn", "fail")
        return Finding(
            name=self.name,
            status=seen.status,
            found=seen.found,
            expected=self.expected.format_map(values),
            why=self.why,
            fix=self.fix.format_map(values) if wrong else "",
            source=self.source,
        )


@cache
def checks() -> Mapping[str, Check]:
    """Every check by name, in the order of the file."""
    text = resources.files("pipeline.serving.host").joinpath("checks.yaml").read_text(encoding="utf-8")
    return MappingProxyType({row["name"]: Check(**row) for row in yaml.safe_load(text)})


def examine(subject: Subject, names: Collection[str] | None = None) -> tuple[Finding, ...]:
    """Run the checks that are a question for the subject's hardware; of these only ``names`` where they are given."""
    asked = (check for check in checks().values() if names is None or check.name in names)
    return tuple(check.finding(subject) for check in asked if subject.kind in check.kinds)


def preflight(
    plan: LaunchPlan,
    machine: Machine,
    *,
    port: int | None = None,
    vllm: str | Path | None = None,
    wanted: Wanted | None = None,
) -> tuple[Finding, ...]:
    """Run the checks that a plan names, in its order, with what it expects and why.

    A name without a check, or with one that is no question for the plan's hardware, gives a finding that was skipped.
    """
    if not plan.host:
        return ()
    subject = look(
        machine,
        target=target_of(plan),
        vllm=vllm,
        port=port,
        wanted=wanted,
        utilization=float(plan.option("--gpu-memory-utilization") or 0.92),
    )
    found = {finding.name: finding for finding in examine(subject, {check.name for check in plan.host})}
    return tuple(
        replace(found[check.name], expected=check.expected, why=check.why, source=check.source)
        if check.name in found
        else Finding(check.name, "skipped", "nothing here looks at it", check.expected, check.why, "", check.source)
        for check in plan.host
    )
