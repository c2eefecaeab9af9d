"""A case of `cases.yaml` as a plan, and a plan as text that a reviewer reads from top to bottom.

`python -m tests.serving.golden.text` rewrites the texts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.recipe.serving import Speculative
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, model_facts
from quantmint.pipeline.serving.plan import LaunchPlan, Reason, processes
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parents[1] / "assets" / "configs"
Case = Mapping[str, Any]
_WIDTH = 118


def cases() -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / "cases.yaml").read_text(encoding="utf-8"))


def facts_of(case: Case) -> ModelFacts:
    facts = model_facts(CONFIGS / case["model"])
    if "scheme" not in case:
        return facts
    layout = case.get("format", "quark")
    return as_quantized(facts, scheme=case["scheme"], kv_cache=case.get("kv_cache", "auto"), format=layout)


def plan_of(case: Case) -> LaunchPlan:
    said = case.get("speculative")
    return plan_serving(
        ServingRequest(
            f"/models/{case['model']}",
            facts_of(case),
            target=parse_target(case["target"]),
            profile=profile(case["profile"], concurrency=case["concurrency"], max_model_len=case["context"]),
            vllm_version=case["vllm"],
            overrides=case.get("overrides", {}),
            speculative=None if said is None else Speculative.model_validate(said),
            served_model_name=case["model"],
            servers_per_gpu=case.get("packed", 1),
        )
    )


def text_of(case: Case) -> str:
    try:
        plan = plan_of(case)
    except UserError as error:
        return (
            "\n".join([*_head(case), "", "REFUSED", *_wrapped(error.message, 2), *_wrapped(error.hint or "", 2)]) + "\n"
        )
    lines = [*_head(case), "", *_layout(plan), "", *_memory(plan), "", *_knobs(plan), "", *_processes(plan)]
    lines += ["", "host"] + [line for check in plan.host for line in _check(check)]
    lines += ["", "warnings"] + [line for warning in plan.warnings for line in _wrapped(f"! {warning}", 2, 4)]
    return "\n".join(lines if plan.warnings else lines[:-2]) + "\n"


def _head(case: Case) -> Iterator[str]:
    facts = facts_of(case)
    yield (
        f"{case['model']} on {case['target']}: {case['profile']}, {case['concurrency']} requests in flight, "
        f"{case['context']:,} tokens, vLLM {case['vllm']}"
    )
    about = [facts.family, f"{facts.parameters / 1e9:,.1f} B parameters", f"{facts.weights / 1e9:,.1f} GB of weights"]
    if facts.experts:
        about.insert(1, f"{facts.experts_per_token} of {facts.experts} experts a token ({facts.density:.2f} %)")
    about.append("16 bit" if facts.quantization == "none" else f"{facts.quantization} ({facts.checkpoint_format})")
    about += ["scales for an FP8 KV cache"] if facts.kv_cache_scheme else []
    about += [f"{facts.layers} layers ({facts.linear_layers} linear, {facts.sliding_layers} sliding)"]
    grouped = f"{facts.heads} heads of {facts.head_dim}, {facts.kv_heads} for keys and values"
    about += [grouped if facts.attention == "mha" else f"{facts.heads} heads on one latent"]
    about += ["multimodal"] if facts.multimodal else []
    yield from _wrapped(", ".join(about), 2)


def _layout(plan: LaunchPlan) -> Iterator[str]:
    reason = plan.reasons[0]
    yield f"layout     {reason.value}"
    yield from _why(reason, 11)
    yield f"attention  {plan.attention_backend or 'not known from here'}"


def _memory(plan: LaunchPlan) -> Iterator[str]:
    memory = plan.memory
    if memory is None:
        raise AssertionError("every plan has its memory")
    yield "memory of the fullest accelerator, GB"
    parts = {
        "all": memory.total,
        "for vLLM": memory.budget,
        "weights": memory.weights,
        "activations": memory.activations,
        "graphs": memory.graphs,
        "KV cache": memory.kv_cache,
    }
    for name, count in parts.items():
        yield f"  {name:<12}{count / 1e9:>9,.2f}"
    yield (
        f"  {memory.kv_tokens:,} tokens of KV cache an engine, {memory.kv_bytes_per_token:,} bytes each:"
        f" {memory.concurrency:,.1f} requests of full length"
    )


def _knobs(plan: LaunchPlan) -> Iterator[str]:
    reasons = {reason.knob: reason for reason in plan.reasons}
    yield "environment"
    for name, value in plan.env.items():
        yield f"  {name}={value}"
        yield from _why(reasons[name], 6)
    yield ""
    yield " ".join(plan.argv[:3])
    for word in plan.argv[3:]:
        if word.startswith("--"):
            reason = reasons[word]
            yield f"  {word}" + ("" if reason.value == "on" else f" {reason.value}")
            yield from _why(reason, 6)
    yield ""
    yield f"container  {plan.image}"
    yield from _wrapped(" ".join(plan.docker), 11)


def _processes(plan: LaunchPlan) -> Iterator[str]:
    yield "processes"
    for process in processes(plan):
        own = process.argv[len(plan.argv) :] if process.argv[0] == "vllm" else process.argv
        gpus = f" GPUs {','.join(map(str, process.gpus))}" if process.gpus else ""
        port = f" port {process.port}" if process.port is not None else ""
        env = "".join(f" {name}={value}" for name, value in process.env.items() if "VISIBLE_DEVICES" not in name)
        yield from _wrapped(f"node {process.node} {process.role}{gpus}{port}{env} {' '.join(own)}".rstrip(), 2, 4)


def _check(check: Any) -> Iterator[str]:
    yield f"  {check.name}: {check.expected}"
    yield from _wrapped(f"{check.why} [{check.source}]", 6)


def _why(reason: Reason, indent: int) -> Iterator[str]:
    yield from _wrapped(f"{reason.why} [{reason.source}]", indent)


def _wrapped(text: str, indent: int, more: int | None = None) -> list[str]:
    first, later = " " * indent, " " * (indent if more is None else more)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def main() -> None:
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for case in cases():
        (FOLDER / f"{case['name']}.txt").write_text(text_of(case), encoding="utf-8")


if __name__ == "__main__":
    main()
