"""The parallelism decision: rows that can hold, bands of the guides, what cannot be cut up, links that are missing."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from quantmint.pipeline.serving.model.facts import ModelFacts, model_facts
from quantmint.pipeline.serving.plan import ParallelLayout
from quantmint.pipeline.serving.planning.layout import layout_rules, load_level, split_faults
from quantmint.pipeline.serving.planning.target import profile

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
GUIDES = ("ROCm 2025", "ROCm 2026", "vLLM MI300X 2024", "ROCm FP8 2024", "vLLM parallelism", "vLLM 0.", "quantmint")
FACTS = {
    "family": {"dense", "moe", "mla", "dsa", "gpt-oss"},
    "density": {"none", "sparse", "unsettled", "standard"},
    "experts": {"none", "few", "many"},
    "load": {"low", "between", "high"},
    "room": {"gpu", "node", "nodes"},
    "gpus": {"one", "several"},
}


def facts(name: str) -> ModelFacts:
    return model_facts(CONFIGS / name)


def test_rows_name_facts_that_exist_and_guides_that_are_there():
    for row in layout_rules():
        assert set(row.when) <= set(FACTS)
        assert all(set(values) <= FACTS[name] for name, values in row.when.items()), row.name
        assert row.why
        assert row.source.startswith(GUIDES), row.source


@pytest.mark.parametrize("family", sorted(FACTS["family"]))
def test_every_case_has_a_row(family):
    bands, experts = (FACTS[name] - {"none"} if family != "dense" else {"none"} for name in ("density", "experts"))
    for values in product(bands, experts, FACTS["load"], ("node", "nodes")):
        case = dict(zip(("density", "experts", "load", "room"), values, strict=True))
        case |= {"family": family, "gpus": "several"}
        assert any(all(case[name] in allowed for name, allowed in rule.when.items()) for rule in layout_rules()[:-1]), (
            case
        )


@pytest.mark.parametrize(
    ("name", "concurrency", "expected"),
    [
        ("latency", 128, "low"),
        ("latency", 129, "low"),
        ("streaming", 511, "low"),
        ("throughput", 128, "low"),
        ("throughput", 129, "between"),
        ("throughput", 255, "between"),
        ("throughput", 256, "high"),
        ("offline", 400, "high"),
        ("latency", 512, "high"),
    ],
)
def test_between_the_guides_limits_the_profile_decides(name, concurrency, expected):
    assert load_level(profile(name, concurrency=concurrency)) == expected


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ("Llama-3.1-70B-Instruct", ParallelLayout(6), "64 attention heads cannot be split over 6"),
        ("Llama-3.1-70B-Instruct", ParallelLayout(8), None),
        ("Qwen3-235B-A22B", ParallelLayout(8), None),  # 4 key-value heads, each twice
        ("Llama-4-Scout-17B-16E-Instruct", ParallelLayout(5), "8 key-value heads"),
        ("Llama-3.1-8B-Instruct", ParallelLayout(1, 33), "32 layers do not fill 33 stages"),
        ("Llama-3.1-8B-Instruct", ParallelLayout(2, expert=True), "no experts to spread"),
        ("Mixtral-8x7B-Instruct-v0.1", ParallelLayout(8, data=2, expert=True), "8 experts do not fill 16"),
        ("DeepSeek-R1-0528", ParallelLayout(8, data=4), "cannot be split over 32 GPUs in whole groups of 128"),
        ("DeepSeek-R1-0528", ParallelLayout(8, data=4, expert=True), None),
        ("gpt-oss-120b", ParallelLayout(8), None),  # 360 columns each: its loader pads
    ],
)
def test_what_can_be_cut_up(model, layout, words):
    faults = split_faults(facts(model), layout)
    assert faults == () if words is None else words in "; ".join(faults)
