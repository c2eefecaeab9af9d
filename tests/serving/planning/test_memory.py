"""What a rank holds and what its cache holds, against figures worked out by hand from vLLM's rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.base.hardware import hardware
from quantmint.pipeline.serving.model.facts import ModelFacts, as_quantized, facts_of_config, model_facts
from quantmint.pipeline.serving.plan import Memory, ParallelLayout
from quantmint.pipeline.serving.planning.kv_cache import LayerCache, cache_groups, groups_of_model, kv_bytes_per_token
from quantmint.pipeline.serving.planning.memory import EngineSettings, estimate_memory, stage_bytes

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
NAMES = sorted(path.name for path in CONFIGS.iterdir())


def facts_of(name: str, **changes: Any) -> ModelFacts:
    config = json.loads((CONFIGS / name / "config.json").read_text())
    return facts_of_config({**config, **changes})


def on(facts: ModelFacts, layout: ParallelLayout, machine: str = "mi300x", **changes: Any) -> Memory:
    engine = EngineSettings(
        vllm_version="0.33.0", utilization=0.95, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192
    )
    return estimate_memory(facts, hardware(machine), layout, replace(engine, **changes))


@pytest.mark.parametrize(
    ("name", "tensor", "dtype", "kind", "expected"),
    [
        ("Llama-3.1-70B-Instruct", 1, "auto", "rocm", 320 << 10),
        ("Llama-3.1-70B-Instruct", 8, "fp8", "rocm", 20 << 10),
        ("Llama-3.1-70B-Instruct", 8, "float32", "cpu", 80 << 10),
        ("Llama-3.1-70B-Instruct", 16, "auto", "rocm", 40 << 10),  # never less than one KV head a rank
        ("DeepSeek-R1-0528", 1, "auto", "rocm", 70272),
        ("DeepSeek-R1-0528", 8, "auto", "rocm", 70272),  # the latent is the same on every rank
        ("DeepSeek-V3.2", 8, "auto", "rocm", 70272 + 61 * 132),
        ("DeepSeek-V3.2", 8, "fp8", "cuda", 61 * (656 + 132)),
        # 21 layers with entries of 4 tokens and an indexer, 20 with entries of 128, in padded pages of 256 tokens.
        ("DeepSeek-V4-Flash", 8, "auto", "rocm", (21 * (37440 + 8640) + 20 * 1728) // 256),
        ("gpt-oss-120b", 1, "auto", "rocm", 18 * 2 * 8 * 64 * 2),
        ("Qwen3-Next-80B-A3B-Instruct", 2, "auto", "rocm", 12 * 2 * 1 * 256 * 2),
        ("Llama-4-Scout-17B-16E-Instruct", 1, "auto", "rocm", 48 * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_a_token(name: str, tensor: int, dtype: str, kind: str, expected: int) -> None:
    assert kv_bytes_per_token(facts_of(name), tensor, dtype, kind=kind) == expected


def test_one_rank_holds_every_byte_but_the_folded_projections() -> None:
    dense = facts_of("Llama-3.1-8B-Instruct")
    assert stage_bytes(dense, ParallelLayout()) == dense.weights == 2 * 8030261248
    latent = facts_of("DeepSeek-R1-0528")
    folded = 61 * 512 * 128 * (128 + 128) * 2
    assert stage_bytes(latent, ParallelLayout()) == pytest.approx(latent.weights + folded, abs=61)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_together_hold_the_model_and_what_they_copy(name: str) -> None:
    facts = facts_of(name)
    alone = stage_bytes(facts, ParallelLayout(), kind="cuda")
    for layout in (
        ParallelLayout(tensor=8),
        ParallelLayout(tensor=8, expert=True),
        ParallelLayout(tensor=2, pipeline=4),
    ):
        fullest = max(stage_bytes(facts, layout, stage, kind="cuda") for stage in range(layout.pipeline))
        assert alone <= 8 * fullest
        assert fullest < 0.42 * alone


def test_what_tensor_parallelism_cannot_divide_is_copied() -> None:
    facts = facts_of("Llama-3.1-8B-Instruct")
    whole = {role: sum(p.nbytes for p in facts.module_weights if p.split == role) for role in ("kv", "copied")}
    ideal = stage_bytes(facts, ParallelLayout(tensor=16)) - facts.weights / 16
    # Eight KV heads on sixteen ranks: each is there twice.
    assert ideal == pytest.approx(whole["kv"] / 16 + whole["copied"] * 15 / 16, abs=1e4)


def test_experts_are_spread_over_a_whole_server() -> None:
    facts = facts_of("Qwen3-235B-A22B")
    experts = sum(piece.nbytes for piece in facts.module_weights if piece.split == "experts")
    rest = facts.weights - experts
    # 128 experts on 24 ranks: the fullest has six.
    for layout, part in ((ParallelLayout(data=8, expert=True), 1 / 8), (ParallelLayout(data=24, expert=True), 6 / 128)):
        assert stage_bytes(facts, layout) == pytest.approx(rest + experts * part)


def test_kernels_of_mxfp4_experts_want_padded_sizes() -> None:
    facts = facts_of("gpt-oss-120b")
    experts = sum(piece.nbytes for piece in facts.module_weights if piece.split == "experts")
    more = stage_bytes(facts, ParallelLayout(), kind="rocm") - stage_bytes(facts, ParallelLayout(), kind="cuda")
    assert more == pytest.approx(experts * ((3072 / 2880) ** 2 - 1))


@pytest.mark.parametrize("scheme", ["ptpc_fp8", "mxfp4", "w4a16"])
def test_a_quantized_model_leaves_more_for_the_cache(scheme: str) -> None:
    before = facts_of("Llama-3.1-70B-Instruct")
    after = as_quantized(before, scheme=scheme, kv_cache="fp8")
    assert on(before, ParallelLayout()).kv_cache < on(after, ParallelLayout()).kv_cache
    twice = on(after, ParallelLayout(), kv_cache_dtype="fp8").kv_tokens / on(after, ParallelLayout()).kv_tokens
    assert twice == pytest.approx(2, rel=1e-3)


def test_a_recipe_may_leave_modules_in_16_bit() -> None:
    facts = facts_of("Llama-3.1-8B-Instruct")
    kept = as_quantized(facts, scheme="ptpc_fp8", assigned=lambda name: None if "down_proj" in name else "ptpc_fp8")
    down = 32 * 4096 * 14336
    # Its scales go with it: one a row in 16 bit.
    expected = as_quantized(facts, scheme="ptpc_fp8").weights + down - 32 * 4096 * 2
    assert kept.weights == expected


def test_memory_that_nobody_told() -> None:
    with pytest.raises(UserError, match="expected hbm_bytes"):
        on(facts_of("Llama-3.1-8B-Instruct"), ParallelLayout(), "cuda")


def test_parts_make_up_the_budget() -> None:
    for name in NAMES:
        found = on(facts_of(name), ParallelLayout(tensor=8), cudagraph_mode="FULL_AND_PIECEWISE")
        assert found.weights + found.activations + found.graphs + found.kv_cache == found.budget
        assert found.graphs > 0


def test_cached_prefixes_cost_a_hybrid_a_second_state() -> None:
    facts = facts_of("Qwen3-Next-80B-A3B-Instruct")
    newer, older = on(facts, ParallelLayout(tensor=2)), on(facts, ParallelLayout(tensor=2), vllm_version="0.25.1")
    assert newer.concurrency < older.concurrency


def layers(*kinds: str, nbytes: int = 64, window: int = 128) -> list[LayerCache]:
    made = []
    for number, kind in enumerate(kinds):
        given = LayerCache(number, kind, nbytes, window if kind == "sliding" else 0)  # type: ignore[arg-type]
        made.append(given)
    return made


def test_windows_and_full_layers_are_cut_into_groups_of_equal_length() -> None:
    # Five to one, twice over: one group of two full layers, five of two windows.
    made = cache_groups(layers(*([*["sliding"] * 5, "full"] * 2)), block_size=16)
    assert sorted(len(group.layers) for group in made.groups) == [2] * 6
    assert made.block_bytes(range(12)) == 2 * 16 * 64
    # 1024 tokens: 64 blocks of the full group, and in each window (127 + 512) / 16, rounded up, and one.
    assert made.blocks_of_request(1024, 512) == 64 + 5 * (40 + 1)
    assert made.block_bytes(range(6)) == 16 * 64


def test_twelve_windows_and_thirteen_full_layers_are_padded_to_two_groups() -> None:
    made = cache_groups(layers(*["sliding"] * 12, *["full"] * 13), block_size=16)
    assert sorted(len(group.layers) for group in made.groups) == [12, 13]
    assert made.block_bytes(range(25)) == 13 * 16 * 64


def test_compressed_layers_are_packed_into_the_groups_that_vllm_forms() -> None:
    # As vLLM 0.32 groups these caches (_get_packed_kv_cache_groups), and the blocks that it then gives to a request.
    groups = groups_of_model(facts_of("DeepSeek-V4-Flash"), 8, "auto", "rocm", 16)
    formed = {(group.block, group.window, len(group.layers), sum(group.pages)) for group in groups.groups}
    windows = {(64, 128, 22, 823680), (64, 128, 21, 786240)}
    assert formed == {(256, 0, 62, 1002240), (4, 8, 42, 870912), (8, 128, 20, 656640), *windows}
    assert groups.block_bytes(range(43)) == 1002240
    assert groups.blocks_of_request(40960, 2 * 8192) == 6842


def test_a_block_grows_until_a_state_fits_it() -> None:
    made = cache_groups([*layers("full"), LayerCache(1, "state", 5000)], block_size=16)
    (full,) = (group for group in made.groups if group.kind == "full")
    assert (full.block, made.page) == (80, 80 * 64)
    assert made.blocks_of_request(800, 512) == 10 + 1
    assert made.blocks_of_request(800, 512, states=2) == 10 + 2


def test_a_pipeline_is_as_small_as_its_fullest_stage() -> None:
    facts = facts_of("Llama-3.1-70B-Instruct")
    one, four = on(facts, ParallelLayout()), on(facts, ParallelLayout(pipeline=4))
    assert four.weights == max(stage_bytes(facts, ParallelLayout(pipeline=4), stage) for stage in range(4))
    assert four.kv_tokens > 4 * one.kv_tokens


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "longrope", "factor": 32.0}, 4096),
    ],
)
def test_the_context_is_vllms(rope: dict[str, Any] | None, expected: int) -> None:
    changed = facts_of("Llama-3.1-8B-Instruct", max_position_embeddings=4096, rope_scaling=rope)
    assert changed.context == expected


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="num_hidden_layers 0"):
        model_facts(tmp_path)
