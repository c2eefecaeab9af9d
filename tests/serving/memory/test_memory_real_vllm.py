"""Tokens of the KV cache as predicted and as the real vLLM logs them, on a CPU, whose cache has a given size."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from pipeline.serving.environment import VllmEnvironment
from pipeline.serving.hardware import hardware
from pipeline.serving.launchers.local import LocalLauncher
from pipeline.serving.memory.fit import fit
from pipeline.serving.model.facts import model_facts
from pipeline.serving.plan import LaunchPlan, Layout
from tests.serving.shapes import small

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH, BATCHED, SEQUENCES = 2048, 2048, 4


# One start each: what differs is the kind of layers, which decides how the cache is cut into groups.
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        ("grouped", "auto"),
        ("grouped", "fp8"),
        ("every-head", "auto"),
        ("window", "auto"),
        ("some-windows", "auto"),
        ("latent", "auto"),
        ("delta", "auto"),
    ],
)
def test_the_cache_holds_the_tokens_that_were_predicted(
    vllm: VllmEnvironment, name: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    model = small(name, tmp_path)
    facts = model_facts(model)
    predicted = fit(
        facts,
        hardware("cpu"),
        Layout(),
        hbm_bytes=None,
        utilization=1.0,
        max_model_len=LENGTH,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BATCHED,
        kv_cache_dtype=kv_cache_dtype,
        version=vllm.version,
        cpu_kv_bytes=1 << 30,
    )
    with LocalLauncher(vllm.executable).launch(
        plan(model, kv_cache_dtype), tmp_path / "vllm.log", startup_timeout=400
    ) as server:
        logged = server.scan_log()
    print(name, kv_cache_dtype, predicted.kv_tokens, logged.kv_tokens, predicted.concurrency, logged.concurrency)  # noqa: T201
    assert logged.kv_tokens == pytest.approx(predicted.kv_tokens, rel=0.05)
    assert logged.concurrency == pytest.approx(predicted.concurrency, rel=0.05)


def plan(model: Path, kv_cache_dtype: str) -> LaunchPlan:
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    numbers = {"--max-model-len": LENGTH, "--max-num-batched-tokens": BATCHED, "--max-num-seqs": SEQUENCES}
    argv = ["vllm", "serve", str(model), "--served-model-name", "shape", "--load-format", "dummy"]
    argv += ["--dtype", "bfloat16", "--enforce-eager", "--kv-cache-dtype", kv_cache_dtype]
    for flag, number in numbers.items():
        argv += [flag, str(number)]
    return LaunchPlan(MappingProxyType(env), tuple(argv), "shape", 1, ())
