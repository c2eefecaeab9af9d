"""Byte for byte what the reference libraries write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantmint.pipeline.quantize.formats.checkpoint import Checkpoint, open_checkpoint
from tests.oracles import EqualTo

pytestmark = pytest.mark.slow

# Reference, model, whether ours is made from several files.
LLMCOMPRESSOR = [
    ("ptpc_fp8-kv", "llama", False),
    ("ptpc_fp8-kv", "llama", True),
    ("ptpc_fp8-kv-one-by-one-backwards", "llama", False),
    ("ptpc_fp8-kv-qwen3", "qwen3", False),
    ("ptpc_fp8-kv-qwen3", "qwen3", True),
]
QUARK = [("ptpc_fp8-kv", "llama", False), ("ptpc_fp8-kv", "llama", True), ("ptpc_fp8-kv-qwen3", "qwen3", False)]


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: t for shard in checkpoint.shards for name, t in load_file(checkpoint.folder / shard).items()}


@pytest.mark.parametrize(("reference", "model", "sharded"), LLMCOMPRESSOR)
def test_compressed_tensors_equals_llmcompressor(
    quantize: Callable[..., Any],
    equal_to: EqualTo,
    by_llmcompressor: Callable[[str], Path],
    reference: str,
    model: str,
    sharded: bool,
) -> None:
    ours = quantize(model, "compressed-tensors", sharded=sharded).checkpoint
    theirs = open_checkpoint(by_llmcompressor(reference))
    assert (len(ours.shards) > 1) is sharded
    equal_to("llm-compressor, ptpc_fp8", tensors(ours), tensors(theirs))
    assert any(name.endswith("k_scale") for name in ours.tensors)
    mine, wanted = ours.config["quantization_config"], theirs.config["quantization_config"]
    # The libraries list what they ignore in the order of modules, which means nothing.
    assert mine | {"ignore": None} == wanted | {"ignore": None}
    assert sorted(mine["ignore"]) == sorted(wanted["ignore"])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("reference", "scheme", "kv_cache"),
    [
        ("fp8-kv", "fp8", True),
        ("fp8_block", "fp8_block", False),
        ("mxfp4", "mxfp4", False),
        ("mxfp4_weight_only", "mxfp4_weight_only", False),
        ("w4a16", "w4a16", False),
        ("mxfp8", "mxfp8", False),
        ("nvfp4", "nvfp4", True),
        ("nvfp4_weight_only", "nvfp4_weight_only", False),
        ("int8_w8a8", "int8_w8a8", False),
    ],
)
def test_every_scheme_equals_llmcompressor(
    quantize: Callable[..., Any],
    equal_to: EqualTo,
    by_llmcompressor: Callable[[str], Path],
    reference: str,
    scheme: str,
    kv_cache: bool,
    sharded: bool,
) -> None:
    ours = quantize("llama", "compressed-tensors", sharded=sharded, kv_cache=kv_cache, scheme=scheme).checkpoint
    theirs = open_checkpoint(by_llmcompressor(reference))
    equal_to(f"llm-compressor, {scheme}", tensors(ours), tensors(theirs))
    assert ours.config["quantization_config"] == theirs.config["quantization_config"]


@pytest.mark.parametrize(
    ("reference", "scheme", "kv_cache"),
    [
        ("fp8-kv", "fp8", True),
        ("mxfp4", "mxfp4", False),
        ("mxfp4_weight_only", "mxfp4_weight_only", False),
        ("mxfp4_fp8", "mxfp4_fp8", False),
        ("mxfp6_e2m3", "mxfp6_e2m3", False),
        ("mxfp6_e3m2", "mxfp6_e3m2", False),
    ],
)
def test_every_scheme_equals_quark(
    quantize: Callable[..., Any],
    equal_to: EqualTo,
    by_quark: Callable[[str], Path],
    reference: str,
    scheme: str,
    kv_cache: bool,
) -> None:
    ours = quantize("llama", "quark", kv_cache=kv_cache, scheme=scheme).checkpoint
    theirs = open_checkpoint(by_quark(reference))
    equal_to(f"Quark, {scheme}", tensors(ours), tensors(theirs))
    assert ours.config["quantization_config"] == theirs.config["quantization_config"]


def test_a_mixture_equals_llmcompressor_but_for_the_mask_that_it_forgets(
    quantize: Callable[..., Any],
    equal_to: EqualTo,
    by_llmcompressor: Callable[[str], Path],
    models: Callable[..., Path],
    blocks: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llm-compressor 0.14 traces it, like Mixtral and Phi-3, without its causal mask: tokens see their future.

    From the second layer on it therefore measures other ranges than any server will meet. Its numbers are those of a
    forward without the mask, which is shown here, and everything else is equal.
    """
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    from quantmint.calibration.replica import load_resident
    from quantmint.pipeline.quantize.schemes.scales import fp8_scale
    from tests.measuring import observe

    ours = quantize("qwen3-moe", "compressed-tensors").checkpoint
    theirs = open_checkpoint(by_llmcompressor("ptpc_fp8-kv-qwen3-moe"))
    attention = "model.layers.1.self_attn"
    mine, stored = tensors(ours), tensors(theirs)
    for scale in ("k_scale", "v_scale"):
        del mine[f"{attention}.{scale}"]
    but = {
        name: tensor for name, tensor in stored.items() if name not in (f"{attention}.k_scale", f"{attention}.v_scale")
    }
    equal_to("llm-compressor, ptpc_fp8", mine, but)
    monkeypatch.setattr(modeling_qwen3_moe, "create_causal_mask", lambda **_: None)
    unmasked = observe(load_resident(models("qwen3-moe"), "cpu"), blocks.split(4))
    assert stored[f"{attention}.k_scale"] == fp8_scale(unmasked.keys[attention].max().bfloat16())
    assert stored[f"{attention}.v_scale"] == fp8_scale(unmasked.values[attention].max().bfloat16())


@pytest.mark.parametrize(("reference", "model", "sharded"), QUARK)
def test_quark_layout_equals_quark(
    quantize: Callable[..., Any],
    equal_to: EqualTo,
    by_quark: Callable[[str], Path],
    reference: str,
    model: str,
    sharded: bool,
) -> None:
    ours = quantize(model, "quark", sharded=sharded).checkpoint
    theirs = open_checkpoint(by_quark(reference))
    equal_to("Quark, ptpc_fp8", tensors(ours), tensors(theirs))
    assert any(name.endswith("k_proj.output_scale") for name in ours.tensors)
    assert ours.config["quantization_config"] == theirs.config["quantization_config"]


def test_the_rest_of_the_configuration_is_the_sources(
    quantize: Callable[..., Any], models: Callable[..., Path]
) -> None:
    ours = dict(quantize("llama", "compressed-tensors").checkpoint.config)
    ours.pop("quantization_config")
    assert ours == json.loads((models("llama") / "config.json").read_text())


@pytest.mark.parametrize("name", ["ptpc_fp8-kv", "fp8-kv", "fp8_block", "mxfp4", "mxfp4_weight_only", "int8_w8a8"])
def test_llmcompressor_still_writes_the_golden_configuration(
    by_llmcompressor: Callable[[str], Path], golden: Callable[[str], dict[str, Any]], name: str
) -> None:
    config = json.loads((by_llmcompressor(name) / "config.json").read_text())
    assert config["quantization_config"] == golden(f"llmcompressor-{name}")


@pytest.mark.parametrize(
    "name",
    ["fp8-kv", "mxfp4", "mxfp4_weight_only", "mxfp4_fp8", "file-fp8", "file-ptpc_fp8"],
)
def test_quark_still_writes_the_golden_configuration(
    by_quark: Callable[[str], Path], golden: Callable[[str], dict[str, Any]], name: str
) -> None:
    config = json.loads((by_quark(name) / "config.json").read_text())
    assert config["quantization_config"] == golden(f"quark-{name}")


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_transformers_loads_what_we_write(quantize: Callable[..., Any], blocks: torch.Tensor, model: str) -> None:
    """Through compressed-tensors: its own decompression is our dequantization, and the model runs."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    from quantmint.pipeline.quantize.schemes.registry import dequantize

    made = quantize(model, "compressed-tensors", sharded=True)
    stored = tensors(made.checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(
        made.folder, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    weights = dict(loaded.named_parameters())
    for module in made.structure.linear:
        parts = {"weight": stored[f"{module}.weight"], "weight_scale": stored[f"{module}.weight_scale"]}
        restored = dequantize("ptpc_fp8", parts).bfloat16()
        torch.testing.assert_close(weights[f"{module}.weight"].data, restored, rtol=0.01, atol=0)
    original = AutoModelForCausalLM.from_pretrained(made.source.folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        ours, theirs = loaded(blocks[:2]).logits.float(), original(blocks[:2]).logits.float()
    agreement = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
    assert agreement > 0.98
