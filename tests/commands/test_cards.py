"""Shipped recipes held against what AMD's cards say is quantized and what is not, on tiny models of their families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.cards import Card, assert_card, run_shipped
from tests.zoo.models import add_predictor, build, encode_blocks, encode_int4, read_config, write_config

Quantmint = Callable[..., Any]

pytestmark = pytest.mark.timeout(300)


def test_qwen3_coder_keeps_attention_and_routers(quantmint: Quantmint, words: tuple[str, ...]) -> None:
    """The card of amd/Qwen3-Coder-480B-A35B-Instruct-MXFP4 keeps all projections of attention, and the routers."""
    source = build("qwen3_moe", Path("source").absolute())
    texts = f"calibration: {{set: {Path(words[1]).absolute()}, samples: 8, sequence_length: 64}}"
    folder = run_shipped(quantmint, "qwen3coder480b-mxfp4", source, texts)
    card = Card(["*self_attn*", "*mlp.gate", "*lm_head"], "mxfp4", {})
    assert assert_card(folder, card) == {"mxfp4": 15, None: 10}


def test_deepseek_r1_has_its_predictor_in_fp8(quantmint: Quantmint) -> None:
    """The card of amd/DeepSeek-R1-0528-MXFP4; the predictor as in amd/DeepSeek-R1-0528-mtp-ptpc, but for attention."""
    plain = build("deepseek_v3", Path("plain").absolute())
    add_predictor(plain, "deepseek")
    source = encode_blocks(plain, Path("source").absolute())
    serve = "serve: {speculative: null}"
    folder = run_shipped(quantmint, "deepseek-r1-mxfp4-mtp", source, serve)
    card = Card(
        ["*self_attn*", "*mlp.gate", "*lm_head", "*.eh_proj", "*.shared_head.head"],
        "mxfp4",
        {"model.layers.2.*": "ptpc_fp8"},
    )
    assert assert_card(folder, card) == {"mxfp4": 18, "ptpc_fp8": 15, None: 20}


def test_minimax_keeps_attention_and_routers(quantmint: Quantmint) -> None:
    """The card of amd/MiniMax-M2.5-MXFP4, from a source in FP8 blocks."""
    source = encode_blocks(build("minimax_m2", Path("plain").absolute()), Path("source").absolute())
    folder = run_shipped(quantmint, "minimaxm25-mxfp4", source)
    card = Card(["lm_head", "*block_sparse_moe.gate*", "*self_attn*"], "mxfp4", {})
    assert assert_card(folder, card) == {"mxfp4": 24, None: 11}


def test_glm_5_has_its_routed_experts_alone_in_four_bits(quantmint: Quantmint) -> None:
    """The card of amd/GLM-5-MXFP4; the predictor, which the card does not name, stays as it is."""
    source = build("glm_moe_dsa", Path("source").absolute())
    add_predictor(source, "deepseek")
    folder = run_shipped(quantmint, "glm5-mxfp4", source)
    dense = ("*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj")
    card = Card(["*self_attn*", "*mlp.gate", "*lm_head", *dense, "*shared_experts*", "model.layers.2.*"], "mxfp4", {})
    assert assert_card(folder, card)["mxfp4"] == 12


def test_qwen3_5_has_its_mixtures_alone_in_four_bits(quantmint: Quantmint, words: tuple[str, ...]) -> None:
    """amd/Qwen3.5-397B-A17B-MoE-MXFP4 has shared experts in MXFP4 too, and the gates beside them in 16 bit."""
    source = build("qwen3_5_moe", Path("source").absolute())
    add_predictor(source, "qwen")
    texts = f"calibration: {{set: {Path(words[1]).absolute()}, samples: 8, sequence_length: 64}}"
    folder = run_shipped(quantmint, "qwen35-397b-mxfp4", source, texts)
    kept = ("*linear_attn*", "*self_attn*", "*mlp.gate", "*shared_expert_gate", "*lm_head", "*visual*", "mtp.*")
    assert assert_card(folder, Card(kept, "mxfp4", {}))["mxfp4"] == 30


@pytest.mark.parametrize(("model", "recipe"), [("kimi_k2", "kimik2thinking-mxfp4"), ("kimi_k25", "kimik25-mxfp4")])
def test_kimi_has_routed_experts_in_four_bits_and_attention_in_fp8(
    quantmint: Quantmint, model: str, recipe: str
) -> None:
    """What amd/Kimi-K2.5-MXFP4 is known to keep, and attention in FP8 as in amd/Kimi-K2-Thinking-MXFP4-AttnFP8.

    Code of the repository is trusted for the tokenizer; the model's is not run.
    """
    plain = build(model, Path("plain").absolute())
    source = encode_int4(plain, Path("source").absolute())
    auto_map = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    write_config(source, {**read_config(source), "model_type": model, "auto_map": auto_map})
    (source / "modeling_deepseek.py").write_text("raise SystemExit('it was run')\n")
    folder = run_shipped(quantmint, recipe, source)
    dense = ("*mlp.gate_proj", "*mlp.up_proj", "*mlp.down_proj")
    card = Card(
        ["*mlp.gate", "*lm_head", *dense, "*shared_experts*", "vision_tower*", "mm_projector*"],
        "mxfp4",
        {"*self_attn*": "ptpc_fp8"},
    )
    assert assert_card(folder, card)["mxfp4"] == 12
