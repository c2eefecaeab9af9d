"""Checks of the knobs and vLLM arguments that a user or recipe sets for a launch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.serving.environment import parse_version, within
from quantmint.pipeline.serving.knobs.table import Knob, knob, table
from quantmint.pipeline.serving.plan import ParallelLayout, Reason
from quantmint.pipeline.serving.planning.target import ServingTarget

_SIZES = {
    "--tensor-parallel-size": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "--data-parallel-size": "data",
}
_EXPERT = "--enable-expert-parallel"
LAYOUT = frozenset({*_SIZES, _EXPERT})
"""The knobs that set the layout; the planner makes a `ParallelLayout` of them, which memory and processes follow."""
#: Arguments and variables that the launcher gives each process (`plan.processes`), and client settings.
_LAUNCHER_ONLY = frozenset(
    {
        *("--host", "--port", "--headless", "--model", "--nnodes", "--node-rank", "--master-addr"),
        *("--distributed-executor-backend", "--data-parallel-size-local", "--data-parallel-address"),
        *("--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-rpc-port"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "VLLM_HOST_IP", "HF_TOKEN"),
    }
)
_BENCHMARK = "Benchmarks"
_SECRETS = frozenset({"--api-key", "--hf-token"})
#: Knobs whose value the planner needs as a number.
_NUMBERS = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--block-size", *_SIZES})


def check_overrides(overrides: Mapping[str, str | bool], version: str) -> dict[str, str | bool]:
    """Return the overrides as a dictionary.

    Raises `UserError` for a name that the table or this vLLM version lacks, for a knob that only the launcher or the
    machine sets, and for a value that is not the expected number.
    """
    for name, value in overrides.items():
        entry = knob(name)
        if entry.kind not in {"flag", "env"}:
            raise UserError(f"{name} is no flag or variable of a launch: it is set on the machine")
        if name in _LAUNCHER_ONLY or entry.topic == _BENCHMARK:
            raise UserError(f"{name} cannot be set in a plan: {entry.never}")
        if value is not False:
            _check_value(entry, value, version)
    return dict(overrides)


def _check_value(entry: Knob, value: str | bool, version: str) -> None:
    name, number = entry.name, parse_version(version)
    if not entry.exists_in(number):
        raise UserError(f"vLLM {version} does not know {name}", hint=entry.never or None)
    available = [text for text, option in entry.values.items() if within(number, *option.vllm)]
    if value in entry.values and value not in available:
        raise UserError(f"vLLM {version} has no {name}={value}", hint=f"it has {', '.join(available)}")
    if name in _NUMBERS and (isinstance(value, bool) or not value.isdecimal()):
        raise UserError(f"{name} is {value!r}: expected a whole number")
    if name == "--gpu-memory-utilization" and not re.fullmatch(r"0?\.\d*[1-9]\d*|1(\.0*)?", str(value)):
        raise UserError(f"{name} is {value!r}: expected a number above 0 and up to 1")


def layout_override(overrides: Mapping[str, str | bool], target: ServingTarget, *, fill: bool) -> ParallelLayout | None:
    """Return the layout that the overrides set; None when they set no size and no expert parallelism.

    ``fill`` starts as many servers as the target has room for. Raises `UserError` for more accelerators than the target
    has.
    """
    sizes = {field: int(overrides[name]) for name, field in _SIZES.items() if overrides.get(name) not in {None, False}}
    expert = bool(overrides.get(_EXPERT, False))
    if not sizes and not expert:
        return None
    layout = ParallelLayout(**sizes, expert=expert)
    total = target.gpus * target.nodes
    if layout.gpus > total or 0 in sizes.values():
        raise UserError(f"the parallelism that is set takes {layout.gpus} accelerators, and {target} has {total}")
    if layout.gpus > target.gpus:
        return ParallelLayout(**sizes, expert=expert, nodes=-(-layout.gpus // target.gpus))
    replicas = target.gpus // layout.gpus * target.nodes if fill else 1
    return ParallelLayout(**sizes, expert=expert, replicas=replicas)


def check_arguments(arguments: Sequence[str]) -> tuple[Reason, ...]:
    """Return the reason of each flag among extra arguments for `vllm serve`.

    Raises `UserError` for a value without a flag, for a knob of the table, and for a flag that carries a secret.
    """
    reasons: list[Reason] = []
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            name = name.replace("_", "-")
            _check_flag(name)
            reasons.append(Reason(name, value or "on", "passed on as it was given", "given"))
        elif not reasons:
            raise UserError(f"arguments for vllm serve: found {word!r} first, expected a flag such as --chat-template")
        else:
            last = reasons[-1]
            reasons[-1] = last._replace(value=word if last.value == "on" else f"{last.value} {word}")
    return tuple(reasons)


def _check_flag(name: str) -> None:
    if name in _SECRETS:
        raise UserError(
            f"{name} would stand in the process list, in logs and in records",
            hint="Servers listen on the loopback interface; let a proxy in front of them check keys.",
        )
    entry = table().get(name) or table().get(f"--{name.removeprefix('--no-')}")
    if entry is not None:
        raise UserError(
            f"{name} is a knob of the plan, and the plan would ignore it here",
            hint=f"Set it with --set {entry.name.removeprefix('--')}=VALUE, or under `serve: knobs:` of the recipe.",
        )
