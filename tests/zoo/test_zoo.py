"""The zoo: many architectures, built as their releases lie on disk, and variants of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.zoo import models
from tests.zoo.matrix import COLUMNS, decoder_parameters, outcome
from tests.zoo.models import INDEX, SINGLE, add_predictor, build, encode_blocks, read, read_config, table, variant
from tests.zoo.served import sized

NAMES = {
    "mixtral": ["model.layers.1.block_sparse_moe.experts.3.w1.weight"],
    "qwen3_moe": ["model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.0.mlp.down_proj.weight"],
    "deepseek_v3": ["model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.experts.0.up_proj.weight"],
    "deepseek_v4": ["embed.weight", "layers.2.attn.wq_a.weight", "layers.0.ffn.experts.0.w3.weight", "hc_head_fn"],
    "granitemoe": ["model.layers.0.block_sparse_moe.input_linear.weight"],
    "kimi_linear": [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.q_conv1d.weight",
        "model.layers.1.block_sparse_moe.experts.0.w2.weight",
    ],
    "llama4": ["language_model.model.layers.1.feed_forward.experts.gate_up_proj"],
    "llava": ["language_model.lm_head.weight", "language_model.model.layers.0.self_attn.q_proj.weight"],
    "nemotron_h": ["backbone.embeddings.weight", "backbone.layers.1.mixer.experts.0.up_proj.weight"],
    "qwen2_vl": ["model.layers.0.self_attn.q_proj.weight", "visual.blocks.0.attn.qkv.weight"],
    "qwen3_5_moe": ["model.language_model.layers.0.mlp.experts.gate_up_proj"],
    "qwen3_next": ["model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.0.mlp.experts.0.up_proj.weight"],
    "voxtral": ["language_model.model.layers.0.self_attn.q_proj.weight", "audio_tower.layers.0.fc1.weight"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models of this file."""
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture
def mixture(folders: Path) -> Path:
    """Qwen3-Next: layers of two kinds, each with experts."""
    folder = folders / "qwen3_next"
    return folder if folder.exists() else build("qwen3_next", folder)


def test_the_table_is_long() -> None:
    entries = table().values()
    assert len({entry["architecture"] for entry in entries if "vllm" not in entry}) >= 120
    assert len({entry["architecture"] for entry in entries}) >= 155
    places = {str(entry.get("vllm", "native")).split()[0] for entry in entries}
    assert places == {"native", "transformers", "backend", "until"}


@pytest.mark.parametrize("name", models.names())
def test_a_model_is_built(name: str, folders: Path) -> None:
    folder = build(name, folders / name)
    tensors, config = read(folder), read_config(folder)
    assert config["architectures"] == [table()[name]["architecture"]]
    assert set(NAMES.get(name, ())) <= tensors.keys()
    assert sum(tensor.nbytes for tensor in tensors.values()) < 4e6
    assert sum(tensor.numel() for tensor in tensors.values() if str(tensor.dtype) == "torch.bfloat16") > 1e5
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            assert tensor.isfinite().all(), key
            assert tensor.ndim < 2 or tensor.any(), key


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    made = [build("mixtral", tmp_path / str(number), seed=seed) for number, seed in enumerate((0, 0, 1))]
    first, second, third = [(folder / SINGLE).read_bytes() for folder in made]
    assert first == second != third


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    folder = build("llama", tmp_path / dtype, dtype=dtype)
    assert {str(tensor.dtype) for tensor in read(folder).values()} == {f"torch.{dtype}"}
    assert read_config(folder)["dtype"] == dtype


def test_blocks_decode_to_the_weights(mixture: Path, tmp_path: Path) -> None:
    tensors, encoded = read(mixture), read(encode_blocks(mixture, tmp_path / "fp8"))
    names = [name for name in encoded if name.endswith("_scale_inv")]
    assert len(names) > 20
    for name in names:
        weight = name.removesuffix("_scale_inv")
        rows, columns = tensors[weight].shape
        scales = encoded[name].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        error = (encoded[weight].float() * scales - tensors[weight].float()).norm() / tensors[weight].float().norm()
        assert error < 0.04
    kept = read_config(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.linear_attn.in_proj_ba"} <= set(kept)


@pytest.mark.parametrize(
    ("name", "style", "expected"),
    [
        ("deepseek_v3", "deepseek", "model.layers.2.shared_head.head.weight"),
        ("qwen3_5_moe", "qwen", "mtp.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3_5_text", "qwen", "mtp.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_predictors(name: str, style: str, expected: str, tmp_path: Path) -> None:
    folder = build(name, tmp_path / name)
    before = read(folder).keys()
    add_predictor(folder, style)
    assert expected in read(folder).keys() - before


def test_variants(mixture: Path, tmp_path: Path) -> None:
    made = {name: variant(name, mixture, tmp_path / name) for name in models.VARIANTS}
    whole = read(mixture).keys()
    assert read(made["tied"]).keys() == whole - {"lm_head.weight"}
    assert read(made["shards"]).keys() == read(made["stale"]).keys() == whole
    assert (made["stale"] / SINGLE).is_file()
    assert not (made["shards"] / SINGLE).exists()
    assert len(set(json.loads((made["stale"] / INDEX).read_text())["weight_map"].values())) == 2
    assert len(read(made["unknown"]).keys() - whole) == 1


def test_a_model_that_was_built_in_other_sizes_is_counted_anew() -> None:
    with sized("deepseek_v2"):
        larger = decoder_parameters("deepseek_v2")
    assert decoder_parameters("deepseek_v2") == 824_704 < larger


def test_an_outcome(tmp_path: Path) -> None:
    pair = outcome("llama", next(iter(COLUMNS)), tmp_path)
    assert (pair.kind, pair.message) == ("sound", ""), pair
    assert 0.99 < pair.share <= 1
    assert not (tmp_path / "made" / "llama-ptpc_fp8").exists()
