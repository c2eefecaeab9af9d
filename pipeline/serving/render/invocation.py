"""What one process of a launch runs: its variables and its arguments, whole.

Every form of a launch is made from this, so that a script, a container and a manifest start the same thing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pipeline.errors import UserError
from pipeline.serving.hardware import Hardware, hardware
from pipeline.serving.plan import LaunchPlan, Process

LOOPBACK = "127.0.0.1"
"""Where a server listens unless something stands between it and the network: it asks nobody for a password."""

_RAY, _BLOCK = frozenset({"ray-head", "ray-worker"}), "--block"


def variables(plan: LaunchPlan, process: Process) -> dict[str, str]:
    """The plan's variables with those of the process."""
    return {**plan.env, **process.env}


def arguments(process: Process, *, host: str = LOOPBACK) -> tuple[str, ...]:
    """The command line; a server's names where it listens."""
    argv = process.argv
    if process.port is None:
        return argv
    listening = [] if "--host" in argv else ["--host", host]
    return (*argv, *listening, *([] if "--port" in argv else ["--port", str(process.port)]))


def containers(processes: Sequence[Process]) -> tuple[tuple[Process, ...], ...]:
    """The processes that share a container: a server joins Ray through its own node's, and must find it in /tmp."""
    found: list[tuple[Process, ...]] = []
    for node in sorted({process.node for process in processes}):
        here = [process for process in processes if process.node == node]
        joined = tuple(process for process in here if process.role in _RAY)
        others = [process for process in here if process.role not in _RAY]
        found += [(*joined, others[0]), *((other,) for other in others[1:])] if others else [joined]
    return tuple(found)


def contained(processes: Sequence[Process], *, host: str = LOOPBACK) -> tuple[str, ...]:
    """The command line of a container. A container ends with its first process, so `ray start` must not return there.

    Before a server, a shell starts Ray and then becomes the server, whose arguments it never reads.
    """
    *before, last = processes
    argv = arguments(last, host=host)
    if last.role in _RAY and _BLOCK not in argv:
        argv = (*argv, _BLOCK)
    if not before:
        return argv
    started = " && ".join(shlex.join(returning(process)) for process in before)
    return ("/bin/sh", "-c", f'{started} && exec "$@"', "sh", *argv)


def returning(process: Process) -> tuple[str, ...]:
    """`ray start` as it comes back when Ray is up, for a server that is started after it and must not race it."""
    return tuple(word for word in process.argv if word != _BLOCK)


def is_ray(process: Process) -> bool:
    """Whether the process is a node of a Ray cluster."""
    return process.role in _RAY


def servers(processes: Sequence[Process]) -> tuple[Process, ...]:
    """The processes that answer requests."""
    return tuple(process for process in processes if process.port is not None)


def accelerator(plan: LaunchPlan) -> Hardware:
    """The accelerator that the plan is for."""
    return hardware(plan.target.partition(":")[0])


def image_of(plan: LaunchPlan, given: str | None = None) -> str:
    """The image to run: the one given, or the plan's. UserError where there is neither."""
    found = given or plan.image
    if found is None:
        raise UserError(
            f"no image of vLLM {plan.vllm_version} for {plan.target} is known", hint="Name one with --image."
        )
    return found


def title(plan: LaunchPlan) -> str:
    """What is served where, in one line."""
    return f"{plan.served_model_name} on {plan.target}, {plan.profile}, planned for vLLM {plan.vllm_version}"
