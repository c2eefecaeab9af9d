"""Counted parameters against transformers' own models on the meta device, and against the headers of real folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.serving.model.architecture import read_shape
from quantmint.pipeline.serving.model.facts import facts_of_config, model_facts
from quantmint.pipeline.serving.model.weights import count_weights

CONFIGS = Path(__file__).parents[2] / "assets" / "configs"
# transformers 5.17 does not know it; its layers are DeepSeek-V3's.
FOREIGN = {"Kimi-K2-Instruct": 1_026_408_232_448}
TINY = (
    "llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gemma3-text", "phi3", "llama4-text", "gpt-oss",
    "llama4", "qwen3-vl-moe", "qwen2-moe",
)  # fmt: skip
RECURRENT = {
    "granitemoehybrid": ("GraniteMoeHybridConfig", {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "shared_intermediate_size": 80,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 32,
        "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2, "vocab_size": 512, "tie_word_embeddings": True,
    }),
    "nemotron_h": ("NemotronHConfig", {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "vocab_size": 512,
    }),
    "qwen3_next": ("Qwen3NextConfig", {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 512,
    }),
}  # fmt: skip


TOWER = ("vision_model.", "vision_tower.", "visual.", "multi_modal_projector.", "mm_projector.")


def counted(config: dict[str, object]) -> int:
    """Parameters of the language model: a tower is taken for a plain vision transformer."""
    return sum(piece.parameters for piece in count_weights(config, read_shape(config)) if piece.role != "encoder")


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.iterdir()))
def test_a_released_configuration_has_the_parameters_that_transformers_gives_it(name: str) -> None:
    config = json.loads((CONFIGS / name / "config.json").read_text())
    if name in FOREIGN:
        assert counted(config) == FOREIGN[name]
        return
    named = dict(meta_model(CONFIGS / name).named_parameters())
    built = sum(
        parameter.numel() for key, parameter in named.items() if not key.removeprefix("model.").startswith(TOWER)
    )
    assert counted(config) == pytest.approx(built, rel=1e-6)
    whole = sum(parameter.numel() for parameter in named.values())
    assert model_facts(CONFIGS / name).parameters == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_hybrid_has_the_parameters_that_transformers_gives_it(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind, fields = RECURRENT[name]
    getattr(transformers, kind)(**fields).save_pretrained(tmp_path)
    built = sum(parameter.numel() for parameter in meta_model(tmp_path).parameters())
    facts = model_facts(tmp_path)
    assert facts.parameters == pytest.approx(built, rel=0.005)
    assert facts.hybrid


ODD_TOWERS = (
    {"vision_config": {}},
    {"vision_config": {"image_size": [448, 448], "patch_size": [14, 14], "hidden_size": 64, "num_hidden_layers": 2}},
    {"vision_config": {"embed_dim": 64, "hidden_size": 4096, "depth": 2, "mlp_ratio": 4}},
)


@pytest.mark.parametrize("tower", ODD_TOWERS)
def test_a_tower_of_another_make_is_counted_as_well(tower: dict[str, object]) -> None:
    text = json.loads((CONFIGS / "Llama-3.1-8B-Instruct" / "config.json").read_text())
    facts = facts_of_config({"model_type": "other", **tower, "text_config": text})
    assert facts.multimodal
    assert 0 < facts.encoder_share < 20
    assert facts.parameters - facts.encoder_parameters == 8_030_261_248


@pytest.mark.parametrize("name", TINY)
def test_counted_bytes_are_those_of_the_shards(name: str, models: Callable[..., Path]) -> None:
    folder = models(name)
    config = json.loads((folder / "config.json").read_text())
    measured, computed = model_facts(folder), facts_of_config(config)
    assert measured.weights == open_checkpoint(folder).nbytes
    texts = [
        sum(piece.nbytes for piece in facts.module_weights if piece.role != "encoder") for facts in (measured, computed)
    ]
    assert texts[0] == texts[1]
    assert not measured.counted
    assert computed.counted


@pytest.mark.parametrize("checkpoint_format", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_quantized_checkpoint_is_recognised_and_foreseen(
    name: str, scheme: str, checkpoint_format: str, models: Callable[..., Path], quantize: Callable[..., object]
) -> None:
    from quantmint.pipeline.base.schemes import table
    from quantmint.pipeline.serving.model.facts import as_quantized

    if checkpoint_format not in table()[scheme].formats:
        pytest.skip(f"no {scheme} in {checkpoint_format}")
    made = quantize(name, checkpoint_format, scheme=scheme)
    found = model_facts(made.folder)  # type: ignore[attr-defined]
    assert (found.quantization, found.checkpoint_format, found.kv_cache_scheme) == (scheme, checkpoint_format, "fp8")
    foreseen = as_quantized(model_facts(models(name)), scheme=scheme, kv_cache="fp8", format=checkpoint_format)
    assert (foreseen.quantization, foreseen.group, foreseen.kv_cache_scheme) == (scheme, found.group, "fp8")
    assert foreseen.parameters == found.parameters
    # Scales of the cache and of blocks at the edges are not foreseen: these models are all edges.
    assert foreseen.weights == pytest.approx(found.weights, rel=0.03)
