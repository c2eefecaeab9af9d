"""The parallelism decision: rows that can hold, bands of the guides, what cannot be cut up, links that are missing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pipeline.serving import hardware as accelerators
from pipeline.serving.model.facts import ModelFacts, as_quantized, model_facts
from pipeline.serving.plan import Layout, Memory
from pipeline.serving.planning import target as targets
from pipeline.serving.planning.layout import choose, density_band, load, rows, split_cautions, split_faults
from pipeline.serving.planning.target import Target, profile

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
GUIDES = ("ROCm 2025", "ROCm 2026", "vLLM MI300X 2024", "ROCm FP8 2024", "vLLM parallelism", "vLLM 0.", "quantmint")
FACTS = {
    "family": {"dense", "moe", "mla", "dsa", "gpt-oss"},
    "density": {"none", "sparse", "unsettled", "standard"},
    "experts": {"none", "few", "many"},
    "load": {"low", "high"},
    "room": {"gpu", "node", "nodes"},
    "gpus": {"one", "several"},
    "links": {"yes", "no"},
}


def facts(name: str) -> ModelFacts:
    return model_facts(CONFIGS / name)


def plenty(_: Layout) -> Memory:
    return Memory(200 << 30, 180 << 30, 1 << 30, 0, 0, 100 << 30, 1024, 100 << 20, 1000.0)


def test_rows_name_facts_that_exist_and_guides_that_are_there():
    for row in rows():
        assert set(row.when) <= set(FACTS)
        assert all(set(values) <= FACTS[name] for name, values in row.when.items()), row.name
        assert row.why
        assert row.source.startswith(GUIDES), row.source


@pytest.mark.parametrize("family", sorted(FACTS["family"]))
def test_every_case_has_a_row(family):
    bands, experts = (FACTS[name] - {"none"} if family != "dense" else {"none"} for name in ("density", "experts"))
    for values in product(bands, experts, FACTS["load"], ("node", "nodes")):
        case = dict(zip(("density", "experts", "load", "room"), values, strict=True))
        case |= {"family": family, "gpus": "several", "links": "yes"}
        assert any(all(case[name] in allowed for name, allowed in row.when.items()) for row in rows()), case


@pytest.mark.parametrize(
    ("name", "concurrency", "expected"),
    [
        ("latency", 128, "low"),
        ("latency", 129, "low"),
        ("streaming", 511, "low"),
        ("throughput", 128, "low"),
        ("throughput", 129, "high"),
        ("offline", 400, "high"),
        ("latency", 512, "high"),
    ],
)
def test_between_the_guides_limits_the_profile_decides(name, concurrency, expected):
    assert load(profile(name, concurrency=concurrency)) == expected


@pytest.mark.parametrize(
    ("model", "band"),
    [
        ("Llama-3.1-8B-Instruct", "none"),
        ("Llama-4-Maverick-17B-128E-Instruct", "sparse"),
        ("Qwen3-Next-80B-A3B-Instruct", "unsettled"),
        ("Qwen3-235B-A22B", "standard"),
        ("DeepSeek-V3", "standard"),
    ],
)
def test_density_as_the_guides_count_it(model, band):
    assert density_band(facts(model)) == band


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("Llama-3.1-70B-Instruct", Layout(6), "64 attention heads cannot be split over 6"),
        ("Llama-3.1-70B-Instruct", Layout(8), None),
        ("Qwen3-235B-A22B", Layout(8), None),  # 4 key-value heads, each twice
        ("Llama-4-Scout-17B-16E-Instruct", Layout(5), "8 key-value heads"),
        ("Llama-3.1-8B-Instruct", Layout(1, 33), "32 layers do not fill 33 stages"),
        ("Llama-3.1-8B-Instruct", Layout(2, expert=True), "no experts to spread"),
        ("Mixtral-8x7B-Instruct-v0.1", Layout(8, data=2, expert=True), "8 experts do not fill 16"),
        ("DeepSeek-V3", Layout(8, data=4), "cannot be split over 32 GPUs in whole groups of 128"),
        ("DeepSeek-V3", Layout(8, data=4, expert=True), None),
        ("gpt-oss-120b", Layout(8), None),  # 360 columns each: its loader pads
    ],
)
def test_what_can_be_cut_up(model, layout, words):
    faults = split_faults(facts(model), layout)
    assert faults == () if words is None else words in "; ".join(faults)


def test_groups_that_share_a_scale_stay_whole():
    mixtral = as_quantized(facts("Qwen3-30B-A3B"), scheme="mxfp4")  # experts of 768 columns
    assert split_faults(mixtral, Layout(8)) == ()
    assert "an expert width of 768" in split_faults(mixtral, Layout(8, data=8))[0]
    assert split_faults(mixtral, Layout(8, data=8, expert=True)) == ()
    odd = replace(facts("Llama-3.1-8B-Instruct"), intermediate=14336 + 32, group=32, quantization="mxfp4")
    assert "an MLP width" in split_faults(odd, Layout(8))[0]


def test_what_works_and_costs():
    narrow = split_cautions(facts("Qwen3-235B-A22B"), Layout(8), kind="rocm")
    assert any("repeated 2 times" in caution for caution in narrow)
    quantized = as_quantized(facts("Llama-3.1-405B-Instruct"), scheme="mxfp4")
    assert split_cautions(quantized, Layout(8), kind="rocm") == ()
    small = as_quantized(facts("Qwen3-30B-A3B"), scheme="mxfp4")
    assert any("no multiple of 256" in caution for caution in split_cautions(small, Layout(8), kind="rocm"))


def test_without_fast_links_stages_replace_tensor_parallelism(monkeypatch):
    slow = replace(accelerators.hardware("mi300x"), links=0, link_gb_s=0.0)
    monkeypatch.setattr(accelerators, "hardware", lambda name: slow)
    monkeypatch.setattr(targets.accelerators, "hardware", lambda name: slow)

    def tight(layout: Layout) -> Memory:
        room = 100 << 20 if layout.gpus >= 4 else 0
        return replace(plenty(layout), kv_tokens=room, kv_cache=room * 1024)

    model, busy = facts("Llama-3.1-70B-Instruct"), profile("latency", concurrency=8)
    choice = choose(model, Target("mi300x", 4), busy, tight, max_model_len=8192)
    assert choice is not None
    assert (choice.layout.tensor, choice.layout.pipeline) == (1, 4)
