"""Modules that vLLM's own class loads as one: what it could not load is refused before anything is made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.models import build


@pytest.mark.parametrize(
    ("name", "pattern", "group"),
    [
        ("deepseek_v4", r"re:.*\.attn\.wkv$", "layers.0.attn.{wq_a, wkv}"),
        (
            "minimax_m3_vl",
            r"re:.*\.index_k_proj$",
            "layers.1.self_attn.{q_proj, k_proj, v_proj, index_k_proj, index_q_proj}",
        ),
    ],
)
def test_a_part_of_what_a_class_fuses(
    quantmint: Callable[..., Any], tmp_path: Path, name: str, pattern: str, group: str
) -> None:
    ended = quantmint("quantize", build(name, tmp_path / name), "out", "--scheme", "ptpc_fp8", "--exclude", pattern)
    assert ended.code == 2, ended.err
    assert group in ended.err
    assert "which vLLM loads as one" in ended.err
    assert not Path("out").exists()


def test_rows_that_end_within_a_block(quantmint: Callable[..., Any], tmp_path: Path) -> None:
    """Qwen3.5 has as many rows of in_proj_b as heads; what the error proposes leads to a sound checkpoint."""
    order = ("quantize", build("qwen3_5_text", tmp_path / "model"), "out", "--scheme", "fp8_block")
    refused = quantmint(*order)
    assert refused.code == 2
    assert "in_proj_b, which has 4 rows, expected a multiple of 128: vLLM loads it in one" in refused.err
    assert not Path("out").exists()
    (proposed,) = re.findall(r"exclude: \['(re:.*?)'\]", refused.err.replace("\\\\", "\\"))
    made = quantmint(*order, "--exclude", proposed)
    assert made.code == 0, made.err
    inspected = quantmint("inspect", "out", "--source", tmp_path / "model")
    assert inspected.code == 0, inspected.err


@pytest.mark.parametrize("engine", ["stream", "llmcompressor"])
def test_keys_that_end_within_a_block(quantmint: Callable[..., Any], tmp_path: Path, engine: str) -> None:
    """It is vLLM that refuses them, whoever makes the blocks."""
    folder = build("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    ended = quantmint("quantize", folder, "out", "--scheme", "fp8_block", "--engine", engine)
    assert ended.code == 2
    assert "64 rows of k_proj, expected a multiple of 128: vLLM loads it in one matrix" in ended.err
