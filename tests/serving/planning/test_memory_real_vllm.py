"""Tokens of the KV cache as predicted and as the real vLLM logs them, on a CPU, whose cache has a given size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.serving.environment import VllmEnvironment
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.plan import ParallelLayout
from quantmint.pipeline.serving.planning.memory import EngineSettings, estimate_memory
from quantmint.pipeline.serving.running.log import scan_log
from tests.serving.shapes import small

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH, BATCHED, SEQUENCES = 2048, 2048, 4
SCRIPT = Path(__file__).with_name("vllm_engines.py")
PROCESSOR = Path("/proc/cpuinfo").read_text(encoding="utf-8")
# What differs is the kind of layers, which decides how the cache is cut into groups.
CASES = (
    ("grouped", "auto"),
    *([("grouped", "fp8")] if "avx512f" in PROCESSOR else []),  # vLLM's CPU build keeps no FP8 cache without AVX-512
    ("every-head", "auto"),
    ("window", "auto"),
    ("some-windows", "auto"),
    ("latent", "auto"),
    *([("delta", "auto")] if "avx512_bf16" in PROCESSOR else []),  # else its states are in 16 bit
)


@pytest.fixture(scope="module")
def logs(
    warm_vllm: VllmEnvironment, warm_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """What the engine of each case says when it is made, all by one process; a whole server is `test_embedded`'s."""
    place = tmp_path_factory.mktemp("engines")
    found = {case: place / f"{'-'.join(case)}.log" for case in CASES}
    launches = [{"argv": arguments(small(name, place), dtype), "log": str(log)} for (name, dtype), log in found.items()]
    done = subprocess.run(
        [str(warm_vllm.python), str(SCRIPT)],
        input=json.dumps(launches),
        env=warm_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    codes = json.loads(done.stdout.splitlines()[-1])
    failed = [log.read_text()[-2000:] for log, code in zip(found.values(), codes, strict=True) if code != 0]
    assert not failed, failed[0]
    return found


@pytest.mark.parametrize(("name", "kv_cache_dtype"), CASES)
def test_the_cache_holds_the_tokens_that_were_predicted(
    vllm: VllmEnvironment, logs: dict[tuple[str, str], Path], name: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    engine = EngineSettings(
        vllm_version=vllm.version,
        utilization=1.0,
        max_model_len=LENGTH,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=BATCHED,
        kv_cache_dtype=kv_cache_dtype,
        cpu_kv_bytes=1 << 30,
    )
    predicted = estimate_memory(model_facts(small(name, tmp_path)), hardware("cpu"), ParallelLayout(), engine)
    logged = scan_log(logs[name, kv_cache_dtype].read_text())
    print(name, kv_cache_dtype, predicted.kv_tokens, logged.kv_tokens, predicted.concurrency, logged.concurrency)  # noqa: T201
    assert logged.kv_tokens == pytest.approx(predicted.kv_tokens, rel=0.05)
    assert logged.concurrency == pytest.approx(predicted.concurrency, rel=0.05)


def arguments(model: Path, kv_cache_dtype: str) -> list[str]:
    numbers = {"--max-model-len": LENGTH, "--max-num-batched-tokens": BATCHED, "--max-num-seqs": SEQUENCES}
    argv = ["vllm", "serve", str(model), "--served-model-name", "shape", "--load-format", "dummy"]
    argv += ["--dtype", "bfloat16", "--enforce-eager", "--kv-cache-dtype", kv_cache_dtype]
    for flag, number in numbers.items():
        argv += [flag, str(number)]
    return argv
