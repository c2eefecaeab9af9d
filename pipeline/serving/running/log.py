"""What a server's log says: the facts of a measurement, what makes its numbers void, why it did not start.

vLLM would rather serve otherwise than not at all: another attention backend, another graph mode, 16 bit where the
configuration was not understood. Nothing fails; the numbers just belong to something else. Patterns are data, in
`log_patterns.yaml` and `failures.yaml`, each with what it means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from quantmint.pipeline.base.data import beside
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import read_json
from quantmint.pipeline.recipe.modules import declared_quantization
from quantmint.pipeline.serving.plan import LaunchPlan


class LogFinding(NamedTuple):
    """A line of the log that changes what a number means."""

    level: Literal["invalid", "caution"]
    why: str
    line: str


@dataclass(frozen=True, slots=True)
class LogScan:
    """What a log says; None, or empty, where it does not. `kv_tokens` and `concurrency` are the smallest engine's."""

    vllm_version: str | None
    attention_backend: str | None
    kernels: tuple[str, ...]
    quantization: str | None
    kv_cache_dtype: str | None
    kv_tokens: int | None
    concurrency: float | None
    findings: tuple[LogFinding, ...]
    attention_backends: tuple[str, ...] = ()
    max_num_batched_tokens: int | None = None
    cudagraph_mode: str | None = None

    @property
    def invalid(self) -> tuple[LogFinding, ...]:
        """What makes the measurement void."""
        return tuple(finding for finding in self.findings if finding.level == "invalid")

    @property
    def cautions(self) -> tuple[LogFinding, ...]:
        """What the report must say."""
        return tuple(finding for finding in self.findings if finding.level == "caution")


def scan_log(log: str) -> LogScan:
    """Read the log of a server. A line that repeats (one a worker) is one finding."""
    tokens = [int(value.replace(",", "")) for value in _every(log, "kv_tokens")]
    concurrency = [float(value) for value in _every(log, "concurrency")]
    backends, batched = _every(log, "attention_backend"), _first(log, "max_num_batched_tokens")
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
        max_num_batched_tokens=None if batched is None else int(batched),
        cudagraph_mode=_first(log, "cudagraph_mode"),
    )


def _findings(log: str) -> tuple[LogFinding, ...]:
    findings: dict[tuple[str, str], LogFinding] = {}
    for row in beside(__file__, "log_patterns.yaml")["findings"]:
        for found in re.finditer(row["pattern"], log):
            key = (row["pattern"], found["what"] if row.get("each") else "")
            if key not in findings:
                start = log.rfind("\n", 0, found.start()) + 1
                end = log.find("\n", found.end())
                line = log[start : len(log) if end < 0 else end].strip()
                findings[key] = LogFinding(row["level"], row["why"], line)
            if not row.get("each"):
                break
    return tuple(findings.values())


def _every(log: str, fact: str) -> tuple[str, ...]:
    """Distinct values, in the order of the patterns, then of the log."""
    patterns = beside(__file__, "log_patterns.yaml")["facts"][fact]
    return tuple({line["value"]: None for pattern in patterns for line in re.finditer(pattern, log)})


def _first(log: str, fact: str) -> str | None:
    return next(iter(_every(log, fact)), None)


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


def diagnose(log: str) -> Diagnosis:
    """Explain the log of a server that ended before it answered."""
    for row in beside(__file__, "failures.yaml"):
        found = re.search(row["pattern"], log)
        if found is not None:
            groups = {name: value or "" for name, value in found.groupdict().items()}
            return Diagnosis(row["name"], row["message"].format_map(groups), row["fix"])
    return Diagnosis("unknown", _last_words(log), None)


def _last_words(log: str) -> str:
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines() if not _HARMLESS.match(line)]
    errors = [found["error"] for line in lines if (found := _ERROR.search(line)) and not _ECHO.search(line)]
    if errors:
        return errors[-1]
    if _GONE.search(log):
        return "its engine was gone without a word, as when the kernel kills a process for its memory"
    return last_lines(log, 3)


def last_lines(log: str, count: int) -> str:
    """The last lines that say something, without what vLLM writes before each."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    return " | ".join([line for line in lines if line][-count:]) or "it wrote nothing"


_TOLERANCE = 0.10
"""Relative; a prediction of memory that is off by less is as good as it gets."""


def plan_deviations(plan: LaunchPlan, scan: LogScan, *, quantization: str | None = None) -> Iterator[LogFinding]:
    """Each promise that the log contradicts; "invalid" ones make a measurement one of another checkpoint."""
    dtype = plan.option("--kv-cache-dtype")
    if dtype is not None and dtype.startswith("fp8") and not (scan.kv_cache_dtype or dtype).startswith("fp8"):
        yield LogFinding("invalid", "the KV cache is not FP8", _both(dtype, scan.kv_cache_dtype))
    if quantization is not None and scan.quantization == "None":
        yield LogFinding(
            "invalid", "vLLM took the checkpoint for one that is not quantized", _both(quantization, "none")
        )
    backend, seen = plan.attention_backend, scan.attention_backends
    logged = bool(seen) or scan.vllm_version is not None  # else there is no log, and nothing to miss in it
    if backend is not None and backend not in seen and logged:
        told = ", ".join(seen) or "none that the log names"
        yield LogFinding("caution", "the attention backend of the plan is not the one that runs", _both(backend, told))
    named = [*seen, *scan.kernels]
    if plan.env.get("VLLM_ROCM_USE_AITER") == "1" and named and not any("aiter" in name.lower() for name in named):
        yield LogFinding("caution", "AITER is on in the plan, but no kernel is AITER's", f"seen: {', '.join(named)}")
    batched = plan.option("--max-num-batched-tokens")
    if batched is not None and scan.max_num_batched_tokens not in {None, int(batched)}:
        values = _both(batched, scan.max_num_batched_tokens)
        yield LogFinding("caution", "vLLM changed how many tokens a step takes", values)
    graphs = json.loads(plan.option("--compilation-config") or "{}").get("cudagraph_mode")
    if graphs is not None and scan.cudagraph_mode not in {None, graphs}:
        values = _both(graphs, scan.cudagraph_mode)
        yield LogFinding("caution", "the graph mode of the plan is not the one that runs", values)
    if plan.memory is not None and plan.memory.kv_tokens and scan.kv_tokens is not None:
        change = scan.kv_tokens / plan.memory.kv_tokens - 1
        if abs(change) > _TOLERANCE:
            values = _both(f"{plan.memory.kv_tokens:,} tokens", f"{scan.kv_tokens:,} ({change:+.0%})")
            yield LogFinding("caution", "the KV cache has not the size that was predicted", values)


def checkpoint_quantization(folder: Path) -> str | None:
    """The method that a checkpoint's config.json names; None for one in 16 bit, or without such a file."""
    with suppress(UserError):
        method = (declared_quantization(read_json(folder / "config.json")) or {}).get("quant_method")
        return None if method is None else str(method)
    return None


def _both(promised: object, seen: object) -> str:
    return f"planned: {promised}, seen: {seen}"
