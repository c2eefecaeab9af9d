"""What a recipe or a command line sets by a knob's name, checked before it wins over the table's rules."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import UserError
from pipeline.serving.knobs.table import knob, known_in, replacement
from pipeline.serving.plan import Layout
from pipeline.serving.planning.target import Target

#: Knobs that say the layout: they become one, so that memory and processes follow.
_SIZES = {
    "--tensor-parallel-size": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "--data-parallel-size": "data",
}
_EXPERT = "--enable-expert-parallel"
#: What the launcher gives to each process (`processes.py`), and what is no argument of a server.
_NOT_OURS = frozenset(
    {
        *("--host", "--port", "--headless", "--model", "--nnodes", "--node-rank", "--master-addr"),
        *(
            "--data-parallel-size-local",
            "--data-parallel-address",
            "--data-parallel-rank",
            "--data-parallel-start-rank",
        ),
        *("--data-parallel-rpc-port", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "VLLM_HOST_IP", "HF_TOKEN"),
    }
)
_BENCHMARK = "Benchmarks"
#: Knobs whose value the plan must know as a number.
_NUMBERS = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--block-size", *_SIZES})


def checked_overrides(overrides: Mapping[str, str | bool], version: str) -> dict[str, str | bool]:
    """The same, in their order.

    UserError for a name that the table lacks (with the nearest spelling), for a knob that this version of vLLM lacks
    (with what took its place), for one that a launch or its launcher sets, and for text where a number belongs.
    """
    for name, value in overrides.items():
        entry = knob(name)
        if entry.kind not in {"flag", "env"}:
            raise UserError(f"{name} is no flag or variable of a launch: it is set on the machine")
        if name in _NOT_OURS or entry.topic == _BENCHMARK:
            raise UserError(f"{name} cannot be set in a plan: {entry.never}")
        if value is False:
            continue
        if not known_in(name, version):
            other = replacement(name, version)
            raise UserError(
                f"vLLM {version} does not know {name}",
                hint=entry.never if other is None else f"{other} does its work there",
            )
        if name in _NUMBERS and (isinstance(value, bool) or not value.isdecimal()):
            raise UserError(f"{name} is {value!r}: expected a whole number")
        if name == "--gpu-memory-utilization" and not (isinstance(value, str) and _share(value)):
            raise UserError(f"{name} is {value!r}: expected a number above 0 and up to 1")
    return dict(overrides)


def layout_said(overrides: Mapping[str, str | bool], target: Target, *, busy: bool) -> Layout | None:
    """The layout that overrides spell out; None where they leave it to the plan.

    What they do not name is 1, or off. A ``busy`` target is filled with as many such servers as there is room for.
    UserError where the target has not so many accelerators.
    """
    said = {part: int(overrides[name]) for name, part in _SIZES.items() if overrides.get(name) not in {None, False}}
    expert = bool(overrides.get(_EXPERT, False))
    if not said and not expert:
        return None
    layout = Layout(**said, expert=expert)
    total = target.gpus * target.nodes
    if layout.gpus > total or 0 in said.values():
        raise UserError(f"the parallelism that is set takes {layout.gpus} accelerators, and {target} has {total}")
    if layout.gpus > target.gpus:
        return Layout(**said, expert=expert, nodes=-(-layout.gpus // target.gpus))
    return Layout(**said, expert=expert, replicas=target.gpus // layout.gpus * target.nodes if busy else 1)


def _share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False
