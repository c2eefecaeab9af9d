"""Read the log of a vLLM server: facts of the launch, lines that invalidate a measurement, causes of a failed start.

vLLM falls back silently: to another attention backend or graph mode, or to 16 bit for a configuration that it did not
understand. The server works, but its figures are those of another setup. The patterns are in `log_patterns.yaml` and
`failures.yaml`, each with its meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from quantmint.pipeline.base.data import load_table
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import read_config
from quantmint.pipeline.recipe.modules import declared_quantization
from quantmint.pipeline.serving.plan import LaunchPlan


class LogFinding(NamedTuple):
    """A line of the log that affects a measurement: "invalid" makes it void, "caution" is reported with it."""

    level: Literal["invalid", "caution"]
    why: str
    line: str


@dataclass(frozen=True, slots=True)
class LogScan:
    """The facts of a log; None or empty if absent. ``kv_tokens`` and ``concurrency`` are of the smallest engine."""

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
        """The findings that make a measurement void."""
        return tuple(finding for finding in self.findings if finding.level == "invalid")

    @property
    def cautions(self) -> tuple[LogFinding, ...]:
        """The findings that a report must mention."""
        return tuple(finding for finding in self.findings if finding.level == "caution")


def scan_log(log: str) -> LogScan:
    """Return the facts and findings of a log. A line that several workers repeat is one finding."""
    tokens = [int(value.replace(",", "")) for value in _values(log, "kv_tokens")]
    concurrency = [float(value) for value in _values(log, "concurrency")]
    backends, batched = _values(log, "attention_backend"), _first(log, "max_num_batched_tokens")
    return LogScan(
        vllm_version=_first(log, "vllm_version"),
        attention_backend=next(iter(backends), None),
        kernels=_values(log, "kernels"),
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
    for row in load_table(__file__, "log_patterns.yaml")["findings"]:
        for match in re.finditer(row["pattern"], log):
            key = (row["pattern"], match["what"] if row.get("each") else "")
            if key not in findings:
                start = log.rfind("\n", 0, match.start()) + 1
                end = log.find("\n", match.end())
                line = log[start : len(log) if end < 0 else end].strip()
                findings[key] = LogFinding(row["level"], row["why"], line)
            if not row.get("each"):
                break
    return tuple(findings.values())


def _values(log: str, fact: str) -> tuple[str, ...]:
    """Return the distinct values of a fact, in the order of the patterns, then of the log."""
    patterns = load_table(__file__, "log_patterns.yaml")["facts"][fact]
    return tuple({line["value"]: None for pattern in patterns for line in re.finditer(pattern, log)})


def _first(log: str, fact: str) -> str | None:
    return next(iter(_values(log, fact)), None)


#: Lines that refer to a cause further up.
_ECHO = re.compile(
    r"root cause above|for the root cause|Engine core initialization failed|WorkerProc initialization failed"
)
#: Lines of a server whose engine process ended, for any reason.
_ENGINE_DEAD = re.compile(r"EngineDeadError|EngineCore encountered an issue")
#: Lines that mention an exception which vLLM handled.
_HARMLESS = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:DEBUG|INFO|WARNING)\s")
_ERROR = re.compile(r"(?:^|\s)(?P<error>[A-Za-z_.]*(?:Error|Exception|Interrupt)\b:? .*\S)")
_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL)\s+[\d-]+ [\d:.]+ \[[^\]]*\]\s*)?")


class Diagnosis(NamedTuple):
    """The cause of a failed start in one line, and its fix; ``name`` is the entry of `failures.yaml`, or "unknown"."""

    name: str
    message: str
    fix: str | None


def diagnose(log: str) -> Diagnosis:
    """Return why a server ended before it answered, by its log."""
    for row in load_table(__file__, "failures.yaml"):
        match = re.search(row["pattern"], log)
        if match is not None:
            groups = {name: value or "" for name, value in match.groupdict().items()}
            return Diagnosis(row["name"], row["message"].format_map(groups), row["fix"])
    return Diagnosis("unknown", _last_error(log), None)


def _last_error(log: str) -> str:
    """Return the last error in a log that is no consequence of another one, else its last three lines."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines() if not _HARMLESS.match(line)]
    errors = [match["error"] for line in lines if (match := _ERROR.search(line)) and not _ECHO.search(line)]
    if errors:
        return errors[-1]
    if _ENGINE_DEAD.search(log):
        return "its engine process ended without an error message, as when the kernel kills it for lack of memory"
    return last_lines(log, 3)


def last_lines(log: str, count: int) -> str:
    """Return the last ``count`` lines that are not empty, joined by " | ", without vLLM's prefixes."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    return " | ".join([line for line in lines if line][-count:]) or "it wrote nothing"


_TOLERANCE = 0.10
"""Relative error of the predicted KV cache up to which a plan counts as met."""


def plan_deviations(plan: LaunchPlan, scan: LogScan, *, quantization: str | None = None) -> Iterator[LogFinding]:
    """Yield a finding for each promise of the plan that the log contradicts.

    ``quantization`` is the checkpoint's method. "invalid" findings mean that another checkpoint was measured.
    """
    dtype = plan.option("--kv-cache-dtype")
    if dtype is not None and dtype.startswith("fp8") and not (scan.kv_cache_dtype or dtype).startswith("fp8"):
        yield LogFinding("invalid", "the KV cache is not FP8", _compare(dtype, scan.kv_cache_dtype))
    if quantization is not None and scan.quantization == "None":
        yield LogFinding(
            "invalid", "vLLM loaded the checkpoint as one that is not quantized", _compare(quantization, "none")
        )
    planned, logged = plan.attention_backend, scan.attention_backends
    has_log = bool(logged) or scan.vllm_version is not None
    if planned is not None and planned not in logged and has_log:
        values = _compare(planned, ", ".join(logged) or "none that the log names")
        yield LogFinding("caution", "the attention backend of the plan is not the one that runs", values)
    kernels = [*logged, *scan.kernels]
    if plan.env.get("VLLM_ROCM_USE_AITER") == "1" and kernels and not any("aiter" in name.lower() for name in kernels):
        yield LogFinding("caution", "AITER is on in the plan, but no kernel is AITER's", f"seen: {', '.join(kernels)}")
    batched = plan.option("--max-num-batched-tokens")
    if batched is not None and scan.max_num_batched_tokens not in {None, int(batched)}:
        values = _compare(batched, scan.max_num_batched_tokens)
        yield LogFinding("caution", "vLLM changed --max-num-batched-tokens, the tokens of a step", values)
    graphs = json.loads(plan.option("--compilation-config") or "{}").get("cudagraph_mode")
    if graphs is not None and scan.cudagraph_mode not in {None, graphs}:
        values = _compare(graphs, scan.cudagraph_mode)
        yield LogFinding("caution", "the graph mode of the plan is not the one that runs", values)
    if plan.memory is not None and plan.memory.kv_tokens and scan.kv_tokens is not None:
        change = scan.kv_tokens / plan.memory.kv_tokens - 1
        if abs(change) > _TOLERANCE:
            values = _compare(f"{plan.memory.kv_tokens:,} tokens", f"{scan.kv_tokens:,} ({change:+.0%})")
            yield LogFinding("caution", "the size of the KV cache differs from the plan's", values)


def checkpoint_quantization(folder: Path) -> str | None:
    """Return the quantization method of a checkpoint's config.json; None for 16 bit, or without a config.json."""
    with suppress(UserError):
        method = (declared_quantization(read_config(folder)) or {}).get("quant_method")
        return None if method is None else str(method)
    return None


def _compare(planned: object, logged: object) -> str:
    return f"planned: {planned}, seen: {logged}"
