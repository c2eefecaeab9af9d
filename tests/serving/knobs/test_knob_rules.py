"""Which value each launch gets: the cases that guides or vLLM's source tell apart."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.serving.knobs.table import Fact, table, value_of

BASE: dict[str, Fact] = {
    **{"kind": "rocm", "arch": "gfx942", "nodes": 1, "vllm_version": "0.33.0", "cpu_threads": 2, "cpu_kv_gib": 1},
    **{"purpose": "serve", "profile": "throughput", "engine_concurrency": 64, "context": 8192, "max_model_len": 8192},
    **{"model_len_given": "yes", "served_model_name": "m", "trust_remote_code": "no", "speculative": "no"},
    **{"speculative_config": "", "tuned_gemms": "no", "tunableop_file": "", "family": "dense", "attention": "mha"},
    **{"hybrid": "no", "sliding": "no", "multimodal": "no", "encoder_share": 0.0, "head_dim": 128, "aiter_mla": "no"},
    **{"mm_prefix": "no", "chunked": "no", "parameters_b": 70.0, "quantization": "ptpc_fp8", "kv_cache_dtype": "auto"},
    **{"tp": 1, "pp": 1, "dp": 1, "ep": "no", "gpus": 1, "packed": 1},
}
GPT_OSS = {"family": "gpt-oss", "head_dim": 64, "sliding": "yes", "parameters_b": 117.0}
MLA = {"family": "mla", "attention": "mla", "aiter_mla": "yes", "head_dim": 192, "parameters_b": 671.0}
DSA = MLA | {"family": "dsa", "attention": "dsa", "aiter_mla": "no"}
TP8 = {"tp": 8, "gpus": 8}
DP8 = {"dp": 8, "gpus": 8, "ep": "yes"}
TWO_NODES = {"tp": 8, "pp": 2, "gpus": 16, "nodes": 2}
SHUFFLE, QUICK = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
BACKEND = "--attention-backend"
GRAPHS = "--compilation-config"
FULL, PIECEWISE = '{"cudagraph_mode": "FULL"}', '{"cudagraph_mode": "PIECEWISE"}'


def launch(version: str, **changes: Any) -> dict[str, str | None]:
    """What a launch sets: values by knob, None for flags without one."""
    facts = BASE | changes
    found = {}
    for knob in table().values():
        rule = knob.choose(facts, version)
        if rule is not None:
            found[knob.name] = value_of(rule, facts)
    return found


# (version, facts, what must be set (None: a flag without a value), what must not be set)
CASES = {
    "dense": (
        "0.33",
        {},
        {BACKEND: "ROCM_AITER_FA", "VLLM_ROCM_USE_AITER": "1", SHUFFLE: "1"},
        [],
    ),
    "few requests": ("0.33", {"engine_concurrency": 8}, {}, [SHUFFLE]),
    "windows": ("0.33", {"sliding": "yes"}, {BACKEND: "ROCM_AITER_FA"}, [SHUFFLE]),
    "a draft": ("0.33", {"speculative": "yes", "speculative_config": "{}"}, {"--speculative-config": "{}"}, [SHUFFLE]),
    "heads of 96": ("0.24", {"head_dim": 96}, {}, [BACKEND]),
    "hybrid": ("0.24", {"hybrid": "yes", "head_dim": 256}, {BACKEND: "ROCM_AITER_FA"}, [SHUFFLE]),
    "chunks": ("0.24", {"chunked": "yes"}, {BACKEND: "ROCM_ATTN"}, [SHUFFLE]),
    "calibrated cache, scales read": ("0.33", {"kv_cache_dtype": "fp8"}, {SHUFFLE: "1"}, []),
    "calibrated cache, scales taken for 1": ("0.24", {"kv_cache_dtype": "fp8"}, {BACKEND: "ROCM_AITER_FA"}, [SHUFFLE]),
    "shuffled alike on both sides": ("0.24", {"purpose": "measure"}, {BACKEND: "ROCM_AITER_FA"}, [SHUFFLE]),
    "images both ways": ("0.24", {"mm_prefix": "yes"}, {}, [BACKEND]),
    "gpt-oss": ("0.19", GPT_OSS, {BACKEND: "ROCM_AITER_UNIFIED_ATTN"}, [SHUFFLE]),
    "gpt-oss-20b offline": ("0.24", GPT_OSS | {"parameters_b": 21.0, "profile": "offline"}, {GRAPHS: FULL}, []),
    "MLA": ("0.19", MLA, {BACKEND: "ROCM_AITER_MLA"}, ["--block-size", GRAPHS]),
    "MLA with odd heads": ("0.19", MLA | {"aiter_mla": "no"}, {BACKEND: "TRITON_MLA", GRAPHS: PIECEWISE}, []),
    "MLA measured": ("0.24", MLA | {"purpose": "measure"}, {"VLLM_ROCM_USE_AITER_FP8BMM": "0"}, []),
    "MLA on gfx950": ("0.24", MLA | {"arch": "gfx950"}, {"VLLM_ROCM_USE_AITER_FP4BMM": "0"}, []),
    "MLA when both are off by themselves": (
        "0.33",
        MLA | {"arch": "gfx950", "purpose": "measure"},
        {},
        ["VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_USE_AITER_FP8BMM"],
    ),
    "DSA": ("0.24", DSA, {"--block-size": "1"}, [BACKEND]),
    "eight GPUs": ("0.24", TP8, {"--tensor-parallel-size": "8", "NCCL_MIN_NCHANNELS": "112", QUICK: "FP"}, []),
    "eight GPUs, latency": ("0.24", TP8 | {"profile": "latency"}, {"--no-async-scheduling": None}, [QUICK]),
    "eight GPUs, measured": ("0.24", TP8 | {"purpose": "measure"}, {"--no-enable-prefix-caching": None}, [QUICK]),
    "one GPU": ("0.24", {}, {}, ["NCCL_MIN_NCHANNELS", "--tensor-parallel-size", QUICK, "/dev/shm", "--shm-size"]),
    "engines": (
        "0.24",
        MLA | DP8,
        {"--all2all-backend": "allgather_reducescatter", "--disable-nccl-for-dp-synchronization": None},
        ["--tensor-parallel-size", "--distributed-executor-backend"],
    ),
    "two nodes": (
        "0.24",
        TWO_NODES,
        {"--pipeline-parallel-size": "2", "RCCL_NET_GDR_LEVEL": "2"},
        ["--nnodes", "--distributed-executor-backend"],
    ),
    "alone": ("0.24", {}, {"--gpu-memory-utilization": "0.95"}, []),
    "packed": ("0.24", {"packed": 2}, {"--gpu-memory-utilization": "0.45"}, []),
    "measured": ("0.24", {"purpose": "measure"}, {"--gpu-memory-utilization": "0.92", "--max-num-seqs": "64"}, []),
    "chat": ("0.24", {"profile": "latency"}, {"--max-num-batched-tokens": "8192", "--max-num-seqs": "256"}, []),
    "streaming": ("0.24", {"profile": "streaming"}, {"--max-num-batched-tokens": "16384"}, []),
    "offline": (
        "0.24",
        {"profile": "offline"},
        {"--max-num-batched-tokens": "32768", "--max-num-seqs": "512"},
        [GRAPHS],
    ),
    "offline 8B": ("0.24", {"profile": "offline", "parameters_b": 8.0}, {"--max-num-seqs": "2048"}, [GRAPHS]),
    "long": ("0.24", {"context": 131072}, {"--max-num-seqs": "128"}, []),
    "long, 300 at once": ("0.24", {"context": 131072, "engine_concurrency": 300}, {"--max-num-seqs": "300"}, []),
    "crowd": ("0.24", {"engine_concurrency": 5000}, {"--max-num-seqs": "5000"}, []),
    "images": ("0.24", TP8 | {"multimodal": "yes", "encoder_share": 2.0}, {"--mm-encoder-tp-mode": "data"}, []),
    "a tiny encoder": ("0.24", TP8 | {"multimodal": "yes", "encoder_share": 0.1}, {}, ["--mm-encoder-tp-mode"]),
    "AWQ": ("0.24", {"quantization": "awq"}, {"VLLM_USE_TRITON_AWQ": "1"}, ["--quantization"]),
    "tuned": (
        "0.24",
        {"tuned_gemms": "yes", "tunableop_file": "/m/t.csv"},
        {"PYTORCH_TUNABLEOP_FILENAME": "/m/t.csv", "PYTORCH_TUNABLEOP_TUNING": "0", "PYTORCH_TUNABLEOP_ENABLED": "1"},
        [],
    ),
    "FP8 cache": ("0.24", {"kv_cache_dtype": "fp8"}, {"--kv-cache-dtype": "fp8"}, []),
    "CPU": (
        "0.32",
        {"kind": "cpu", "hardware": "cpu", "arch": ""},
        {"--enforce-eager": None, "--max-num-batched-tokens": "2048", "OMP_NUM_THREADS": "2"},
        ["VLLM_ROCM_USE_AITER", "--gpu-memory-utilization", "numa_balancing", "--ipc=host"],
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


@pytest.mark.parametrize("version", ["0.19.0", "0.23.0", "0.28.0", "0.33.0"])
def test_nothing_that_a_version_lacks_is_set(version: str) -> None:
    for changes in (*(case[1] for case in CASES.values()), {"profile": "latency"}, {"purpose": "measure"}):
        assert all(table()[name].known(tuple(map(int, version.split(".")))) for name in launch(version, **changes))


def test_a_step_holds_a_token_of_every_sequence() -> None:
    for profile in ("latency", "streaming", "throughput", "offline"):
        for requests in (1, 64, 512, 3000, 9000):
            for kind in ("rocm", "cpu"):
                got = launch("0.33", profile=profile, engine_concurrency=requests, kind=kind, parameters_b=8.0)
                assert int(got["--max-num-batched-tokens"] or 0) >= int(got["--max-num-seqs"] or 0) >= min(requests, 1)
