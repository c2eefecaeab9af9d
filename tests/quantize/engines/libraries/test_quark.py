"""amd-quark through our worker: what it writes is what was asked for, and where ours makes the same, the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from quantmint.pipeline.quantize.engines.libraries.job import checkpoint_bytes
from tests.quantize.engines.libraries.cases import KV, MIXED, Adopted, Case, Make, assert_as_asked

pytestmark = pytest.mark.slow

CASES: Mapping[str, Case] = {
    "ptpc_fp8-kv": Case("llama", "ptpc_fp8", KV),
    "fp8-kv": Case("llama", "fp8", KV),
    "fp8-kv-mixtral": Case("mixtral", "fp8", KV),
    "mxfp4": Case("llama", "mxfp4", calibrated=False),
    "mxfp6_e2m3": Case("llama", "mxfp6_e2m3", calibrated=False),
    "mxfp6_e3m2": Case("llama", "mxfp6_e3m2", KV),
    "int8_w8a8-qwen3": Case("qwen3", "int8_w8a8", KV),
    "w4a16": Case("llama", "w4a16", calibrated=False),
    "gptq": Case("llama", "w4a16", {"algorithm": "gptq", "gptq": {"dampening": 0.05}}),
    "gptq-fp8": Case("llama", "fp8", {"algorithm": "gptq", **KV}),
    "awq": Case("llama", "w4a16", {"algorithm": "awq"}),
    "smoothquant": Case("llama", "int8_w8a8", {"algorithm": "smoothquant"}),
    "rotation": Case("llama", "mxfp4", {"algorithm": "rotation", **KV}),
    "kv-kept": Case("llama", "mxfp4", {**KV, "exclude": [r"re:.*layers\.1\.self_attn\..*"]}),
    "mixed": MIXED,
}


@pytest.fixture(scope="session")
def made(by_library: Make) -> Mapping[str, Adopted]:
    return by_library("quark", CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_made_what_was_asked_for(made: Mapping[str, Adopted], name: str) -> None:
    assert_as_asked(CASES[name], made[name], compared=("none", "gptq"))


def test_its_parameters_are_in_its_record(made: Mapping[str, Adopted]) -> None:
    [record] = made["gptq"].checkpoint.config["quantization_config"]["algo_config"]
    assert (record["damp_percent"], record["desc_act"], record["block_size"]) == (0.05, True, 128)


def test_what_stays_is_named_one_by_one(made: Mapping[str, Adopted]) -> None:
    for name in ("mixed", "fp8-kv-mixtral"):
        declared = made[name].checkpoint.config["quantization_config"]
        assert declared["exclude"] == sorted(made[name].choice.kept)
        assert not any("*" in excluded for excluded in declared["exclude"])


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if name
        not in (
            "gptq",
            "gptq-fp8",
        )
    ],
)
def test_its_size_was_known_beforehand(made: Mapping[str, Adopted], name: str) -> None:
    """But for those whose scales are float32 after GPTQ."""
    source, structure, choice = made[name].source, made[name].structure, made[name].choice
    assert checkpoint_bytes(source, structure, choice, "quark") == made[name].checkpoint.nbytes
