"""Logs against plans. The CPU's log is a real one; those of ROCm are made from the texts in vLLM's sources."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quantmint.pipeline.serving.plan import LaunchPlan, Memory, ParallelLayout
from quantmint.pipeline.serving.running.log import LogScan, checkpoint_quantization, diagnose, plan_deviations, scan_log

LOGS = Path(__file__).resolve().parents[2] / "assets" / "server-logs"


def scanned(name: str) -> LogScan:
    return scan_log((LOGS / f"{name}.log").read_text(encoding="utf-8"))


def plan(*more: str, backend: str | None = "ROCM_AITER_FA", kv_tokens: int = 1_050_000) -> LaunchPlan:
    return LaunchPlan(
        env={"VLLM_ROCM_USE_AITER": "1"},
        argv=("vllm", "serve", "/models/m", "--max-model-len", "8192", "--max-num-batched-tokens", "16384", *more),
        served_model_name="m",
        tensor_parallel_size=8,
        reasons=(),
        memory=Memory(1, 1, 1, 1, 1, 1, 1, kv_tokens, kv_tokens / 8192),
        attention_backend=backend,
    )


EIGHT = ("--tensor-parallel-size", "8")
FP8 = ("--kv-cache-dtype", "fp8")
GRAPHS = ("--compilation-config", '{"cudagraph_mode": "FULL_AND_PIECEWISE"}')


@pytest.mark.parametrize(
    ("log", "kept"),
    [
        ("rocm-0.19", plan(*EIGHT, *FP8, backend="ROCM_ATTN", kv_tokens=700_000)),
        ("rocm-0.24", plan("--tensor-parallel-size=2", "--data-parallel-size", "2")),
        ("rocm-0.32", plan(*EIGHT, *FP8, *GRAPHS)),
    ],
)
def test_a_kept_promise_is_no_finding(log: str, kept: LaunchPlan) -> None:
    kept = replace(kept, env={}) if log == "rocm-0.19" else kept
    assert list(plan_deviations(kept, scanned(log), quantization=None)) == []


@pytest.mark.parametrize(
    ("log", "broken", "quantization", "expected"),
    [
        (
            "rocm-0.19",
            plan(*EIGHT, *FP8, *GRAPHS),
            "quark",
            [
                ("caution", "attention backend", "planned: ROCM_AITER_FA, seen: ROCM_ATTN"),
                ("caution", "no kernel is AITER's", "seen: ROCM_ATTN, TritonFp8ScaledMMLinearKernel"),
                ("caution", "size of the KV cache", "planned: 1,050,000 tokens, seen: 700,000 (-33%)"),
            ],
        ),
        (
            "rocm-0.24",
            plan(*EIGHT),
            "quark",
            [
                ("invalid", "not quantized", "planned: quark, seen: none"),
            ],
        ),
        (
            "rocm-0.32",
            plan("--compilation-config", '{"cudagraph_mode": "FULL"}', *EIGHT),
            None,
            [
                ("caution", "graph mode", "planned: FULL, seen: FULL_AND_PIECEWISE"),
            ],
        ),
    ],
)
def test_a_broken_promise_is_told(
    log: str, broken: LaunchPlan, quantization: str | None, expected: list[tuple[str, str, str]]
) -> None:
    found = list(plan_deviations(broken, scanned(log), quantization=quantization))
    assert [(finding.level, finding.line) for finding in found] == [(level, line) for level, _, line in expected]
    for finding, (_, why, _) in zip(found, expected, strict=True):
        assert why in finding.why


@pytest.mark.parametrize(
    ("tokens", "broken"), [(1_045_568, False), (1_150_000, False), (950_600, False), (1_170_000, True), (949_000, True)]
)
def test_a_tenth_of_memory_is_forgiven(tokens: int, broken: bool) -> None:
    found = list(plan_deviations(plan(*EIGHT, kv_tokens=tokens), scanned("rocm-0.32")))
    assert bool(found) is broken


def test_without_a_log_no_promise_is_missed_and_with_one_it_is() -> None:
    assert list(plan_deviations(plan(), scan_log(""))) == []
    (found,) = plan_deviations(replace(plan(*EIGHT), env={}), replace(scanned("rocm-0.32"), attention_backends=()))
    assert found.line == "planned: ROCM_AITER_FA, seen: none that the log names"


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ("[send] via NET/IB/0/GDRDMA", None),
        ("[send] via NET/IB/3(1)/GDRDMA/Shared", None),
        ("[send] via NET/IB/12/Shared", "RDMA without GPUDirect"),
        ("[receive] via NET/Socket/0", "TCP sockets"),
    ],
)
def test_how_nodes_talk(network: str, why: str | None) -> None:
    log = f"node1:7:9 [3] NCCL INFO Channel 00/0 : 8[0] -> 0[0] {network}\n"
    assert [finding.why.count(why or "") for finding in scan_log(log).cautions] == ([] if why is None else [1])


@pytest.mark.parametrize(("dtype", "found"), [("fp8", 1), ("fp8_e4m3", 1), ("fp8_per_token_head", 0), ("auto", 0)])
def test_an_fp8_cache_of_a_16_bit_model_has_no_scales(dtype: str, found: int) -> None:
    log = (LOGS / "rocm-0.24.log").read_text(encoding="utf-8").replace("kv_cache_dtype=auto", f"kv_cache_dtype={dtype}")
    assert sum("has no scales" in finding.why for finding in scan_log(log).cautions) == found


def test_every_engine_is_read() -> None:
    scan = scanned("rocm-0.24")
    assert (scan.kv_tokens, scan.concurrency) == (1_044_480, 127.5)
    assert scan.kernels == ("ROCm AITER",)
    assert scanned("rocm-0.32").kernels == ("AiterPerTokenFp8ScaledMMLinearKernel", "AITER_MXFP4_BF16")


def test_a_real_log_of_the_cpu() -> None:
    scan = scanned("cpu-0.32")
    assert (scan.vllm_version, scan.kv_tokens, scan.concurrency) == ("0.32.0", 1_048_576, 4096.0)
    assert (scan.quantization, scan.kv_cache_dtype, scan.cudagraph_mode) == ("None", "auto", "NONE")
    assert [finding.line.rpartition(" ")[2] for finding in scan.findings] == ["VLLM_NOT_A_VARIABLE"]
    promised = LaunchPlan({}, ("vllm", "serve", "/m", "--max-model-len", "256", *FP8), "m", 1, (), ParallelLayout())
    assert [finding.why for finding in plan_deviations(promised, scan)] == ["the KV cache is not FP8"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": {"quant_method": "quark"}}, "quark"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"quantization_config": None}, None),
        ([], None),
    ],
)
def test_what_a_checkpoint_says_of_itself(config: object, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_quantization(tmp_path) == expected
    assert checkpoint_quantization(tmp_path / "gone") is None


@pytest.mark.parametrize(
    ("line", "backend"),
    [
        ("[rocm.py:750] Using ROCM_AITER_FA backend (selected via --attention-backend).", "ROCM_AITER_FA"),
        ("[rocm.py:850] Using ROCM_ATTN backend out of potential backends: ['ROCM_ATTN'].", "ROCM_ATTN"),
        ("[cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['X'].", "FLASH_ATTN"),
        ("[cpu.py:175] Using CPU_MLA backend.", "CPU_MLA"),
        ("[rocm.py:330] Using AITER Flash Attention backend for ViT model.", None),
        ("[fp8.py:140] Using AITER backend for FP8 MoE", None),
    ],
)
def test_the_attention_backend(line: str, backend: str | None) -> None:
    assert scan_log(f"(Worker pid=2) INFO 11-21 09:00:00 {line}\n").attention_backend == backend


@pytest.mark.parametrize(
    ("log", "name", "message"),
    [
        ("OSError: [Errno 98] Address already in use", "port", "taken"),
        ("vllm: error: unrecognized arguments: --max-model-length 5", "arguments", "--max-model-length"),
        (
            "ValueError: To serve at least one request with the model's max seq len (512), (0.5 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.25 GiB). Based on the available memory, "
            "the estimated maximum model length is 256. Try\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "kv-length",
            "256 tokens would fit",
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing", "no-kv-memory", "leave no memory"),
        ("RuntimeError: _C::static_scaled_fp8_quant() expected at most 0 argument(s)", "static-fp8-on-cpu", "static"),
        (
            "ValueError: Failed to find a kernel that can implement the MXFP4 linear layer.",
            "no-kernel",
            "the MXFP4 linear",
        ),
        (
            "RuntimeError: wrong! device_gemm with the specified compilation parameters does not support this GEMM",
            "aiter-moe",
            "no kernel for this shape of experts",
        ),
        ("torch.OutOfMemoryError: HIP out of memory. Tried", "out-of-memory", "ran out of memory"),
        (
            "ValueError: Model architectures ['Foo'] are not supported for now. Sup",
            "architecture",
            "architecture 'Foo'",
        ),
        ("x\nNotImplementedError: FP8 KV cache requires head_size divisible by 32 on CPU.", "cpu-fp8-kv-head", "32"),
        (
            "(EngineCore pid=3) ERROR 11-21 00:00:00 [core.py:1200] KeyError: 'layers.0.x'\n"
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
            "unknown",
            "KeyError: 'layers.0.x'",
        ),
        (
            "(Worker pid=9) WARNING 11-21 00:00:00 [utils.py:597] fallback to torch. Exception: no primitive\n"
            "(APIServer pid=1) ERROR 11-21 00:00:00 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: "
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            "unknown",
            "its engine process ended without an error message",
        ),
        ("one\ntwo\n\nthree\nfour\n", "unknown", "two | three | four"),
        ("", "unknown", "it wrote nothing"),
    ],
)
def test_a_log_is_explained_in_one_line(log, name, message):
    found = diagnose(log)
    assert found.name == name
    assert message in found.message
    assert "\n" not in found.message
