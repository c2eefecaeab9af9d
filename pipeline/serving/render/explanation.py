"""The text of `quantmint serve --explain`: a launch plan with the reason of every knob."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from quantmint.eval.report.numbers import size
from quantmint.pipeline.serving.knobs.table import table
from quantmint.pipeline.serving.model.facts import ModelFacts
from quantmint.pipeline.serving.plan import LaunchPlan, Memory, Process
from quantmint.pipeline.serving.render.invocation import accelerator, servers

LAYOUT = "layout"
"""Name of the one reason in a plan that does not belong to a knob."""
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
    """Return the plan as text of ``width`` columns, ending with a newline.

    ``installed`` is the version of the vLLM on this machine, None without one. ``reasons`` False leaves out the knobs.
    """
    lines = [*_about(plan, facts, processes, installed, width)]
    if plan.memory is not None:
        lines += ["", *_memory(plan, plan.memory, width)]
    if reasons:
        lines += ["", "knobs", *_knobs(plan, width, container=False)]
        lines += ["", "in a container (--launcher docker, --compose)", *_knobs(plan, width, container=True)]
    if plan.host:
        lines += ["", "the machine must have (`quantmint doctor` checks)"]
        for check in plan.host:
            lines += [f"  {check.name} {check.expected}", *_prose(f"{check.why} [{check.source}]", 6, width)]
    for warning in plan.warnings:
        lines += _prose(f"warning: {warning}", 0, width, hanging=9)
    return "\n".join(lines) + "\n"


def _about(
    plan: LaunchPlan, facts: ModelFacts, processes: Sequence[Process], installed: str | None, width: int
) -> Iterator[str]:
    """Yield the rows about the model, the target, vLLM and the layout."""
    yield _row("model", plan.model)
    about = [_FAMILIES[facts.family]]
    if facts.experts:
        about[0] += f", {facts.experts_per_token} of {facts.experts} experts a token ({facts.density:.2g} %)"
    about += [word for word, holds in (("multimodal", facts.multimodal), ("hybrid", facts.hybrid)) if holds]
    yield _row("", facts.architecture)
    billions = facts.parameters / 1e9
    about.append(f"{billions:,.3g} B parameters" if billions >= 1 else f"{1000 * billions:,.3g} M parameters")
    yield _row("", ", ".join(about))
    weights = "16 bit" if facts.quantization == "none" else facts.quantization
    weights += f" with {facts.kv_cache_scheme} KV scales" if facts.kv_cache_scheme else ""
    counted = ", counted from config.json" if facts.counted else ""
    yield _row("", f"{weights}, {size(facts.weights)} of weights{counted}")
    yield _row("target", f"{plan.target} ({accelerator(plan).title}), {plan.profile}")
    if installed == plan.vllm_version and accelerator(plan).kind != "cpu" and "cpu" in installed:
        note = f": this machine's vLLM is {installed}, a CPU build; the target's vLLM is not known"
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
    device = "the process" if accelerator(plan).kind == "cpu" else "each GPU"
    yield f"memory of {device}, GB"
    parts = {"weights": memory.weights, "activations": memory.activations, "graphs": memory.graphs}
    parts |= {"KV cache": memory.kv_cache, "vLLM's share": memory.budget}
    parts |= {"Quick Reduce": memory.beside} if memory.beside else {}
    parts |= {"total": memory.total}
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
