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


class Finding(NamedTuple):
    """A line of the log that changes what a number means."""

    level: Literal["invalid", "caution"]
    why: str
    line: str


@dataclass(frozen=True, slots=True)
class LogScan:
    """Facts are None, or empty, where this version of vLLM does not say them.

    `kv_tokens` is the capacity of the KV cache in tokens, `concurrency` how many requests of full length fit it.
    """

    vllm_version: str | None
    attention_backend: str | None
    kernels: tuple[str, ...]
    quantization: str | None
    kv_cache_dtype: str | None
    kv_tokens: int | None
    concurrency: float | None
    findings: tuple[Finding, ...]

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
    document = _document()
    kv_tokens, concurrency = _first(log, "kv_tokens"), _first(log, "concurrency")
    findings: dict[str, Finding] = {}
    for row in document["findings"]:
        found = _compiled(row["pattern"]).search(log)
        if found is not None:
            start = log.rfind("\n", 0, found.start()) + 1
            end = log.find("\n", found.end())
            line = log[start : len(log) if end < 0 else end].strip()
            findings[row["pattern"]] = Finding(row["level"], row["why"], line)
    kernels = {
        found["value"]: None
        for pattern in document["facts"]["kernels"]["patterns"]
        for found in _compiled(pattern).finditer(log)
    }
    return LogScan(
        vllm_version=_first(log, "vllm_version"),
        attention_backend=_first(log, "attention_backend"),
        kernels=tuple(kernels),
        quantization=_first(log, "quantization"),
        kv_cache_dtype=_first(log, "kv_cache_dtype"),
        kv_tokens=None if kv_tokens is None else int(kv_tokens.replace(",", "")),
        concurrency=None if concurrency is None else float(concurrency),
        findings=tuple(findings.values()),
    )


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
    text = resources.files("pipeline.serving").joinpath("log_patterns.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document
