"""Which value a launch gets: the cases that guides or vLLM's source tell apart and no golden plan shows."""

from __future__ import annotations

from typing import Any

import pytest

from quantmint.pipeline.serving.environment import parse_version
from quantmint.pipeline.serving.knobs.table import Fact, table, value_of

BASE: dict[str, Fact] = {
    **{"kind": "rocm", "arch": "gfx942", "nodes": 1, "vllm_version": "0.33.0", "cpu_threads": 2, "cpu_kv_gib": 1},
    **{"purpose": "serve", "profile": "throughput", "engine_concurrency": 64, "context": 8192, "max_model_len": 8192},
    **{"model_len_given": "yes", "served_model_name": "m", "trust_remote_code": "no", "speculative": "no"},
    **{"speculative_config": "", "tuned_gemms": "no", "tunableop_file": "", "family": "dense", "attention": "mha"},
    **{"hybrid": "no", "sliding": "no", "multimodal": "no", "encoder_share": 0.0, "head_dim": 128, "aiter_mla": "no"},
    **{"mm_prefix": "no", "chunked": "no", "parameters_b": 70.0, "quantization": "ptpc_fp8", "kv_cache_dtype": "auto"},
    **{"tp": 1, "pp": 1, "dp": 1, "ep": "no", "gpus": 1, "packed": 1, "quick_reduce": "NONE", "quick_reduce_mb": 256},
}
GPT_OSS = {"family": "gpt-oss", "head_dim": 64, "sliding": "yes", "parameters_b": 117.0}
MLA = {"family": "mla", "attention": "mla", "aiter_mla": "yes", "head_dim": 192, "parameters_b": 671.0}
TP8 = {"tp": 8, "gpus": 8}
SHUFFLE, QUICK = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
BACKEND = "--attention-backend"
GRAPHS = "--compilation-config"
FULL, PIECEWISE = '{"cudagraph_mode": "FULL"}', '{"cudagraph_mode": "PIECEWISE"}'


def launch(version: str, **changes: Any) -> dict[str, str | None]:
    """What a launch sets: values by knob, None for flags without one."""
    facts = BASE | changes
    found = {}
    for knob in table().values():
        rule = knob.choose(facts, parse_version(version))
        if rule is not None:
            found[knob.name] = value_of(rule, facts)
    return found


# (version, facts, what must be set (None: a flag without a value), what must not be set)
CASES = {
    "few requests": ("0.33", {"engine_concurrency": 8}, {}, [SHUFFLE]),
    "heads of 96": ("0.24", {"head_dim": 96}, {}, [BACKEND]),
    "calibrated cache, scales read": ("0.33", {"kv_cache_dtype": "fp8"}, {SHUFFLE: "1"}, []),
    "calibrated cache, scales taken for 1": ("0.24", {"kv_cache_dtype": "fp8"}, {BACKEND: "ROCM_AITER_FA"}, [SHUFFLE]),
    "shuffled alike on both sides": ("0.24", {"purpose": "measure"}, {BACKEND: "ROCM_AITER_FA"}, [SHUFFLE]),
    "images both ways": ("0.24", {"mm_prefix": "yes"}, {}, [BACKEND]),
    "gpt-oss-20b offline": ("0.24", GPT_OSS | {"parameters_b": 21.0, "profile": "offline"}, {GRAPHS: FULL}, []),
    "MLA with odd heads": ("0.19", MLA | {"aiter_mla": "no"}, {BACKEND: "TRITON_MLA", GRAPHS: PIECEWISE}, []),
    "MLA measured": ("0.24", MLA | {"purpose": "measure"}, {"VLLM_ROCM_USE_AITER_FP8BMM": "0"}, []),
    "MLA on gfx950": ("0.24", MLA | {"arch": "gfx950"}, {"VLLM_ROCM_USE_AITER_FP4BMM": "0"}, []),
    "MLA when both are off by themselves": (
        "0.33",
        MLA | {"arch": "gfx950", "purpose": "measure"},
        {},
        ["VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_USE_AITER_FP8BMM"],
    ),
    "eight GPUs, latency": ("0.24", TP8 | {"profile": "latency"}, {"--no-async-scheduling": None}, [QUICK]),
    "eight GPUs, measured": ("0.24", TP8 | {"purpose": "measure"}, {"--no-enable-prefix-caching": None}, [QUICK]),
    "one GPU": ("0.24", {}, {}, ["NCCL_MIN_NCHANNELS", "--tensor-parallel-size", QUICK, "/dev/shm", "--shm-size"]),
    "measured": ("0.24", {"purpose": "measure"}, {"--gpu-memory-utilization": "0.92", "--max-num-seqs": "64"}, []),
    "offline 8B": ("0.24", {"profile": "offline", "parameters_b": 8.0}, {"--max-num-seqs": "2048"}, [GRAPHS]),
    "long": ("0.24", {"context": 131072}, {"--max-num-seqs": "128"}, []),
    "long, 300 at once": ("0.24", {"context": 131072, "engine_concurrency": 300}, {"--max-num-seqs": "300"}, []),
    "crowd": ("0.24", {"engine_concurrency": 5000}, {"--max-num-seqs": "5000"}, []),
    "a tiny encoder": ("0.24", TP8 | {"multimodal": "yes", "encoder_share": 0.1}, {}, ["--mm-encoder-tp-mode"]),
    "AWQ": ("0.24", {"quantization": "awq"}, {"VLLM_USE_TRITON_AWQ": "1"}, ["--quantization"]),
    "tuned": (
        "0.24",
        {"tuned_gemms": "yes", "tunableop_file": "/m/t.csv"},
        {"PYTORCH_TUNABLEOP_FILENAME": "/m/t.csv", "PYTORCH_TUNABLEOP_TUNING": "0", "PYTORCH_TUNABLEOP_ENABLED": "1"},
        [],
    ),
    "NVIDIA": (
        "0.32",
        {"kind": "cuda", "hardware": "h100", "arch": ""},
        {"--gpu-memory-utilization": "0.92", "image": "vllm/vllm-openai:v0.33.0", "--gpus": "all"},
        [BACKEND, "VLLM_ROCM_USE_AITER", "--max-num-batched-tokens", "/dev/kfd", "--device=/dev/kfd"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_launches(case: tuple[str, dict[str, Fact], dict[str, str | None], list[str]]) -> None:
    version, changes, must, must_not = case
    got = launch(version, **changes)
    assert {name: got.get(name, "not set") for name in must} == must
    assert not set(must_not) & got.keys()


def test_a_step_holds_a_token_of_every_sequence() -> None:
    for profile in ("latency", "streaming", "throughput", "offline"):
        for requests in (1, 64, 512, 3000, 9000):
            for kind in ("rocm", "cpu"):
                got = launch("0.33", profile=profile, engine_concurrency=requests, kind=kind, parameters_b=8.0)
                assert int(got["--max-num-batched-tokens"] or 0) >= int(got["--max-num-seqs"] or 0) >= min(requests, 1)
