"""One cell of a workload, measured by `vllm bench serve`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.errors import MeasurementError
from eval.workloads import Cell

LATENCIES = ("ttft", "tpot", "itl", "e2el")


def command(
    vllm: str | Path,
    cell: Cell,
    *,
    base_url: str,
    model: str | Path,
    served_model_name: str,
    result: Path,
    seed: int = 0,
) -> list[str]:
    """Argument list that measures one cell and writes its JSON to `result`.

    `vllm` is the executable of the serving environment, `base_url` the server without `/v1`, `model` the folder that
    the tokenizer is read from. Use the same seed on both sides: it fixes the random prompts.
    """
    return [
        str(vllm), "bench", "serve",
        "--backend", "vllm",
        "--base-url", base_url.rstrip("/"),
        "--model", str(model),
        "--served-model-name", served_model_name,
        "--dataset-name", "random",
        "--random-input-len", str(cell.input_len),
        "--random-output-len", str(cell.output_len),
        "--num-prompts", str(cell.num_prompts),
        "--max-concurrency", str(cell.concurrency),
        "--num-warmups", str(cell.warmups),
        "--ignore-eos",
        "--temperature", "0",
        "--seed", str(seed),
        "--percentile-metrics", ",".join(LATENCIES),
        "--metric-percentiles", "50,99",
        "--disable-tqdm",
        "--save-result",
        "--result-dir", str(result.parent),
        "--result-filename", result.name,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell on one launch of a server.

    `duration` is in seconds, throughputs in tokens per second over all requests, latencies in milliseconds: time to
    first token (ttft), time per output token after the first (tpot), gap between tokens (itl), whole request (e2el).
    """

    cell: str
    completed: int
    failed: int
    duration: float
    output_throughput: float
    total_throughput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    e2el_p50: float
    e2el_p99: float

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellResult:
        """Read back what `to_json` wrote; `MeasurementError` where a field is missing or unknown."""
        try:
            return cls(**data)
        except TypeError as error:
            raise MeasurementError(f"not the result of a cell: {error}") from error


def read(result: Path, cell: Cell, *, log: Path | None = None) -> CellResult:
    """Read the JSON that `vllm bench serve` saved for a cell; `log` is what it printed, which says why requests failed.

    Raises `MeasurementError` where requests failed, where fewer completed than were sent, where answers are shorter
    than the cell asks for, or where a number is missing: throughput of a partial load is not comparable.
    """
    try:
        data = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{result}: no benchmark result: {error}") from error
    completed, failed = int(_number(result, data, "completed")), int(data.get("failed") or 0)
    if failed or completed != cell.num_prompts:
        raise MeasurementError(
            f"{result}: cell {cell.name}: {completed} of {cell.num_prompts} requests completed, {failed} failed"
            + _reason(log)
        )
    tokens = int(_number(result, data, "total_output_tokens"))
    if tokens != cell.num_prompts * cell.output_len:
        raise MeasurementError(
            f"{result}: cell {cell.name}: {tokens} tokens came back, expected {cell.num_prompts * cell.output_len}"
        )
    latency = {
        f"{name}_p{percent}": _number(result, data, f"p{percent}_{name}_ms")
        for name in LATENCIES
        for percent in (50, 99)
    }
    return CellResult(
        cell=cell.name,
        completed=completed,
        failed=failed,
        duration=_number(result, data, "duration"),
        output_throughput=_number(result, data, "output_throughput"),
        total_throughput=_number(result, data, "total_token_throughput"),
        **latency,
    )


def _reason(log: Path | None) -> str:
    """The last line of the first failure that vLLM's client prints: most are tracebacks."""
    text = "" if log is None or not log.exists() else log.read_text(encoding="utf-8", errors="replace")
    _, found, rest = text.rpartition("\nError 0: ")
    first = re.split(r"\n(?:Error 1: |=====)", rest, maxsplit=1)[0].strip()
    return f": {first.splitlines()[-1].strip()[:300]}" if found and first else ""


def _number(path: Path, data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MeasurementError(f"{path}: {key!r} must be a number, found {value!r}")
    return float(value)
