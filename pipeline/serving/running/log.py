"""What a server's log says: the facts of a measurement, what makes its numbers void, why it did not start.

    scan = scan_log(server.log_path.read_text())
    scan.kv_tokens, scan.attention_backend, scan.invalid      # e.g. KV scales that defaulted to 1.0
    broken_promises(plan, scan, quantization=checkpoint_quantization(folder))
    >>> diagnose("ERROR OSError: [Errno 98] Address already in use").message
    'the port was taken by another process'

vLLM would rather serve otherwise than not at all: another attention backend, another graph mode, 16 bit where the
configuration was not understood. Nothing fails; the numbers just belong to something else. Patterns are data, in
`log_patterns.yaml` and `failures.yaml`, each with what it means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from pipeline.serving.knobs.table import table
from pipeline.serving.plan import LaunchPlan

_ENGINE = "Initializing a V1 LLM engine"
"""What each engine says once."""


class Finding(NamedTuple):
    """A line of the log that changes what a number means."""

    level: Literal["invalid", "caution"]
    why: str
    line: str


@dataclass(frozen=True, slots=True)
class LogScan:
    """Facts are None, or empty, where this version of vLLM does not say them.

    `kv_tokens` is the capacity of the KV cache in tokens, `concurrency` how many requests of full length fit it: both
    of the smallest engine, where the server has several. `attention_backend` is the first of `attention_backends`, all
    that layers run on, by the names of --attention-backend. The sizes are those that the engine says it has, not those
    it was asked for.
    """

    vllm_version: str | None
    attention_backend: str | None
    kernels: tuple[str, ...]
    quantization: str | None
    kv_cache_dtype: str | None
    kv_tokens: int | None
    concurrency: float | None
    findings: tuple[Finding, ...]
    attention_backends: tuple[str, ...] = ()
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool = False
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    cudagraph_mode: str | None = None

    @property
    def invalid(self) -> tuple[Finding, ...]:
        """What makes the measurement void."""
        return tuple(finding for finding in self.findings if finding.level == "invalid")

    @property
    def cautions(self) -> tuple[Finding, ...]:
        """What the report must say."""
        return tuple(finding for finding in self.findings if finding.level == "caution")


def scan_log(log: str) -> LogScan:
    """Read the log of a server. A line that repeats (one a worker) is one finding."""
    tokens = [int(value.replace(",", "")) for value in _every(log, "kv_tokens")]
    concurrency = [float(value) for value in _every(log, "concurrency")]
    backends, data = _every(log, "attention_backend"), _number(log, "data_parallel")
    return LogScan(
        vllm_version=_first(log, "vllm_version"),
        attention_backend=next(iter(backends), None),
        kernels=_every(log, "kernels"),
        quantization=_first(log, "quantization"),
        kv_cache_dtype=_first(log, "kv_cache_dtype"),
        kv_tokens=min(tokens, default=None),
        concurrency=min(concurrency, default=None),
        findings=_findings(log),
        attention_backends=backends,
        tensor_parallel=_number(log, "tensor_parallel"),
        pipeline_parallel=_number(log, "pipeline_parallel"),
        data_parallel=None if data is None else max(data, log.count(_ENGINE)),
        expert_parallel=_first(log, "expert_parallel") is not None,
        max_model_len=_number(log, "max_model_len"),
        max_num_batched_tokens=_number(log, "max_num_batched_tokens"),
        cudagraph_mode=_first(log, "cudagraph_mode"),
    )


def _findings(log: str) -> tuple[Finding, ...]:
    findings: dict[tuple[str, str], Finding] = {}
    for row in _table("log_patterns.yaml")["findings"]:
        for found in _compiled(row["pattern"]).finditer(log):
            key = (row["pattern"], found["what"] if row.get("each") else "")
            if key not in findings:
                start = log.rfind("\n", 0, found.start()) + 1
                end = log.find("\n", found.end())
                line = log[start : len(log) if end < 0 else end].strip()
                findings[key] = Finding(row["level"], row["why"], line)
            if not row.get("each"):
                break
    return tuple(findings.values())


def _every(log: str, fact: str) -> tuple[str, ...]:
    """Distinct values, in the order of the patterns, then of the log."""
    found = {
        line["value"]: None
        for pattern in _table("log_patterns.yaml")["facts"][fact]["patterns"]
        for line in _compiled(pattern).finditer(log)
    }
    return tuple(found)


def _number(log: str, fact: str) -> int | None:
    value = _first(log, fact)
    return None if value is None else int(value)


def _first(log: str, fact: str) -> str | None:
    for pattern in _table("log_patterns.yaml")["facts"][fact]:
        found = _compiled(pattern).search(log)
        if found is not None:
            return found["value"]
    return None


#: What vLLM says when the cause stands further up.
_ECHO = re.compile(
    r"root cause above|for the root cause|Engine core initialization failed|WorkerProc initialization failed"
)
#: What the server says when its engine is gone, whatever the reason.
_GONE = re.compile(r"EngineDeadError|EngineCore encountered an issue")
#: A line that tells of an exception and is none: vLLM went on without.
_HARMLESS = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:DEBUG|INFO|WARNING)\s")
_ERROR = re.compile(r"(?:^|\s)(?P<error>[A-Za-z_.]*(?:Error|Exception|Interrupt)\b:? .*\S)")
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL)\s+[\d-]+ [\d:.]+ \[[^\]]*\]\s*)?")


class Diagnosis(NamedTuple):
    """The cause in one line and what to do about it; `name` is the table's entry, or "unknown"."""

    name: str
    message: str
    fix: str | None


@dataclass(frozen=True, slots=True)
class _Failure:
    name: str
    pattern: re.Pattern[str]
    message: str
    fix: str


def diagnose(log: str) -> Diagnosis:
    """Explain the log of a server that ended before it answered."""
    for failure in _failures():
        found = failure.pattern.search(log)
        if found is not None:
            groups = {name: value or "" for name, value in found.groupdict().items()}
            return Diagnosis(failure.name, failure.message.format_map(groups) + _nearest(groups), failure.fix)
    return Diagnosis("unknown", _last_words(log), None)


def _nearest(groups: dict[str, str]) -> str:
    """A known spelling for the first argument that vLLM did not recognize."""
    unknown = groups.get("arguments", "").split()
    known = [knob.name for knob in table().values() if knob.kind == "flag"]
    close = get_close_matches(unknown[0], [name for name in known if name != unknown[0]], n=1) if unknown else []
    return f" (near: {close[0]})" if close else ""


def _last_words(log: str) -> str:
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines() if not _HARMLESS.match(line)]
    errors = [found["error"] for line in lines if (found := _ERROR.search(line)) and not _ECHO.search(line)]
    if errors:
        return errors[-1]
    if _GONE.search(log):
        return "its engine was gone without a word, as when the kernel kills a process for its memory"
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    return " | ".join([line for line in lines if line][-3:]) or "it wrote nothing"


@cache
def _failures() -> tuple[_Failure, ...]:
    return tuple(
        _Failure(row["name"], re.compile(row["pattern"]), row["message"], row["fix"]) for row in _table("failures.yaml")
    )


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
    seen = scan.attention_backends
    logged = bool(seen) or scan.tensor_parallel is not None  # else there is no log, and nothing to miss in it
    if backend is not None and backend not in seen and logged:
        told = ", ".join(seen) or "none that the log names"
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


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _table(name: str) -> Any:
    return yaml.safe_load(resources.files("pipeline.serving.running").joinpath(name).read_text(encoding="utf-8"))
