"""One cell of a workload by `vllm bench serve`: its command line, and what it saved.

Options as of vLLM 0.11 to 0.33. `--num-warmups` came with 0.11.1, until when a run of its own warms up;
`--custom-skip-chat-template` lost its first word then; answers as long as a file's `output_tokens` came with 0.14.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.bench import CellResult
from eval.errors import MeasurementError
from eval.prompt_files import PromptFile
from eval.workloads import Cell

LATENCIES = ("ttft", "tpot", "itl", "e2el")
RUNS = "Starting main benchmark run..."
"""What the client prints when its warm-up is over and every measured request is about to be sent."""
_WARMS_UP, _ONE_NAME, _LENGTHS_OF_FILE = (0, 11, 1), (0, 11, 1), (0, 14)


def command(
    vllm: str | Path,
    cell: Cell,
    *,
    version: str,
    base_url: str,
    model: str | Path,
    served_model_name: str,
    result: Path,
    seed: int = 0,
) -> list[str]:
    """Argument list that measures one cell and writes its JSON to `result`.

    `vllm` is the executable of the serving environment and `version` its version, `base_url` the server without `/v1`,
    `model` the folder that the tokenizer is read from. `seed` fixes the prompts and when they arrive: the same on both
    sides. Raises `MeasurementError` for what this version cannot do.
    """
    number = _number_of(version)
    argv = [
        str(vllm), "bench", "serve",
        "--backend", "vllm",
        "--base-url", base_url.rstrip("/"),
        "--model", str(model),
        "--served-model-name", served_model_name,
        *_prompts(cell, number),
        "--num-prompts", str(cell.num_prompts),
        "--temperature", "0",
        "--seed", str(seed),
        "--percentile-metrics", ",".join(LATENCIES),
        "--metric-percentiles", "50,99",
        "--disable-tqdm",
        "--save-result",
        "--result-dir", str(result.parent),
        "--result-filename", result.name,
    ]  # fmt: skip
    if number >= _WARMS_UP:
        argv += ["--num-warmups", str(cell.warmups)]
    if cell.concurrency is not None:
        argv += ["--max-concurrency", str(cell.concurrency)]
    if cell.rate is not None:
        argv += ["--request-rate", str(cell.rate)]
    if cell.ignore_eos:
        argv += ["--ignore-eos"]
    if cell.goodput:
        argv += ["--goodput", *(f"{name}:{limit}" for name, limit in cell.goodput)]
    return argv


def warm_up(cell: Cell, version: str) -> Cell | None:
    """What has to run before a cell, and be thrown away, where this version does not warm up by itself."""
    if cell.warmups == 0 or _number_of(version) >= _WARMS_UP:
        return None
    return replace(cell, num_prompts=cell.warmups, warmups=0, rate=None, goodput=())


def _prompts(cell: Cell, version: tuple[int, ...]) -> list[str]:
    if cell.file is None:
        return [
            "--dataset-name", "random",
            "--random-input-len", str(cell.input_len),
            "--random-output-len", str(cell.output_len),
        ]  # fmt: skip
    # A prompt that comes twice would be half a measurement of a cache: too few of them is an error of its own.
    argv = ["--dataset-path", str(cell.file.path), "--no-oversample"]
    if cell.file.kind == "sharegpt":
        length = [] if cell.output_len is None else ["--sharegpt-output-len", str(cell.output_len)]
        return ["--dataset-name", "sharegpt", *argv, *length]
    return ["--dataset-name", "custom", *argv, *_custom(cell, cell.file, version)]


def _custom(cell: Cell, file: PromptFile, version: tuple[int, ...]) -> list[str]:
    if cell.output_len is None and version < _LENGTHS_OF_FILE:
        raise MeasurementError(
            f"cell {cell.name}: vLLM {'.'.join(map(str, version))} does not take the length of an answer from "
            f"{file.path}: expected 0.14 or later, or an output_len"
        )
    plain = "--skip-chat-template" if version >= _ONE_NAME else "--custom-skip-chat-template"
    return [
        "--custom-output-len", str(-1 if cell.output_len is None else cell.output_len),
        *([] if file.chat_template else [plain]),
    ]  # fmt: skip


def read(result: Path, cell: Cell, *, gpus: int = 1, log: Path | None = None) -> CellResult:
    """Read the JSON that `vllm bench serve` saved for a cell on a server of `gpus` accelerators.

    `log` is what it printed, which says why requests failed. Raises `MeasurementError` where requests failed, where
    fewer completed than were asked for, where answers are shorter than the cell says, or where a number is missing:
    throughput of a partial load is not comparable.
    """
    try:
        data = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{result}: no benchmark result: {error}") from error
    completed, failed = int(_number(result, data, "completed")), int(data.get("failed") or 0)
    if failed or completed != cell.num_prompts:
        few = "" if failed or cell.file is None else f"; {cell.file.path} has no more that vLLM takes"
        raise MeasurementError(
            f"{result}: cell {cell.name}: {completed} of {cell.num_prompts} requests completed, {failed} failed"
            + (few or _reason(log))
        )
    tokens = int(_number(result, data, "total_output_tokens"))
    if cell.output_tokens is not None and tokens != cell.output_tokens:
        raise MeasurementError(f"{result}: cell {cell.name}: {tokens} tokens came back, expected {cell.output_tokens}")
    latency = {
        f"{name}_p{percent}": _number(result, data, f"p{percent}_{name}_ms")
        for name in LATENCIES
        for percent in (50, 99)
    }
    peak = _optional(result, data, "max_concurrent_requests")
    return CellResult.from_json(
        {
            "cell": cell.name,
            "completed": completed,
            "failed": failed,
            "duration": _number(result, data, "duration"),
            "output_throughput": _number(result, data, "output_throughput"),
            "total_throughput": _number(result, data, "total_token_throughput"),
            **latency,
            "gpus": gpus,
            "concurrency": cell.concurrency,
            "request_rate": cell.rate,
            "requests_per_second": _optional(result, data, "request_throughput"),
            "goodput": _number(result, data, "request_goodput") if cell.goodput else None,
            "peak_concurrency": None if peak is None else int(peak),
            "peak_output_throughput": _optional(result, data, "max_output_tokens_per_s"),
        }
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


def _optional(path: Path, data: Mapping[str, Any], key: str) -> float | None:
    return None if data.get(key) is None else _number(path, data, key)


def _number_of(version: str) -> tuple[int, ...]:
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if found is None:
        raise MeasurementError(f"{version!r} is not a version of vLLM: expected something like 0.32.0")
    return tuple(int(part) for part in found[1].split("."))
