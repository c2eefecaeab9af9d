"""llm-compressor through our worker: what it writes is what was asked for, and where ours makes the same, the same."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from quantmint.pipeline.quantize.engines.libraries.job import checkpoint_bytes
from tests.quantize.engines.libraries.cases import KV, MIXED, Adopted, Case, Make, assert_as_asked, tensors

pytestmark = pytest.mark.slow

CASES: Mapping[str, Case] = {
    "ptpc_fp8-kv": Case("llama", "ptpc_fp8", KV),
    "fp8-kv": Case("llama", "fp8", KV),
    "fp8-kv-mixtral": Case("mixtral", "fp8", KV),
    "fp8-kv-qwen3-moe": Case("qwen3-moe", "fp8", KV),
    "fp8-kv-phi3": Case("phi3", "fp8", KV),
    "mxfp4": Case("llama", "mxfp4", calibrated=False),
    "mxfp8": Case("llama", "mxfp8", calibrated=False),
    "int8_w8a8": Case("llama", "int8_w8a8", calibrated=False),
    "w4a16": Case("llama", "w4a16", calibrated=False),
    "gptq": Case("llama", "w4a16", {"algorithm": "gptq"}),
    "gptq-unordered": Case("llama", "w4a16", {"algorithm": "gptq", "gptq": {"activation_order": False}}),
    "gptq-moe": Case("mixtral", "int8_w8a8", {"algorithm": "gptq", **KV}),
    "awq": Case("llama", "w4a16", {"algorithm": "awq", **KV}),
    "smoothquant": Case("llama", "int8_w8a8", {"algorithm": "smoothquant"}),
    "smoothquant-strong": Case("llama", "int8_w8a8", {"algorithm": "smoothquant", "smoothquant": {"strength": 0.9}}),
    "rotation-tied": Case("qwen3", "mxfp4", {"algorithm": "rotation"}, calibrated=False),
    "autoround": Case("llama", "w4a16", {"algorithm": "autoround", "autoround": {"iterations": 2}}),
    "mixed": MIXED,
}


@pytest.fixture(scope="session")
def made(by_library: Make) -> Mapping[str, Adopted]:
    return by_library("llmcompressor", CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_made_what_was_asked_for(made: Mapping[str, Adopted], name: str) -> None:
    assert_as_asked(CASES[name], made[name], compared=("none", "gptq", "autoround"))


def test_a_parameter_changes_what_it_should(made: Mapping[str, Adopted]) -> None:
    for one, other, weight in (
        ("gptq", "gptq-unordered", "model.layers.0.mlp.down_proj.weight_packed"),
        ("smoothquant", "smoothquant-strong", "model.layers.0.self_attn.q_proj.weight"),
    ):
        assert not torch.equal(tensors(made[one].checkpoint)[weight], tensors(made[other].checkpoint)[weight])
    for name, order in (("gptq", "static"), ("gptq-unordered", None)):
        group = made[name].checkpoint.config["quantization_config"]["config_groups"]["group_0"]
        assert group["weights"]["actorder"] == order


def test_an_embedding_and_a_head_that_were_rotated_apart_are_no_longer_tied(made: Mapping[str, Adopted]) -> None:
    adopted = made["rotation-tied"]
    assert adopted.source.config["tie_word_embeddings"] is True
    assert adopted.checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" not in adopted.source.tensors
    assert "lm_head.weight" in adopted.checkpoint.tensors


def test_mixed_schemes_are_named_module_by_module(made: Mapping[str, Adopted]) -> None:
    declared = made["mixed"].checkpoint.config["quantization_config"]
    targets = [target for group in declared["config_groups"].values() for target in group["targets"]]
    assert sorted(targets) == sorted(made["mixed"].choice.schemes)
    assert declared["ignore"] == sorted(made["mixed"].choice.kept)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("rotation-tied",)])
def test_its_size_was_known_beforehand(made: Mapping[str, Adopted], name: str) -> None:
    """But for those whose head got a tensor of its own."""
    source, structure, choice = made[name].source, made[name].structure, made[name].choice
    assert checkpoint_bytes(source, structure, choice, "compressed-tensors") == made[name].checkpoint.nbytes
