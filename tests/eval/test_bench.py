"""Benchmark results: read whole or not at all, then compared by medians over launches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eval import bench, throughput
from eval.bench import CellResult
from eval.errors import MeasurementError
from eval.workloads import Cell

CELL = Cell("c4", 64, 32, 4, 32, 4)
# The keys that vLLM 0.32 saved for this cell, values rounded.
SAVED: dict[str, Any] = {
    "backend": "vllm", "num_prompts": 32, "max_concurrency": 4, "duration": 46.23, "completed": 32, "failed": 0,
    "total_input_tokens": 2079, "total_output_tokens": 1024, "request_throughput": 0.692, "request_goodput": None,
    "output_throughput": 22.15, "total_token_throughput": 67.12, "max_output_tokens_per_s": 124.0,
    **{
        f"{statistic}_{name}_ms": base * factor
        for name, base in (("ttft", 454.7), ("tpot", 97.1), ("itl", 35.95), ("e2el", 3340.1))
        for statistic, factor in (("mean", 1.1), ("median", 1.0), ("std", 0.5), ("p50", 1.0), ("p99", 4.0))
    },
}  # fmt: skip


def save(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "c4.json"
    path.write_text(json.dumps(SAVED | changes))
    return path


def test_reads_what_vllm_saved(tmp_path: Path) -> None:
    result = bench.read(save(tmp_path), CELL)
    assert (result.completed, result.failed, result.duration) == (32, 0, 46.23)
    assert (result.output_throughput, result.total_throughput) == (22.15, 67.12)
    assert (result.ttft_p50, result.e2el_p99) == (454.7, 4 * 3340.1)
    assert CellResult.from_json(json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failed": 1, "completed": 31}, "31 of 32 requests completed, 1 failed"),
        ({"completed": 30}, "30 of 32 requests completed, 0 failed"),
        ({"total_output_tokens": 1000}, "1000 tokens came back, expected 1024"),
        ({"p99_itl_ms": None}, "'p99_itl_ms' must be a number, found None"),
        ({"output_throughput": float("nan")}, "'output_throughput' must be a number, found nan"),
    ],
)
def test_a_partial_load_is_not_a_measurement(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        bench.read(save(tmp_path, **changes), CELL)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("Error 0: Bad Request\nError 1: other\n", "1 failed: Bad Request"),
        (
            "\nError 0: Traceback (most recent call last):\n  File x\naiohttp.ServerDisconnectedError: gone\n"
            "============ Serving Benchmark Result ============\nFailed requests: 1\n",
            "1 failed: aiohttp.ServerDisconnectedError: gone",
        ),
        ("nothing of the kind\n", "1 failed"),
    ],
)
def test_lost_requests_say_why(tmp_path: Path, printed: str, words: str) -> None:
    log = tmp_path / "c4.log"
    log.write_text(f"Failed requests during benchmark run detected (capping to 10):\n{printed}")
    with pytest.raises(MeasurementError) as caught:
        bench.read(save(tmp_path, failed=1, completed=31), CELL, log=log)
    assert str(caught.value).endswith(words)


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no benchmark result"):
        bench.read(tmp_path / "none.json", CELL)


def test_command_carries_every_field_of_the_cell(tmp_path: Path) -> None:
    argv = bench.command(
        "vllm", CELL, base_url="http://h:1/", model="m", served_model_name="n", result=tmp_path / "r.json", seed=7
    )
    flags = {argv[i]: argv[i + 1] for i in range(3, len(argv) - 1) if argv[i].startswith("--")}
    wanted = {
        "--random-input-len": "64", "--random-output-len": "32", "--max-concurrency": "4", "--num-prompts": "32",
        "--num-warmups": "4", "--seed": "7", "--base-url": "http://h:1", "--result-dir": str(tmp_path),
        "--result-filename": "r.json",
    }  # fmt: skip
    assert wanted.items() <= flags.items()
    assert argv[:3] == ["vllm", "bench", "serve"]


def launches(tmp_path: Path, *speeds: float) -> list[CellResult]:
    base = bench.read(save(tmp_path), CELL)
    return [dataclasses.replace(base, output_throughput=speed, ttft_p50=1000 / speed) for speed in speeds]


def test_ratio_of_medians_over_launches(tmp_path: Path) -> None:
    result = throughput.compare(launches(tmp_path, 100, 101, 5), launches(tmp_path, 130, 120, 900))
    assert (result.baseline, result.candidate, result.ratio) == (100, 130, 1.3)
    assert result.launches == (3, 3)
    assert result.latency["ttft_p50"] == pytest.approx((10, 1000 / 130))
    assert throughput.Throughput.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_sides_that_cannot_be_compared(tmp_path: Path) -> None:
    one = launches(tmp_path, 100)
    with pytest.raises(MeasurementError, match="1 baseline, 0 candidate"):
        throughput.compare(one, [])
    with pytest.raises(MeasurementError, match="cannot be compared"):
        throughput.compare(one, [dataclasses.replace(one[0], cell="c8")])
    with pytest.raises(MeasurementError, match="output throughput is 0"):
        throughput.compare([dataclasses.replace(one[0], output_throughput=0.0)], one)
