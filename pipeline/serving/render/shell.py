"""A launch as a script to read, copy and run: ``bash launch.sh``, on several nodes ``bash launch.sh NODE``.

Variables that all processes share are exported once; what differs stands before the command. One server replaces the
shell; several run beside each other, and end together when the script does: a shell without job control starts its
background processes deaf to Ctrl-C, so the script tells them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipeline.serving.plan import LaunchPlan, Process
from pipeline.serving.render.invocation import LOOPBACK, accelerator, arguments, is_ray, returning, title

_WIDTH = 100
_TRAP = "trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM"


def script(plan: LaunchPlan, processes: Sequence[Process], *, host: str = LOOPBACK) -> str:
    """The script, ending with a newline. Servers listen on ``host``."""
    nodes = sorted({process.node for process in processes})
    lines = ["#!/usr/bin/env bash", f"# {title(plan)}", *(f"# note: {warning}" for warning in plan.warnings)]
    lines += ["set -euo pipefail", ""]
    if accelerator(plan).kind == "rocm":
        lines += ["# vLLM selects by CUDA_VISIBLE_DEVICES and stops where the two differ.", "unset HIP_VISIBLE_DEVICES"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.env.items()]
    if len(nodes) == 1:
        return _text([*lines, "", *_node(processes, host)])
    if any(process.env.get("VLLM_HOST_IP", "").startswith("NODE_") for process in processes):
        lines += ["", "# NODE_0_IP and so on stand for the nodes' addresses on their private network."]
    lines += ["", f'case "${{1:?which node: {" ".join(map(str, nodes))}}}" in']
    for node in nodes:
        here = [process for process in processes if process.node == node]
        roles = ", ".join(dict.fromkeys(process.role for process in here))
        address = next((process.env["VLLM_HOST_IP"] for process in here if "VLLM_HOST_IP" in process.env), None)
        lines += [f"{node})", f"  # ---- node {node}{f' ({address})' if address else ''}: {roles}"]
        lines += [f"  {line}" if line else "" for line in _node(here, host)]
        lines += ["  ;;"]
    return _text([*lines, "*) echo 'no such node' >&2; exit 2 ;;", "esac"])


def command(process: Process, *, host: str = LOOPBACK) -> str:
    """One process as a command that can be pasted: its own variables, then its arguments, an option a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    words += [shlex.quote(word) for word in arguments(process, host=host)]
    return " \\\n  ".join(_lines(words))


def _node(processes: Sequence[Process], host: str) -> Iterator[str]:
    """What one node runs, in order."""
    serving = [process for process in processes if not is_ray(process)]
    for process in processes:
        if is_ray(process) and serving:
            yield "# It stays when the server has ended: `ray stop`"
            yield from command(replace(process, argv=returning(process)), host=host).splitlines()
    lasting = serving or list(processes)
    if len(lasting) == 1:
        yield from f"exec {_as_program(lasting[0], host)}".splitlines()
        return
    yield _TRAP
    for process in lasting:
        yield f"# replica {process.replica}, GPUs {', '.join(map(str, process.gpus)) or 'none'}"
        yield from f"{command(process, host=host)} &".splitlines()
    yield "wait -n  # the first that ends, ends the script, and the script the others"


def _as_program(process: Process, host: str) -> str:
    """The same for `exec`, which takes a program and no assignments."""
    text = command(process, host=host)
    return f"env {text}" if process.env else text


def _lines(words: Iterable[str]) -> list[str]:
    """Words in lines: each option begins one, with its value; what stands before the first option shares its line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--") and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
