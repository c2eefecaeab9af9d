"""The forecast of a load on a server, held against launches that were measured on an H100."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from quantmint.eval.workloads import Cell
from quantmint.pipeline.stages.bench import _request_seconds
from quantmint.pipeline.stages.estimate import TOKEN_S, Estimate
from quantmint.pipeline.stages.rates import known

MEASURED = Path(__file__).parents[3] / "docs" / "bench-throughput-h100.json"
_8B = SimpleNamespace(source=16_060_522_496, parameters=8_030_261_248, active=8_030_261_248, kv_bytes_per_token=131_072)


def estimate(hardware: str = "h100", gpus: int = 1, *, eager: bool = False, **sizes: Any) -> Estimate:
    target = SimpleNamespace(hardware=hardware, gpus=gpus)
    serve = SimpleNamespace(knobs={"--enforce-eager": True} if eager else {})
    recipe = SimpleNamespace(target=target, evaluation=SimpleNamespace(runtime="vllm"), serve=serve)
    size: Any = SimpleNamespace(**{**vars(_8B), **sizes})
    setting: Any = SimpleNamespace(recipe=recipe)
    return Estimate(setting, size, known("two-cores" if hardware == "cpu" else "h100"), {}, {}, None)


@pytest.mark.parametrize("in_flight", [64, 256])
def test_requests_take_what_they_took(in_flight: int) -> None:
    """An 8B shape in bf16 on five H100: a model of prompts read, and of weights and cache read for each token."""
    machines = json.loads(MEASURED.read_text())["machines"]
    name = f"in256-out128-c{in_flight}"
    speeds = [
        launch["cells"][name]["output_throughput"]
        for machine in machines
        for side, launches in machine["launches"].items()
        for launch in launches
        if side.startswith("bf16")
    ]
    cell = Cell(name, 256, 128, in_flight, 10 * in_flight, 2 * in_flight)
    assert 0.9 * 128 / _request_seconds(cell, estimate()) == pytest.approx(median(speeds), rel=0.15)


def test_prompts_and_answers_add_up() -> None:
    short = Cell("c", 256, 128, 64, 640, 128)
    one = _request_seconds(short, estimate())
    more_to_read = _request_seconds(replace(short, input_len=2048), estimate(kv_bytes_per_token=0))
    assert more_to_read - _request_seconds(short, estimate(kv_bytes_per_token=0)) == pytest.approx(
        0.9 * 1792 * estimate().token
    )
    assert _request_seconds(replace(short, output_len=256), estimate()) > one
    assert _request_seconds(short, estimate(gpus=2)) == pytest.approx(one / 2)
    assert _request_seconds(short, estimate(active=_8B.active // 4)) < one


def test_a_launch_without_graphs_starts_sooner_and_waits_for_its_host() -> None:
    graphs, eager = estimate(), estimate(eager=True)
    assert eager.start < graphs.start
    assert eager.answer_step(1, 300) == pytest.approx(0.02 + graphs.answer_step(1, 300))
    assert estimate("cpu", eager=True).answer_step(1, 300) == estimate("cpu").answer_step(1, 300)


def test_a_gpu_without_a_data_sheet_and_a_cpu() -> None:
    assert estimate("cuda").answer_step(64, 300) == TOKEN_S
    cpu = estimate("cpu")
    assert cpu.cached_start < estimate().cached_start
    assert cpu.answer_step(64, 300) == pytest.approx(0.005 + _8B.source / cpu.rates.read)
