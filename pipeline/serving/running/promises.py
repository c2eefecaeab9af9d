"""What a plan promised, against what the log says was started.

    for finding in broken_promises(plan, server.scan_log(), quantization=checkpoint_quantization(folder)): ...

vLLM would rather serve otherwise than not at all: another attention backend, another graph mode, 16 bit where the
configuration was not understood. Nothing fails; the numbers just belong to something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.serving.plan import LaunchPlan
from pipeline.serving.running.logscan import Finding, LogScan

_TOLERANCE = 0.10
"""Relative; a prediction of memory that is off by less is as good as it gets."""


def broken_promises(plan: LaunchPlan, scan: LogScan, *, quantization: str | None = None) -> tuple[Finding, ...]:
    """Each promise that the log contradicts, or that it should confirm and does not.

    ``quantization`` is the method that the checkpoint's configuration names. A fact that this version of vLLM does not
    log breaks nothing. ``line`` of a finding says both values. "invalid" is what makes a measurement one of another
    checkpoint: the KV cache or the weights are not what they were to be.
    """
    return tuple(
        finding
        for check in (_formats(plan, scan, quantization), _kernels(plan, scan), _sizes(plan, scan), _memory(plan, scan))
        for finding in check
    )


def checkpoint_quantization(folder: Path) -> str | None:
    """The method that a checkpoint's config.json names; None for one in 16 bit, or without such a file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    for section in (config, config.get("text_config"), config.get("llm_config")):
        found = section.get("quantization_config") if isinstance(section, dict) else None
        if isinstance(found, dict) and found.get("quant_method"):
            return str(found["quant_method"])
    return None


def _formats(plan: LaunchPlan, scan: LogScan, quantization: str | None) -> Iterator[Finding]:
    dtype = plan.option("--kv-cache-dtype")
    if dtype is not None and dtype.startswith("fp8") and not (scan.kv_cache_dtype or dtype).startswith("fp8"):
        yield Finding("invalid", "the KV cache is not FP8", _both(dtype, scan.kv_cache_dtype))
    if quantization is not None and scan.quantization == "None":
        yield Finding("invalid", "vLLM took the checkpoint for one that is not quantized", _both(quantization, "none"))


def _kernels(plan: LaunchPlan, scan: LogScan) -> Iterator[Finding]:
    backend = plan.attention_backend
    seen = {name for names in scan.attention_backends for name in names.split("|")}
    logged = bool(seen) or scan.tensor_parallel is not None  # else there is no log, and nothing to miss in it
    if backend is not None and backend not in seen and logged:
        told = ", ".join(scan.attention_backends) or "none that the log names"
        yield Finding("caution", "the attention backend of the plan is not the one that runs", _both(backend, told))
    named = [*scan.attention_backends, *scan.kernels]
    if plan.env.get("VLLM_ROCM_USE_AITER") == "1" and named and not any("aiter" in name.lower() for name in named):
        yield Finding("caution", "AITER is on in the plan, but no kernel is AITER's", f"seen: {', '.join(named)}")
    graphs = _cudagraph_mode(plan)
    if graphs is not None and scan.cudagraph_mode not in {None, graphs}:
        values = _both(graphs, scan.cudagraph_mode)
        yield Finding("caution", "the graph mode of the plan is not the one that runs", values)


def _sizes(plan: LaunchPlan, scan: LogScan) -> Iterator[Finding]:
    engines = scan.data_parallel if plan.layout.nodes == 1 else None  # a log has the engines of one machine
    for flag, default, seen, why in (
        ("--tensor-parallel-size", 1, scan.tensor_parallel, "tensor parallelism is not the plan's"),
        ("--pipeline-parallel-size", 1, scan.pipeline_parallel, "pipeline parallelism is not the plan's"),
        ("--data-parallel-size", 1, engines, "data parallelism is not the plan's"),
        ("--max-model-len", None, scan.max_model_len, "requests may have another length than planned"),
        ("--max-num-batched-tokens", None, scan.max_num_batched_tokens, "vLLM changed how many tokens a step takes"),
    ):
        value = plan.option(flag)
        promised = int(value) if value is not None and value.isdigit() else default
        if promised is not None and seen not in {None, promised}:
            yield Finding("caution", why, _both(promised, seen))
    spread = plan.option("--enable-expert-parallel") is not None
    if spread and not scan.expert_parallel and scan.tensor_parallel is not None:
        values = _both("expert parallelism", "none in the log")
        yield Finding("caution", "experts are not spread as planned", values)


def _memory(plan: LaunchPlan, scan: LogScan) -> Iterator[Finding]:
    memory = plan.memory
    if memory is None:
        return
    if scan.kv_tokens is not None and _off(scan.kv_tokens, memory.kv_tokens):
        change = scan.kv_tokens / memory.kv_tokens - 1
        values = _both(f"{memory.kv_tokens:,} tokens", f"{scan.kv_tokens:,} ({change:+.0%})")
        yield Finding("caution", "the KV cache has not the size that was predicted", values)
    elif scan.concurrency is not None and scan.concurrency < memory.concurrency * (1 - _TOLERANCE):
        values = _both(f"{memory.concurrency:.1f} of full length", f"{scan.concurrency:.1f}")
        yield Finding("caution", "fewer requests fit than was predicted", values)


def _off(seen: int, promised: int) -> bool:
    return promised > 0 and abs(seen - promised) > _TOLERANCE * promised


def _cudagraph_mode(plan: LaunchPlan) -> str | None:
    try:
        mode = json.loads(plan.option("--compilation-config") or "{}").get("cudagraph_mode")
    except (ValueError, AttributeError):
        return None
    return mode if isinstance(mode, str) else None


def _both(promised: object, seen: object) -> str:
    return f"planned: {promised}, seen: {seen}"
