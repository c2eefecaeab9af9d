"""quantmint knobs, and the page that it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.serving.knobs import page as knob_page
from pipeline.serving.knobs.table import table

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_table(quantmint: Callable[..., Any], tmp_path: Path) -> None:
    page = ROOT / "docs/serving-knobs.md"
    assert page.read_text(encoding="utf-8") == knob_page.page(), f"run `{knob_page.REFRESH}`"
    copy = tmp_path / "knobs.md"
    assert quantmint("knobs", "--markdown", copy).out == f"{copy}: written\n"
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    assert quantmint("knobs", "--markdown", "-").out == page.read_text(encoding="utf-8")


def test_the_command(quantmint: Callable[..., Any]) -> None:
    assert {row["name"] for row in quantmint("knobs", "--json").json} == table().keys()
    old = {row["name"] for row in quantmint("knobs", "--vllm", "0.19.0", "--json").json}
    assert "--attention-backend" in old
    assert "--numa-bind" not in old
    unknown = ("knobs", "VLLM_CPU_ATTN_SPLIT_KV", "--vllm", "0.19.0")
    assert "vLLM 0.19.0 does not have it." in quantmint(*unknown).out
    assert quantmint(*unknown, "--json").json["known"] is False
    assert "--attention-backend does its work there" in quantmint("knobs", "VLLM_ATTENTION_BACKEND").err
    assert "did you mean 'NCCL_MIN_NCHANNELS'" in quantmint("knobs", "NCCL_MIN_CHANNELS").err
    assert "--kv-cache-dtype" in quantmint("knobs").out
