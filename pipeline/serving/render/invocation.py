"""The command line of a launch's processes, and the shell script that starts them.

Script, container and manifest all take their command line from `arguments`, so they start the same server. The script
of `script` runs as ``bash launch.sh``, on several nodes as ``bash launch.sh NODE``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import Hardware, hardware
from quantmint.pipeline.serving.plan import LaunchPlan, Process, waves

LOOPBACK = "127.0.0.1"
"""The address on which servers listen by default, because vLLM asks clients for no password."""

_WIDTH = 100
_TRAP = "trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM"


def arguments(process: Process, *, host: str = LOOPBACK) -> tuple[str, ...]:
    """Return the command line of a process; a server's ends with its host and port."""
    listening = () if process.port is None else ("--host", host, "--port", str(process.port))
    return (*process.argv, *listening)


def servers(processes: Sequence[Process]) -> tuple[Process, ...]:
    """Return the processes that answer requests; headless engines do not."""
    return tuple(process for process in processes if process.port is not None)


def accelerator(plan: LaunchPlan) -> Hardware:
    """Return the row of the plan's accelerator in the hardware table."""
    return hardware(plan.target.partition(":")[0])


def image_of(plan: LaunchPlan, override: str | None = None) -> str:
    """Return ``override``, else the plan's container image. Raises `UserError` when there is neither."""
    image = override or plan.image
    if image is None:
        raise UserError(
            f"no image of vLLM {plan.vllm_version} for {plan.target} is known", hint="Name one with --image."
        )
    return image


def title(plan: LaunchPlan) -> str:
    """Return one line with the name that a plan serves the model under, its target, profile and vLLM version."""
    return f"{plan.served_model_name} on {plan.target}, {plan.profile}, planned for vLLM {plan.vllm_version}"


def script(plan: LaunchPlan, processes: Sequence[Process]) -> str:
    """Return a bash script that starts all processes; it ends with a newline and takes a node's number if several."""
    nodes = sorted({process.node for process in processes})
    lines = ["#!/usr/bin/env bash", f"# {title(plan)}", *(f"# note: {warning}" for warning in plan.warnings)]
    lines += ["set -euo pipefail", ""]
    if accelerator(plan).kind == "rocm":
        lines += ["# vLLM selects by CUDA_VISIBLE_DEVICES and stops where the two differ.", "unset HIP_VISIBLE_DEVICES"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.env.items()]
    if len(nodes) == 1:
        return "\n".join([*lines, "", *_node(waves(plan, processes)), ""])
    if any(process.env.get("VLLM_HOST_IP", "").startswith("NODE_") for process in processes):
        lines += ["", "# NODE_0_IP and so on stand for the nodes' addresses on their private network."]
    lines += ["", f'case "${{1:?which node: {" ".join(map(str, nodes))}}}" in']
    for node in nodes:
        here = [process for process in processes if process.node == node]
        roles = ", ".join(dict.fromkeys(process.role for process in here))
        address = next((process.env["VLLM_HOST_IP"] for process in here if "VLLM_HOST_IP" in process.env), None)
        lines += [f"{node})", f"  # ---- node {node}{f' ({address})' if address else ''}: {roles}"]
        lines += [f"  {line}" if line else "" for line in _node(waves(plan, here))]
        lines += ["  ;;"]
    return "\n".join([*lines, "*) echo 'no such node' >&2; exit 2 ;;", "esac", ""])


def command(process: Process) -> str:
    """Return a process as a shell command: its own variables, then its arguments, each option on a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    words += [shlex.quote(word) for word in arguments(process)]
    return " \\\n  ".join(_lines(words))


def _node(turns: Sequence[Sequence[Process]]) -> Iterator[str]:
    """Yield the script of one node; ``turns`` load one after another.

    A single server replaces the shell. Several run in the background and end together; a shell without job control
    starts them with SIGINT ignored, so the script ends them by SIGTERM.
    """
    first = turns[0][0]
    if len(turns) == 1 and len(turns[0]) == 1:
        assignments = "env " if first.env else ""  # `exec` takes a program
        yield from f"exec {assignments}{command(first)}".splitlines()
        return
    yield _TRAP
    loading: Sequence[Process] = ()
    started = 0
    for turn in turns:
        if loading:
            ports = " ".join(str(process.port) for process in loading)
            yield "# Servers of one GPU load one after the other: each would be charged for what the others load."
            yield f"for port in {ports}; do"
            yield f"  until (: </dev/tcp/{LOOPBACK}/$port) 2>/dev/null; do"
            yield f'    test "$(jobs -rp | wc -l)" -eq {started}; sleep 2'
            yield "  done"
            yield "done"
        for process in turn:
            names = process.env.get("CUDA_VISIBLE_DEVICES", "none").replace(",", ", ")
            yield f"# replica {process.replica}, GPUs {names}"
            yield from f"{command(process)} &".splitlines()
        loading, started = turn, started + len(turn)
    yield "wait -n  # the first that ends, ends the script, and the script the others"


def _lines(words: Iterable[str]) -> list[str]:
    """Return the words of a command as lines: each option with its value, and before them the program with its words.

    A line that would be longer than `_WIDTH` goes on in the next.
    """
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--") and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines
