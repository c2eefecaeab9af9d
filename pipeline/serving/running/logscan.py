"""What a server's log says about a measurement: facts that were really chosen, lines that make numbers void.

::

    scan = scan_log(server.log_path.read_text())
    if scan.invalid: ...            # e.g. KV scales that defaulted to 1.0
    scan.kv_tokens, scan.attention_backend

Patterns are data, in `log_patterns.yaml`, each with what it means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

import yaml

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
    that layers run on, by the names of --attention-backend; "A|B" where the line leaves open which. The sizes are those
    that the engine says it has, not those it was asked for.
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
    backends, data = _backends(log), _number(log, "data_parallel")
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
    for row in _document()["findings"]:
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


def _backends(log: str) -> tuple[str, ...]:
    """Attention backends in the order in which the log names them, old spellings by today's names."""
    found: dict[str, int] = {}
    for pattern in _document()["facts"]["attention_backend"]["patterns"]:
        for line in _compiled(pattern).finditer(log):
            found.setdefault(line["value"], line.start())
    spoken: set[int] = set()
    for row in _document()["backends"]:
        for line in _compiled(row["pattern"]).finditer(log):
            if line.end() not in spoken:  # a row further up knew the line better
                spoken.add(line.end())
                found.setdefault("|".join(row["backends"]), line.start())
    return tuple(sorted(found, key=lambda name: found[name]))


def _every(log: str, fact: str) -> tuple[str, ...]:
    """Distinct values, in the order of the patterns, then of the log."""
    found = {
        line["value"]: None
        for pattern in _document()["facts"][fact]["patterns"]
        for line in _compiled(pattern).finditer(log)
    }
    return tuple(found)


def _number(log: str, fact: str) -> int | None:
    value = _first(log, fact)
    return None if value is None else int(value)


def _first(log: str, fact: str) -> str | None:
    for pattern in _document()["facts"][fact]:
        found = _compiled(pattern).search(log)
        if found is not None:
            return found["value"]
    return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@cache
def _document() -> dict[str, Any]:
    text = resources.files("pipeline.serving.running").joinpath("log_patterns.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document
