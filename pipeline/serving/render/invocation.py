"""What the processes of a launch run, as arguments, as a script, and as the comments and the YAML of a manifest.

Every form of a launch is made from `arguments`, so that a script, a container and a manifest start the
same thing. `script` is to read, copy and run: ``bash launch.sh``, on several nodes ``bash launch.sh NODE``.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from quantmint.eval.report.numbers import size
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import Hardware, hardware
from quantmint.pipeline.serving.knobs.table import table
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import LaunchPlan, Memory, Process, waves

LOOPBACK = "127.0.0.1"
"""Where a server listens unless something stands between it and the network: it asks nobody for a password."""

_WIDTH = 100
_TRAP = "trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM"


def arguments(process: Process, *, host: str = LOOPBACK) -> tuple[str, ...]:
    """The command line; a server's names where it listens."""
    listening = () if process.port is None else ("--host", host, "--port", str(process.port))
    return (*process.argv, *listening)


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


def script(plan: LaunchPlan, processes: Sequence[Process]) -> str:
    """The script, ending with a newline."""
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
    """One process as a command that can be pasted: its own variables, then its arguments, an option a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in process.env.items()]
    words += [shlex.quote(word) for word in arguments(process)]
    return " \\\n  ".join(_lines(words))


def _node(turns: Sequence[Sequence[Process]]) -> Iterator[str]:
    """What one node runs. One server replaces the shell; several run beside each other and end together.

    A shell without job control starts its background processes deaf to Ctrl-C, so the script tells them.
    """
    (first, *others), *later = turns
    if not others and not later:
        assignments = "env " if first.env else ""  # `exec` takes a program
        yield from f"exec {assignments}{command(first)}".splitlines()
        return
    yield _TRAP
    before: Sequence[Process] = ()
    started = 0
    for turn in turns:
        if before:
            ports = " ".join(str(process.port) for process in before)
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
        before, started = turn, started + len(turn)
    yield "wait -n  # the first that ends, ends the script, and the script the others"


def _lines(words: Iterable[str]) -> list[str]:
    """Words in lines: each option begins one, with its value; what stands before the first option shares its line."""
    lines: list[str] = []
    for word in words:
        if lines and not word.startswith("--") and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


class _Dumper(yaml.SafeDumper):
    """Writes what occurs twice twice: readers of a manifest follow no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


# Text that Kubernetes' reader takes for a truth or a number, and PyYAML does not: y, 5e8, 0o17.
_BOOL, _NUMBER = re.compile(r"[yYnN]"), re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+|[-+]?0o[0-7_]+")
for _tag, _pattern, _first in (("bool", _BOOL, "yYnN"), ("float", _NUMBER, "-+.0123456789")):
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern.pattern})$"), list(_first))


def dump(*documents: Mapping[str, Any]) -> str:
    """The documents as YAML, keys in the order that they have."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def comments(plan: LaunchPlan) -> str:
    """Lines that begin with ``#``, each ended by a newline; `explain` has the reason of every knob."""
    lines = [title(plan), "made by `quantmint serve`; make it again rather than edit it: the knobs belong together"]
    return "".join(f"# {line}\n" for line in (*lines, *(f"warning: {warning}" for warning in plan.warnings)))


LAYOUT = "layout"
"""The reason of a plan that is no knob's."""
_FAMILIES = {
    "gpt-oss": "gpt-oss",
    "dsa": "sparse latent attention (DSA)",
    "mla": "latent attention (MLA)",
    "moe": "mixture of experts",
    "dense": "dense",
}


def explain(
    plan: LaunchPlan,
    facts: ModelFacts,
    processes: Sequence[Process],
    *,
    installed: str | None = None,
    reasons: bool = True,
    width: int = 100,
) -> str:
    """The plan as text of ``width`` columns, ending with a newline; without ``reasons`` knobs are left out.

    ``installed`` is the version of the vLLM that is here, None where there is none.
    """
    lines = [*_about(plan, facts, processes, installed, width)]
    if plan.memory is not None:
        lines += ["", *_memory(plan, plan.memory, width)]
    if reasons:
        lines += ["", "knobs", *_knobs(plan, width, container=False)]
        lines += ["", "in a container (--launcher docker, --compose)", *_knobs(plan, width, container=True)]
    if plan.host:
        lines += ["", "the machine must have (`quantmint doctor` looks)"]
        for check in plan.host:
            lines += [f"  {check.name} {check.expected}", *_prose(f"{check.why} [{check.source}]", 6, width)]
    for warning in plan.warnings:
        lines += _prose(f"warning: {warning}", 0, width, hanging=9)
    return "\n".join(lines) + "\n"


def _about(
    plan: LaunchPlan, facts: ModelFacts, processes: Sequence[Process], installed: str | None, width: int
) -> Iterator[str]:
    """The model, the target and the layout."""
    yield _row("model", plan.model)
    about = [_FAMILIES[facts.family]]
    if facts.experts:
        about[0] += f", {facts.experts_per_token} of {facts.experts} experts a token ({facts.density:.2g} %)"
    about += [word for word, holds in (("multimodal", facts.multimodal), ("hybrid", facts.hybrid)) if holds]
    yield _row("", facts.architecture)
    billions = facts.parameters / 1e9
    about.append(f"{billions:,.3g} B parameters" if billions >= 1 else f"{1000 * billions:,.3g} M parameters")
    yield _row("", ", ".join(about))
    stored = "16 bit" if facts.quantization == "none" else facts.quantization
    stored += f" with {facts.kv_cache_scheme} KV scales" if facts.kv_cache_scheme else ""
    counted = ", counted from config.json" if facts.counted else ""
    yield _row("", f"{stored}, {size(facts.weights)} of weights{counted}")
    yield _row("target", f"{plan.target} ({accelerator(plan).title}), {plan.profile}")
    if installed == plan.vllm_version and accelerator(plan).kind != "cpu" and "cpu" in installed:
        note = f": the vLLM here is {installed}, for a CPU, and of the target's nothing is known"
    elif installed == plan.vllm_version:
        note = ", the one installed"
    else:
        note = f"; installed is {installed}" if installed else "; none is installed here"
    yield _row("vllm", f"planned for {plan.vllm_version}{note}")
    if plan.attention_backend is not None:
        yield _row("attention", plan.attention_backend)
    for reason in plan.reasons:
        if reason.knob == LAYOUT:
            yield _row("layout", reason.value)
            yield from _prose(f"{reason.why} [{reason.source}]", 11, width)
    ports = [str(process.port) for process in servers(processes)]
    if len(ports) > 1:
        yield _row("ports", f"{ports[0]} to {ports[-1]}")


def _memory(plan: LaunchPlan, memory: Memory, width: int) -> Iterator[str]:
    where = "the process" if accelerator(plan).kind == "cpu" else "each GPU"
    yield f"memory of {where}, GB"
    parts = {"weights": memory.weights, "activations": memory.activations, "graphs": memory.graphs}
    parts |= {"KV cache": memory.kv_cache, "what vLLM may take": memory.budget}
    parts |= {"Quick Reduce beside": memory.beside} if memory.beside else {}
    parts |= {"all there is": memory.total}
    for name, count in parts.items():
        yield f"  {name:<20}{count / 1e9:>10,.2f}"
    room = f"room for {memory.kv_tokens:,} tokens ({memory.kv_bytes_per_token:,} B each)"
    yield from _prose(f"{room}: {memory.concurrency:,.1f} requests of full length at a time", 2, width)


def _knobs(plan: LaunchPlan, width: int, *, container: bool) -> Iterator[str]:
    for reason in plan.reasons:
        if reason.knob == LAYOUT or (table()[reason.knob].kind == "docker") != container:
            continue
        flag = reason.knob.startswith("--")
        joint = " " if flag or reason.knob == "image" else "="
        yield f"  {reason.knob}" + ("" if flag and reason.value == "on" else f"{joint}{shlex.quote(reason.value)}")
        yield from _prose(f"{reason.why} [{reason.source}]", 6, width)


def _row(name: str, value: str) -> str:
    return f"{name:<11}{value}"


def _prose(text: str, indent: int, width: int, *, hanging: int = 0) -> list[str]:
    first, later = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
