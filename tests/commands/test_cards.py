"""Shipped recipes held against what AMD's cards say is quantized and what is not, on tiny models of their families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.cards import Card, assert_card, run_shipped
from tests.zoo.models import add_predictor, build, encode_blocks

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
