"""Recipes that cannot be made, served or proven are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.base.errors import RecipeError
from quantmint.pipeline.recipe.faults import refuse
from quantmint.pipeline.recipe.load import LoadedRecipe
from quantmint.pipeline.stages.checks import check

Load = Callable[[str], LoadedRecipe]
CONFIGS = Path(__file__).parents[1] / "assets" / "configs"
HEAD = "name: r\nsource: {repo: org/model}\n"
CALIBRATED = "calibration: {set: ultrachat}\n"
BY_REFERENCE = "evaluation: {suite: tiny, runtime: reference}\ngate: {throughput: {min_ratio: null}}\n"


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return found


def faults(loaded: LoadedRecipe, **known: Any) -> list[str]:
    return [str(fault) for fault in check(loaded, **known)]


def test_ranges_need_data(load: Load) -> None:
    loaded = load(HEAD + "quantization: {scheme: fp8, kv_cache: fp8}\n")
    because = "expected a calibration section, because its scales are measured"
    assert faults(loaded) == [
        f"r.yaml:3:24: quantization.scheme: found fp8 without calibration, {because}",
        f"r.yaml:3:39: quantization.kv_cache: found fp8 without calibration, {because}",
    ]


def test_a_format_without_the_scheme(load: Load) -> None:
    loaded = load(HEAD + "quantization: {scheme: mxfp8, format: quark}\n")
    assert len(faults(loaded)) == 1
    assert "quantization.scheme: found mxfp8 in quark, expected format compressed-tensors: " in faults(loaded)[0]


@pytest.mark.parametrize(
    ("scheme", "engine", "layout", "algorithm", "expected"),
    [
        ("w4a16", "stream", "quark", "gptq", "engine stream has no w4a16 in quark, expected quark"),
        ("int8_w8a8", "stream", "quark", "gptq", "engine stream has no int8_w8a8 in quark, expected quark"),
        ("mxfp4", "stream", "quark", "awq", "engine stream has no awq for mxfp4: llmcompressor and quark have"),
        ("fp8_block", "stream", "compressed-tensors", "gptq", "no gptq for fp8_block: llmcompressor has"),
        ("mxfp6_e2m3", "quark", "quark", "gptq", "engine quark has no gptq for mxfp6_e2m3: stream has"),
        ("mxfp6_e2m3", "quark", "quark", "awq", "engine quark has no awq for mxfp6_e2m3: no engine has"),
        ("w4a16", "quark", "quark", "autoround", "engine quark has no autoround for w4a16: llmcompressor has"),
        ("fp8_block", "llmcompressor", "compressed-tensors", "awq", "no awq for fp8_block"),
    ],
)
def test_an_algorithm_that_the_engine_does_not_run(
    load: Load, scheme: str, engine: str, layout: str, algorithm: str, expected: str
) -> None:
    text = f"quantization: {{scheme: {scheme}, engine: {engine}, format: {layout}, algorithm: {algorithm}}}\n"
    [fault] = faults(load(HEAD + text + "calibration: {set: tiny}\ntarget: {hardware: mi355x}\n"))
    assert expected in fault


def test_scaling_is_the_stream_engines_and_measures_by_magnitude(load: Load) -> None:
    library = "{scheme: mxfp4, engine: quark, format: quark, algorithm: gptq, gptq: {scaling: true}}\n"
    with pytest.raises(RecipeError, match=r"r.yaml:3:\d+: .*found scaling with engine quark, expected engine stream"):
        load(HEAD + f"quantization: {library}calibration: {{set: tiny}}\n")
    static = "quantization: {scheme: fp8, algorithm: gptq, gptq: {scaling: true}}\n"
    loaded = load(f"{HEAD}{static}calibration: {{set: tiny, observer: mse}}\n")
    assert [fault for fault in faults(loaded) if "observer" in fault] == [
        "r.yaml:4:36: calibration.observer: found mse with scaling, expected amax: what enters scaled channels is "
        "measured again, by its largest magnitude"
    ]


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("scheme: mxfp4, algorithm: gptq", True),
        ("scheme: mxfp4, algorithm: gptq, gptq: {scaling: false}", False),
        ("scheme: mxfp4, algorithm: tuned", True),
        ("scheme: mxfp4, algorithm: tuned, tuned: {scaling: false, steps: 50}", False),
        ("scheme: mxfp4_weight_only, algorithm: gptq", False),
        ("scheme: mxfp4_weight_only, algorithm: gptq, gptq: {scaling: true}", True),
        ("scheme: mxfp4, engine: quark, format: quark, algorithm: gptq", False),
    ],
)
def test_channels_are_scaled_where_inputs_are_in_mx_formats(load: Load, text: str, scaling: bool) -> None:
    loaded = load(f"{HEAD}quantization: {{{text}}}\n{CALIBRATED}")
    assert bool(loaded.recipe.quantization.parameters.get("scaling")) is scaling


def test_a_server_that_cannot_load_it(load: Load) -> None:
    loaded = load(HEAD + "quantization: {scheme: mxfp4}\ntarget: {hardware: cpu, workload: tiny}\n")
    [fault] = faults(loaded)
    assert fault.startswith(
        "r.yaml:3:24: quantization.scheme: found mxfp4, which cpu cannot serve: "
        "vLLM's CPU build has no kernel for MXFP4 linear layers"
    )


def test_the_reference_runtime_on_a_cpu_proves_what_no_cpu_serves(load: Load) -> None:
    recipe = HEAD + "quantization: {scheme: mxfp4, kv_cache: fp8}\n" + CALIBRATED
    recipe += "target: {hardware: cpu, workload: tiny}\n"
    assert faults(load(recipe + BY_REFERENCE), cpu_flags=()) == []
    assert [fault.split(":")[3].strip() for fault in faults(load(recipe + "evaluation: {suite: tiny}\n"))] == [
        "quantization.scheme"
    ]


def test_experts_that_the_cpu_build_cannot_load(load: Load) -> None:
    mixture, target = config("Qwen3-30B-A3B"), "target: {hardware: cpu, workload: tiny}\n"
    text = f"{HEAD}quantization: {{scheme: ptpc_fp8}}\n{target}"
    [fault] = faults(load(text), config=mixture)
    assert fault.startswith(
        "r.yaml:3:24: quantization.scheme: found ptpc_fp8, which cpu cannot serve: vLLM's CPU build multiplies routed "
        "experts in FP8 by blocks only"
    )
    assert "`evaluation: {runtime: reference}`" in fault
    assert faults(load(text + BY_REFERENCE), config=mixture) == []
    assert faults(load(text), config=config("Llama-3.1-8B-Instruct")) == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("Qwen3-30B-A3B", "re:.*mlp.experts.*"),
        ("Mixtral-8x7B-Instruct-v0.1", "re:.*block_sparse_moe.experts.*"),
        ("Llama-4-Scout-17B-16E-Instruct", "re:.*feed_forward.experts.*"),
    ],
)
def test_experts_in_16_bit_load_everywhere(load: Load, name: str, pattern: str) -> None:
    text = f"{HEAD}quantization: {{scheme: ptpc_fp8, exclude: ['{pattern}']}}\n"
    assert faults(load(text + "target: {hardware: cpu, workload: tiny}\n"), config=config(name)) == []


def test_remote_code_needs_a_commit(load: Load) -> None:
    text = HEAD + "quantization: {scheme: ptpc_fp8}\ntrust_remote_code: true\n"
    assert faults(load(text)) == [
        'r.yaml:4:20: trust_remote_code: found true with revision "main", expected a 40-digit commit: '
        "code that is run must not be able to change"
    ]
    assert faults(load(text.replace("org/model", f"org/model, revision: {'ab' * 20}"))) == []


def test_a_missing_folder(load: Load, tmp_path: Path) -> None:
    text = "name: r\nsource: {folder: model}\nquantization: {scheme: ptpc_fp8}\n"
    assert faults(load(text)) == [
        f"r.yaml:2:18: source.folder: found no folder {tmp_path / 'model'}, expected one with a model"
    ]
    (tmp_path / "model").mkdir()
    assert faults(load(text)) == []


def test_definitions_that_do_not_exist(load: Load) -> None:
    loaded = load(
        HEAD + "quantization: {scheme: ptpc_fp8}\ncalibration: {set: ultrachatt}\n"
        "target: {workload: thruput}\nevaluation: {suite: coer}\n"
    )
    found = faults(loaded)
    assert [line.split(": ")[:2] for line in found] == [
        ["r.yaml:4:20", "calibration.set"],
        ["r.yaml:5:20", "target.workload"],
        ["r.yaml:6:21", "evaluation.suite"],
    ]
    assert 'did you mean "ultrachat"?' in found[0]
    assert "core" in found[2]


def test_requests_that_do_not_fit(load: Load) -> None:
    loaded = load(
        HEAD + "quantization: {scheme: ptpc_fp8}\n"
        "target: {max_model_len: 4096, workload: throughput}\nevaluation: {suite: reasoning}\n"
    )
    assert faults(loaded) == [
        "r.yaml:4:25: target.max_model_len: found 4096, expected at least 4352: "
        "workload throughput has requests of that many tokens",
        "r.yaml:4:25: target.max_model_len: found 4096, expected more than 32768: "
        "suite reasoning lets a model answer with that many tokens",
    ]


def test_lengths_beyond_the_model(load: Load) -> None:
    loaded = load(
        HEAD + "quantization: {scheme: ptpc_fp8}\ncalibration: {set: tiny, sequence_length: 65536}\n"
        "target: {max_model_len: 40000}\n"
    )
    assert faults(loaded, config=config("Mixtral-8x7B-Instruct-v0.1")) == [
        "r.yaml:5:25: target.max_model_len: found 40000, expected at most 32768, the model's max_position_embeddings",
        "r.yaml:4:43: calibration.sequence_length: found 65536, "
        "expected at most 32768, the model's max_position_embeddings",
    ]


def test_samples_too_few_to_hold_some_out(load: Load) -> None:
    text = HEAD + "quantization: {scheme: ptpc_fp8, algorithm: tuned}\ncalibration: {set: tiny, samples: 7}\n"
    assert faults(load(text), config=config("Llama-3.1-8B-Instruct")) == [
        "r.yaml:4:35: calibration.samples: found 7, expected at least 8: an eighth or more is held out from tuning"
    ]


def test_tokens_too_few_for_a_hessian(load: Load) -> None:
    text = HEAD + "quantization: {scheme: ptpc_fp8, algorithm: gptq}\ncalibration: {set: tiny, samples: 6, "
    model = config("Llama-3.1-8B-Instruct")
    assert faults(load(text + "sequence_length: 2048}\n"), config=model) == [
        "r.yaml:4:35: calibration.samples: found 6 of 2048 tokens, expected at least 7: "
        "a Hessian of intermediate_size 14336 takes as many tokens"
    ]
    assert faults(load(text + "sequence_length: 4096}\n"), config=model) == []


@pytest.mark.parametrize(
    ("changed", "gpus", "found"),
    [
        ({"hidden_size": 4100}, 1, "hidden_size 4100"),
        ({"intermediate_size": 14340}, 1, "intermediate_size 14340"),
        ({"intermediate_size": 96}, 2, "intermediate_size 96 over 2 GPUs"),
        ({"head_dim": 100}, 8, "num_attention_heads x head_dim 3200 over 8 GPUs"),
        ({"text_config": {"hidden_size": 33}}, 1, "hidden_size 33"),
    ],
)
def test_groups_that_do_not_divide(load: Load, changed: dict[str, Any], gpus: int, found: str) -> None:
    loaded = load(HEAD + f"quantization: {{scheme: mxfp4}}\ntarget: {{hardware: mi355x, gpus: {gpus}}}\n")
    model = config("Llama-3.1-8B-Instruct")
    assert faults(loaded, config=model) == []
    assert faults(loaded, config={**model, **changed}) == [
        f"r.yaml:3:24: quantization.scheme: found mxfp4 with {found}, expected a multiple of 32 on each GPU"
    ]


LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            f"exclude: [{LAYER}.self_attn.q_proj]",
            f"r.yaml:5:13: quantization.exclude[0]: found 16 bit for {LAYER}.self_attn.q_proj beside ptpc_fp8 for "
            f"{LAYER}.self_attn.k_proj, expected one scheme for {LAYER}.self_attn.{{q_proj, k_proj, v_proj}}, "
            "which vLLM loads as one",
        ),
        (
            f"exclude: [lm_head, {LAYER}.mlp.up_proj]",
            f"r.yaml:5:22: quantization.exclude[1]: found 16 bit for {LAYER}.mlp.up_proj beside ptpc_fp8 for "
            f"{LAYER}.mlp.gate_proj, expected one scheme for {LAYER}.mlp.{{gate_proj, up_proj}}, "
            "which vLLM loads as one",
        ),
        (
            f"exclude: [{LAYER}.mlp.experts.7.down_proj]",
            f"r.yaml:5:13: quantization.exclude[0]: found 16 bit for {LAYER}.mlp.experts.7.down_proj beside ptpc_fp8 "
            f"for {LAYER}.mlp.experts.0.down_proj, expected one scheme for {LAYER}.mlp.experts.*, "
            "which vLLM loads as one",
        ),
        (
            f"overrides: [{{modules: [{LAYER}.self_attn.k_proj, {LAYER}.self_attn.v_proj], scheme: fp8}}]",
            f"r.yaml:5:26: quantization.overrides[0].modules[0]: found fp8 for {LAYER}.self_attn.k_proj beside "
            f"ptpc_fp8 for {LAYER}.self_attn.q_proj, expected one scheme for "
            f"{LAYER}.self_attn.{{q_proj, k_proj, v_proj}}, which vLLM loads as one\n"
            f"r.yaml:5:59: quantization.overrides[0].modules[1]: found fp8 for {LAYER}.self_attn.v_proj beside "
            f"ptpc_fp8 for {LAYER}.self_attn.q_proj, expected one scheme for "
            f"{LAYER}.self_attn.{{q_proj, k_proj, v_proj}}, which vLLM loads as one",
        ),
    ],
)
def test_fused_modules_named_one_by_one(load: Load, rules: str, expected: str) -> None:
    loaded = load(HEAD + f"quantization:\n  scheme: ptpc_fp8\n  {rules}\n" + CALIBRATED)
    with pytest.raises(RecipeError) as refused:
        refuse(check(loaded))
    assert str(refused.value) == expected


def test_the_order_of_overrides_must_not_matter(load: Load) -> None:
    text = (
        HEAD + "quantization:\n  scheme: ptpc_fp8\n  overrides:\n"
        "  - {modules: [a.o_proj], scheme: fp8}\n  - {modules: ['re:a'], scheme: mxfp4_weight_only}\n"
        "target: {hardware: mi355x}\n" + CALIBRATED
    )
    linear = {"a.o_proj": (64, 64), "a.down_proj": (64, 64)}
    assert faults(load(text), linear=linear) == [
        "r.yaml:7:16: quantization.overrides[1].modules[0]: found mxfp4_weight_only for a.o_proj after fp8, "
        "expected one scheme for a module"
    ]
    twice = text.replace("'re:a'", "a.o_proj")
    assert any("after fp8, expected one scheme for a module" in fault for fault in faults(load(twice)))


@pytest.mark.parametrize(
    ("heads", "size", "gpus", "expected"),
    [
        (8, 128, 8, None),
        (8, 64, 2, None),
        (8, 64, 8, "64 rows of k_proj on each of 8 GPUs"),
        (2, 64, 8, "64 rows of k_proj on each of 8 GPUs"),
        (1, 64, 1, "64 rows of k_proj"),
    ],
)
def test_keys_end_with_a_block_on_every_gpu(load: Load, heads: int, size: int, gpus: int, expected: str | None) -> None:
    text = HEAD + f"quantization: {{scheme: fp8_block}}\ntarget: {{hardware: mi300x, gpus: {gpus}}}\n"
    sizes = {"num_attention_heads": 64, "hidden_size": 8192, "intermediate_size": 8192}
    known = sizes | {"num_key_value_heads": heads, "head_dim": size}
    found = [fault for fault in faults(load(text), config=known) if "k_proj" in fault]
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]
    kept = "quantization: {scheme: fp8_block, exclude: ['re:.*[.](q|k|v)_proj$']}\n"
    assert not any("k_proj" in fault for fault in faults(load(HEAD + kept), config=known))
