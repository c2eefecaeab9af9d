"""One cell of a workload by `vllm bench serve`: its command line, and what it saved.

The options are those of vLLM 0.19 to 0.33.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from quantmint.eval.errors import MeasurementError
from quantmint.eval.measurements import CellResult
from quantmint.eval.workloads import SPREAD, Cell

WORDS = ("bench", "serve")
LATENCIES = ("ttft", "tpot", "itl", "e2el")
RUNS = "Starting main benchmark run..."
"""What the client prints when every measured request is about to be sent."""


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
    """Return the argument list that measures one cell and writes its JSON to `result`.

    `vllm` is the executable of the serving environment, `base_url` the server without `/v1`, `model` the folder of the
    tokenizer, `served_model_name` the model's name in requests. `seed` fixes the prompts and their arrival times, and
    is the same on both sides.
    """
    argv = [
        str(vllm), *WORDS,
        "--backend", "vllm",
        "--base-url", base_url.rstrip("/"),
        "--model", str(model),
        "--served-model-name", served_model_name,
        *_prompts(cell),
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
    if cell.concurrency is not None:
        argv += ["--max-concurrency", str(cell.concurrency)]
    if cell.rate is not None:
        argv += ["--request-rate", str(cell.rate)]
    if cell.ignore_eos:
        argv += ["--ignore-eos"]
    if cell.goodput:
        argv += ["--goodput", *(f"{name}:{limit}" for name, limit in cell.goodput)]
    return argv


def _prompts(cell: Cell) -> list[str]:
    if cell.file is None:
        means = cell.mean_lengths or (cell.input_len, cell.output_len)
        return [
            "--dataset-name", "random",
            "--random-input-len", str(means[0]),
            "--random-output-len", str(means[1]),
            *(() if cell.mean_lengths is None else ("--random-range-ratio", str(SPREAD))),
        ]  # fmt: skip
    # A prompt that comes twice would be half a measurement of a cache: too few of them is an error of its own.
    argv = ["--dataset-path", str(cell.file.path), "--no-oversample"]
    if cell.file.kind == "sharegpt":
        length = [] if cell.output_len is None else ["--sharegpt-output-len", str(cell.output_len)]
        return ["--dataset-name", "sharegpt", *argv, *length]
    length = ["--custom-output-len", str(-1 if cell.output_len is None else cell.output_len)]  # -1: as the file says
    plain = [] if cell.file.chat_template else ["--skip-chat-template"]
    return ["--dataset-name", "custom", *argv, *length, *plain]


def read(result: Path, cell: Cell, *, gpus: int = 1, log: Path | None = None) -> CellResult:
    """Read the JSON that `vllm bench serve` saved for a cell on a server of `gpus` accelerators.

    `log` is the client's output, from which the message quotes why requests failed. Raises `MeasurementError` if
    requests failed or are missing, if the answers have fewer or more tokens than the cell says, or if a number is
    missing: throughput of a partial load is not comparable.
    """
    try:
        data = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{result}: no benchmark result: {error}") from error
    completed, failed = data.get("completed"), data.get("failed") or 0
    if failed or completed != cell.num_prompts:
        few = "" if failed or cell.file is None else f"; {cell.file.path} has no more that vLLM takes"
        raise MeasurementError(
            f"{result}: cell {cell.name}: {completed} of {cell.num_prompts} requests completed, {failed} failed"
            + (few or _reason(log))
        )
    tokens = data.get("total_output_tokens")
    if cell.output_tokens is not None and not cell.output_tokens[0] <= (tokens or 0) <= cell.output_tokens[1]:
        expected = " to ".join(map(str, dict.fromkeys(cell.output_tokens)))
        raise MeasurementError(f"{result}: cell {cell.name}: {tokens} tokens came back, expected {expected}")
    goodput = data.get("request_goodput") if cell.goodput else None
    if cell.goodput and goodput is None:
        raise MeasurementError(f"{result}: no 'request_goodput'")
    try:
        return CellResult.from_json(
            {
                "cell": cell.name,
                "completed": completed,
                "failed": failed,
                "duration": data["duration"],
                "output_throughput": data["output_throughput"],
                "total_throughput": data["total_token_throughput"],
                **{f"{name}_p{at}": data[f"p{at}_{name}_ms"] for name in LATENCIES for at in (50, 99)},
                "gpus": gpus,
                "concurrency": cell.concurrency,
                "request_rate": cell.rate,
                "requests_per_second": data.get("request_throughput"),
                "goodput": goodput,
                "peak_output_throughput": data.get("max_output_tokens_per_s"),
            }
        )
    except KeyError as error:
        raise MeasurementError(f"{result}: no {error}") from error
    except MeasurementError as error:
        raise MeasurementError(f"{result}: {error}") from error


def _reason(log: Path | None) -> str:
    """Return ": " and the last line of the first failure in the client's log; "" without a failure."""
    text = "" if log is None or not log.exists() else log.read_text(encoding="utf-8", errors="replace")
    _, found, rest = text.rpartition("\nError 0: ")
    first = re.split(r"\n(?:Error 1: |=====)", rest, maxsplit=1)[0].strip()
    return f": {first.splitlines()[-1].strip()[:300]}" if found and first else ""
