"""Hardware, knobs, failures and log patterns: tables whose rows must hold what their readers promise."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from pipeline.errors import UserError
from pipeline.serving.hardware import cautions, hardware, local_cpu_flags, native_on, refusal, table
from pipeline.serving.running.diagnosis import diagnose
from pipeline.serving.running.logscan import scan_log


def test_hardware_facts():
    assert set(table()) == {"mi300x", "mi325x", "mi350x", "mi355x", "cpu", "cuda", "h100", "h200"}
    assert hardware("mi300x").hbm_bytes == 192 << 30
    assert (hardware("mi325x").fp8_max, hardware("mi355x").fp8_max) == (240.0, 448.0)
    assert hardware("mi350x").native_mx
    assert hardware("cpu").hbm_bytes is None
    with pytest.raises(UserError, match="expected one of mi300x"):
        hardware("mi299x")


@pytest.mark.parametrize(
    ("name", "scheme", "kv_cache", "flags", "expected"),
    [
        ("cpu", "fp8", "auto", None, "static_scaled_fp8_quant"),
        ("cpu", "mxfp4", "auto", None, "no kernel for MXFP4"),
        ("cpu", "fp8_block", "auto", {"avx512f"}, "AMX"),
        ("cpu", "fp8_block", "auto", {"amx_tile"}, None),
        ("cpu", "fp8_block", "auto", None, None),
        ("cpu", "ptpc_fp8", "fp8", {"avx2"}, "AVX-512"),
        ("cpu", "ptpc_fp8", "fp8", {"avx512f"}, None),
        ("cpu", "int8_w8a8", "auto", {"avx2"}, None),
        ("cpu", "bf16", "auto", {"avx2"}, None),
        ("mi300x", "mxfp4", "fp8", None, None),
        ("cuda", "fp8", "fp8", None, None),
    ],
)
def test_what_does_not_load_is_refused(name, scheme, kv_cache, flags, expected):
    found = refusal(name, scheme, kv_cache, "quark", cpu_flags=flags)
    assert found is None if expected is None else expected in (found or "")


def test_what_loads_with_a_catch_is_cautioned():
    assert "may clip" in cautions("mi300x", "ptpc_fp8", "fp8", "compressed-tensors")[0]
    assert cautions("mi300x", "ptpc_fp8", "fp8", "quark") == ()
    assert cautions("mi355x", "ptpc_fp8", "fp8", "compressed-tensors") == ()
    assert "truncate" in cautions("cpu", "ptpc_fp8", "fp8", "quark", cpu_flags={"avx512f"})[0]
    assert "amd-quark" in cautions("mi325x", "mxfp4", "auto", "quark")[0]
    assert cautions("mi355x", "mxfp4", "auto", "quark") == ()
    assert "emulates" in cautions("mi355x", "mxfp4_fp8", "auto", "quark")[0]
    assert "the CPU must have" in cautions("cpu", "fp8_block", "auto", "compressed-tensors")[0]
    assert cautions("cpu", "fp8_block", "auto", "compressed-tensors", cpu_flags={"amx_tile"}) == ()


def test_what_is_multiplied_as_it_is_stored():
    assert native_on("ptpc_fp8") == ("mi300x", "mi325x", "mi350x", "mi355x", "cuda")
    assert native_on("mxfp4") == ("mi350x", "mi355x") == tuple(name for name, row in table().items() if row.native_mx)
    assert native_on("w4a16") == ()


def test_rules_name_facts_that_exist():
    document = yaml.safe_load(resources.files("pipeline.serving").joinpath("hardware.yaml").read_text())
    for rule in document["refusals"] + document["cautions"] + document["native"]:
        assert set(rule["when"]) <= {"hardware", "kind", "arch", "scheme", "kv_cache", "format"}
        assert set(rule["when"].get("arch", [])) <= {"gfx942", "gfx950"}
        assert set(rule.get("needs", [])) <= {"amd-quark"}
    flags = local_cpu_flags()
    assert flags is None or len(flags) > 5


def test_rows_have_the_fields_of_their_reader():
    # An unquoted comma in a flow mapping silently makes a key of the words behind it.
    def rows(name: str, *sections: str) -> list[dict]:
        document = yaml.safe_load(resources.files("pipeline.serving").joinpath(name).read_text())
        return [row for section in sections for row in document[section]] if sections else document

    assert all(set(row) == {"name", "pattern", "message", "fix"} for row in rows("running/failures.yaml"))
    assert all(
        set(row) - {"each"} == {"pattern", "level", "why"} for row in rows("running/log_patterns.yaml", "findings")
    )
    assert all(set(row) == {"pattern", "backends"} for row in rows("running/log_patterns.yaml", "backends"))
    fields = {"when", "why", "instead", "unless_cpu_has", "needs"}
    assert all(set(row) <= fields for row in rows("hardware.yaml", "refusals", "cautions"))


@pytest.mark.parametrize(
    ("log", "name", "message"),
    [
        ("OSError: [Errno 98] Address already in use", "port", "taken"),
        ("vllm: error: unrecognized arguments: --max-model-length 5", "arguments", "near: --max-model-len"),
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
            "its engine was gone without a word",
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


def test_a_log_tells_what_really_runs():
    log = """
(EngineCore pid=1) INFO 11-21 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/m', \
quantization=quark, quantization_config=None, kv_cache_dtype=fp8, device_config=cuda
(Worker pid=2) INFO 11-21 [__init__.py:759] Selected AiterPerTokenFp8ScaledMMLinearKernel for QuarkW8A8Fp8
(Worker pid=3) INFO 11-21 [__init__.py:759] Selected AiterPerTokenFp8ScaledMMLinearKernel for QuarkW8A8Fp8
(Worker pid=2) INFO 11-21 [rocm.py:750] Using ROCM_AITER_FA backend (selected via --attention-backend).
(Worker pid=2) WARNING [kv_cache.py:163] Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify
(Worker pid=3) WARNING [kv_cache.py:163] Using KV cache scaling factor 1.0 for fp8_e4m3. If this is unintended, verify
(Worker pid=2) WARNING [kv_cache.py:201] Using uncalibrated q_scale 1.0 and/or prob_scale 1.0 with fp8 attention.
(EngineCore pid=1) INFO [kv_cache_utils.py:2327] GPU KV cache size: 1,045,568 tokens, Maximum concurrency for 8,192 \
tokens per request: 127.63x
"""
    scan = scan_log(log)
    assert scan.vllm_version == "0.32.0"
    assert (scan.quantization, scan.kv_cache_dtype) == ("quark", "fp8")
    assert scan.attention_backend == "ROCM_AITER_FA"
    assert scan.kernels == ("AiterPerTokenFp8ScaledMMLinearKernel",)
    assert (scan.kv_tokens, scan.concurrency) == (1045568, 127.63)
    assert [finding.level for finding in scan.findings] == ["invalid", "caution"]
    assert scan.invalid[0].line.startswith("(Worker pid=2) WARNING")
    assert len(scan.cautions) == 1


def test_a_silent_log_says_nothing():
    scan = scan_log("hello\n")
    assert scan.kv_tokens is None
    assert scan.kernels == ()
    assert scan.findings == ()
