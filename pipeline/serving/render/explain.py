"""A launch plan for people: what runs, how it is laid out, what memory it takes, and each knob with its reason."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from pipeline.serving.knobs.table import table
from pipeline.serving.model.facts import ModelFacts
from pipeline.serving.plan import LaunchPlan, Memory, Process
from pipeline.serving.render.invocation import accelerator, servers

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
    lines = [*_model(plan, facts), *_target(plan, installed), *_layout(plan, processes, width)]
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


def _model(plan: LaunchPlan, facts: ModelFacts) -> Iterator[str]:
    yield _row("model", plan.model)
    about = [_FAMILIES[facts.family]]
    if facts.experts:
        about[0] += f", {facts.experts_per_token} of {facts.experts} experts a token ({facts.density:.2g} %)"
    about += [word for word, holds in (("multimodal", facts.multimodal), ("hybrid", facts.hybrid)) if holds]
    yield _row("", facts.architecture)
    yield _row("", ", ".join([*about, f"{_count(facts.parameters)} parameters"]))
    stored = "16 bit" if facts.quantization == "none" else facts.quantization
    stored += f" with {facts.kv_cache_scheme} KV scales" if facts.kv_cache_scheme else ""
    weights = f"{facts.weights / 1e9:,.1f} GB" if facts.weights >= 1e8 else f"{facts.weights / 1e6:,.1f} MB"
    yield _row("", f"{stored}, {weights} of weights" + (", counted from config.json" if facts.counted else ""))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.3g} B" if parameters >= 1e9 else f"{parameters / 1e6:,.3g} M"


def _target(plan: LaunchPlan, installed: str | None) -> Iterator[str]:
    yield _row("target", f"{plan.target} ({accelerator(plan).title}), {plan.profile}")
    if installed == plan.vllm_version:
        note = ", the one installed"
    else:
        note = f"; installed is {installed}" if installed else "; none is installed here"
    yield _row("vllm", f"planned for {plan.vllm_version}{note}")
    if plan.attention_backend is not None:
        yield _row("attention", plan.attention_backend)


def _layout(plan: LaunchPlan, processes: Sequence[Process], width: int) -> Iterator[str]:
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
    parts |= {"KV cache": memory.kv_cache, "what vLLM may take": memory.budget, "all there is": memory.total}
    for name, count in parts.items():
        yield f"  {name:<20}{count / 1e9:>10,.2f}"
    room = f"room for {memory.kv_tokens:,} tokens ({memory.kv_bytes_per_token:,} B each)"
    yield from _prose(f"{room}: {memory.concurrency:,.1f} requests of full length at a time", 2, width)


def _knobs(plan: LaunchPlan, width: int, *, container: bool) -> Iterator[str]:
    for reason in plan.reasons:
        if reason.knob == LAYOUT or (table()[reason.knob].kind == "docker") != container:
            continue
        value = "" if reason.value == "on" and reason.knob.startswith("--") else _assigned(reason.knob, reason.value)
        yield f"  {reason.knob}{value}"
        yield from _prose(f"{reason.why} [{reason.source}]", 6, width)


def _assigned(knob: str, value: str) -> str:
    return f" {shlex.quote(value)}" if knob.startswith("--") or knob == "image" else f"={shlex.quote(value)}"


def _row(name: str, value: str) -> str:
    return f"{name:<11}{value}"


def _prose(text: str, indent: int, width: int, *, hanging: int = 0) -> list[str]:
    first, later = " " * indent, " " * (indent + hanging)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
