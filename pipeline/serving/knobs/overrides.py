"""What a recipe or a command line says itself: knobs by their names, and arguments that are passed on as they are.

    >>> [reason.knob for reason in checked_arguments(["--reasoning-parser", "deepseek_r1"])]
    ['--reasoning-parser']

A knob is checked before it wins over the table's rules. Arguments that the table has nothing to say about (parsers of
tool calls, chat templates) are vLLM's own parser's to judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.base.errors import UserError
from pipeline.serving.knobs.table import knob, known_in, table
from pipeline.serving.plan import Layout, Reason
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
        *("--distributed-executor-backend", "--data-parallel-size-local", "--data-parallel-address"),
        *("--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-rpc-port"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "VLLM_HOST_IP", "HF_TOKEN"),
    }
)
_BENCHMARK = "Benchmarks"
#: Arguments with a secret.
_KEYS = frozenset({"--api-key", "--hf-token"})
#: Knobs whose value the plan must know as a number.
_NUMBERS = frozenset({"--max-num-seqs", "--max-num-batched-tokens", "--block-size", *_SIZES})


def checked_overrides(overrides: Mapping[str, str | bool], version: str) -> dict[str, str | bool]:
    """The same, in their order.

    UserError for a name that the table lacks, for a knob that this version of vLLM lacks, for one that a launch or its
    launcher sets, and for text where a number belongs.
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
            raise UserError(f"vLLM {version} does not know {name}", hint=entry.never or None)
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


def checked_arguments(arguments: Sequence[str]) -> tuple[Reason, ...]:
    """Why each is there. UserError for a word that belongs to no flag, a knob of the table, and a secret."""
    found: list[Reason] = []
    for word in arguments:
        if not word.startswith("--"):
            if not found:
                raise UserError(
                    f"arguments for vllm serve: found {word!r} first, expected a flag such as --chat-template"
                )
            last = found[-1]
            found[-1] = last._replace(value=word if last.value == "on" else f"{last.value} {word}")
            continue
        name, _, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _KEYS:
            raise UserError(
                f"{name} would stand in the process list, in logs and in records",
                hint="Servers listen on the loopback interface; a proxy before them asks for keys.",
            )
        knob = next((known for known in (name, f"--{name.removeprefix('--no-')}") if known in table()), None)
        if knob is not None:
            raise UserError(
                f"{name} is a knob of the plan, which would not know of it",
                hint=f"Say it with --set {knob.removeprefix('--')}=VALUE, or under `serve: knobs:` of the recipe.",
            )
        found.append(Reason(name, value or "on", "passed on as it was given", "given"))
    return tuple(found)
