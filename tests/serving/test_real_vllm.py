"""The launcher with the real vLLM, on a model of two layers."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.errors import ServingError
from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.model.facts import model_facts
from pipeline.serving.plan import LaunchPlan
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.target import parse_target, profile
from pipeline.serving.running.launchers import LocalLauncher

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def plan_for(model: Path, version: str) -> LaunchPlan:
    return plan_serving(
        model,
        model_facts(model),
        target=parse_target("cpu"),
        profile=profile("latency", concurrency=4, max_model_len=256),
        vllm_version=version,
        purpose="measure",
        kv_cache_dtype="auto",
        cpu_threads=2,
    )


def processes_naming(model: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = str(model).encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mine:
            found.append(int(entry.name))
    return found


def test_it_answers_then_leaves_nothing(vllm: VllmEnvironment, tiny_llama: Path, tmp_path: Path):
    plan = plan_for(tiny_llama, vllm.version)
    with LocalLauncher(vllm.executable).launch(plan, tmp_path / "vllm.log", startup_timeout=400) as server:
        question = {"model": server.model_name, "prompt": "w3 w4 w5", "max_tokens": 8, "ignore_eos": True}
        request = urllib.request.Request(
            f"{server.base_url}/v1/completions",
            data=json.dumps(question).encode(),
            headers={"Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] == 8
        assert server.version().split("+")[0] == vllm.version.split("+")[0]
        scan, cache = server.scan_log(), server.cache_config()
        # 1 GiB over 2 layers, K and V, 2 heads of 64 in bfloat16; the first block is vLLM's own.
        assert scan.kv_tokens is not None
        assert scan.kv_tokens == pytest.approx((1 << 30) / (2 * 2 * 2 * 64 * 2), rel=0.01)
        assert int(cache["num_gpu_blocks"]) * int(cache["block_size"]) == pytest.approx(scan.kv_tokens, rel=0.01)
        assert scan.vllm_version == vllm.version.split("+")[0]
        assert scan.invalid == ()
        assert processes_naming(tiny_llama)
        print(f"started in {server.started_seconds:.1f} s")  # noqa: T201 - shown with -s
    deadline = time.monotonic() + 5
    while processes_naming(tiny_llama) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_naming(tiny_llama) == []


def test_a_flag_that_this_version_does_not_know(warm_vllm: VllmEnvironment, tiny_llama: Path, tmp_path: Path):
    plan = plan_for(tiny_llama, warm_vllm.version)
    wrong = LaunchPlan(plan.env, (*plan.argv, "--swap-space-gb", "4"), plan.served_model_name, 1, ())
    with (
        pytest.raises(ServingError, match="does not know --swap-space-gb"),
        LocalLauncher(warm_vllm.executable).launch(wrong, tmp_path / "vllm.log", startup_timeout=400),
    ):
        pass


def test_a_length_that_the_model_does_not_have(warm_vllm: VllmEnvironment, tiny_llama: Path, tmp_path: Path):
    plan = plan_for(tiny_llama, warm_vllm.version)
    longer = replace(plan, argv=tuple("4096" if word == "256" else word for word in plan.argv))
    with (
        pytest.raises(ServingError, match=r"target\.max_model_len is 4096, but the model ends at 512"),
        LocalLauncher(warm_vllm.executable).launch(longer, tmp_path / "vllm.log", startup_timeout=400),
    ):
        pass
