from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.builder import meta_model
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.reader import read_structure
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.quantization import Quantization
from tests.zoo.models import build

ASSETS = Path(__file__).parents[2] / "assets" / "configs"
FIXTURES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3", "gemma3-text", "phi3")
Models = Callable[..., Path]


def structure_of(folder: Path) -> Structure:
    return read_structure(folder, open_checkpoint(folder).tensors)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", FIXTURES)
def test_linear_modules_are_those_of_the_model_and_its_experts(models: Models, name: str, sharded: bool) -> None:
    folder = models(name, sharded=sharded)
    structure, model = structure_of(folder), meta_model(folder)
    head = model.get_output_embeddings()
    own = {
        module_name: (module.out_features, module.in_features)
        for module_name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    experts = {module: shape for module, shape in structure.linear.items() if ".experts." in module}
    assert {module: shape for module, shape in structure.linear.items() if module not in experts} == own
    assert len(experts) == {"mixtral": 2 * 4 * 3, "qwen3-moe": 4 * 3, "deepseek-v3": 8 * 3}.get(name, 0)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama", ("lm_head",)),
        ("qwen3", ("lm_head",)),  # tied: it has no tensor, but both libraries list it
        ("phi3", ("lm_head",)),
        ("mixtral", ("lm_head", "model.layers.0.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.gate")),
        ("qwen3-moe", ("lm_head", "model.layers.1.mlp.gate")),
    ],
)
def test_head_and_routers_stay_in_16_bit(models: Models, name: str, kept: tuple[str, ...]) -> None:
    assert tuple(structure_of(models(name)).kept) == kept


@pytest.mark.parametrize("name", FIXTURES)
def test_attention_is_listed_in_the_order_of_layers(models: Models, name: str) -> None:
    assert structure_of(models(name)).attention == ("model.layers.0.self_attn", "model.layers.1.self_attn")


@pytest.mark.parametrize("name", FIXTURES)
def test_what_is_imagined_weighs_what_is_saved(models: Models, tmp_path: Path, name: str) -> None:
    real = open_checkpoint(models(name))
    config = json.loads((models(name) / "config.json").read_text()) | {"num_nextn_predict_layers": 0}  # none is saved
    (tmp_path / "config.json").write_text(json.dumps(config))
    imagined, structure = imagine(tmp_path)
    assert imagined.nbytes == real.nbytes
    counted = [info.parameters for name, (_, info) in real.tensors.items() if "correction_bias" not in name]  # a buffer
    assert structure.parameters == sum(counted)
    assert sorted(structure.linear.values()) == sorted(structure_of(models(name)).linear.values())
    assert {n: i.shape for n, (_, i) in imagined.tensors.items()} == {n: i.shape for n, (_, i) in real.tensors.items()}
    assert structure == structure_of(models(name))
    assert structure.weights == structure_of(models(name)).weights
    assert structure.faults == structure_of(models(name)).faults == ()


@pytest.mark.parametrize("checkpoint_format", ["compressed-tensors", "quark"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3-moe"])
def test_a_quantized_checkpoint_has_the_structure_of_its_source(
    quantize: Callable[..., Any], name: str, checkpoint_format: str
) -> None:
    made = quantize(name, checkpoint_format)
    structure = read_structure(made.folder, made.checkpoint.tensors)
    assert structure == made.structure
    assert structure.faults == ()


@pytest.mark.parametrize(
    ("name", "checkpoint_format", "lost", "found"),
    [
        ("llama", None, "model.layers.1.", 9),
        ("llama", None, "model.layers.0.input_layernorm.", 1),
        ("llama", None, "model.norm.", 1),
        ("llama", None, "model.embed_tokens.", 1),
        ("llama", "compressed-tensors", "model.layers.0.mlp.up_proj.", 1),
        ("llama", "quark", "model.layers.1.", 9),
        ("mixtral", None, "model.layers.0.block_sparse_moe.experts.2.w1.", 1),
        ("qwen3-moe", "quark", "model.layers.1.mlp.experts.3.", 3),
        ("deepseek-v3", None, "model.layers.1.mlp.gate.e_score_correction_bias", 1),
    ],
)
def test_what_the_configuration_implies_and_nobody_stored_is_named(
    models: Models, quantize: Callable[..., Any], checkpoint_format: str | None, name: str, lost: str, found: int
) -> None:
    folder = models(name) if checkpoint_format is None else quantize(name, checkpoint_format, kv_cache=False).folder
    tensors = open_checkpoint(folder).tensors
    less = {stored: entry for stored, entry in tensors.items() if not stored.startswith(lost)}
    assert len(less) < len(tensors)
    faults = read_structure(folder, less).faults
    assert [rule for rule, _, _ in faults] == ["missing"] * found
    assert all(tensor.startswith(lost) for _, tensor, _ in faults)


def test_an_expert_that_lacks_is_named_also_where_others_are_stored_one_by_one(models: Models) -> None:
    """As a quantized checkpoint holds them, whose source stacks them."""
    folder = models("llama4")
    stored = open_checkpoint(folder).tensors
    structure = read_structure(folder, stored)
    stacks = {weight.tensor for weight in structure.weights.values() if weight.expert is not None}
    singles = {f"{module}.weight" for module, weight in structure.weights.items() if weight.expert is not None}
    entry = next(iter(stored.values()))
    tensors = dict.fromkeys((stored.keys() - stacks) | singles, entry)
    lost = sorted(singles)[1]
    faults = [fault for fault in read_structure(folder, dict(tensors)).faults if fault[0] == "missing"]
    del tensors[lost]
    assert faults == []
    assert [name for rule, name, _ in read_structure(folder, tensors).faults if rule == "missing"] == [lost]


@pytest.mark.parametrize(
    ("change", "rule", "where", "count"),
    [
        ({"num_hidden_layers": 1}, "undeclared", "model.layers.1.", 9),
        ({"num_hidden_layers": 3}, "missing", "model.layers.2.", 9),
        ({"vocab_size": 64}, "wrong shape", "", 2),
    ],
)
def test_a_configuration_of_another_model_is_no_structure_to_quantize(
    models: Models, tmp_path: Path, change: dict[str, int], rule: str, where: str, count: int
) -> None:
    folder = models("llama")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    structure = read_structure(tmp_path, open_checkpoint(folder).tensors)
    assert [fault[0] for fault in structure.faults] == [rule] * count
    assert all(name.startswith(where) for _, name, _ in structure.faults)
    with pytest.raises(UserError, match=r"^source: found weights that are not those of config\.json: .*") as refused:
        select(structure, Quantization(scheme="ptpc_fp8"))
    assert f"{count - 1} more tensor" in refused.value.message


def test_what_a_family_carries_along_is_nobodys_fault(models: Models, tmp_path: Path) -> None:
    folder = models("llama")
    tensors = dict(open_checkpoint(folder).tensors)
    entry = tensors["model.norm.weight"]
    carried = ("model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.up_proj.weight")
    assert read_structure(folder, tensors | dict.fromkeys(carried, entry)).faults == ()
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_structure(tmp_path, tensors).faults == ()


def test_packed_weights_are_recognised(models: Models) -> None:
    names = open_checkpoint(models("mixtral")).tensors
    packed = {
        name.replace(".weight", ".weight_packed") if "_proj." in name or ".w1." in name else name: entry
        for name, entry in names.items()
    }
    assert set(read_structure(models("mixtral"), packed).linear) == set(structure_of(models("mixtral")).linear)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "billions", "linear", "attention"),
    [
        ("Llama-3.1-8B-Instruct", 8.03, 32 * 7, 32),
        ("Llama-3.1-70B-Instruct", 70.55, 80 * 7, 80),
        ("Llama-3.3-70B-Instruct", 70.55, 80 * 7, 80),
        ("Llama-3.1-405B-Instruct", 405.85, 126 * 7, 126),
        ("Mixtral-8x7B-Instruct-v0.1", 46.70, 32 * (4 + 8 * 3), 32),
        ("Mixtral-8x22B-Instruct-v0.1", 140.63, 56 * (4 + 8 * 3), 56),
        ("Qwen3-30B-A3B", 30.53, 48 * (4 + 128 * 3), 48),
        ("Qwen3-235B-A22B", 235.09, 94 * (4 + 128 * 3), 94),
        ("DeepSeek-R1-0528", 671.03, 61 * 5 + 3 * 3 + 58 * (256 * 3 + 3), 61),
    ],
)
def test_the_sizes_of_known_models(folder: str, billions: float, linear: int, attention: int) -> None:
    checkpoint, structure = imagine(ASSETS / folder)
    assert round(structure.parameters / 1e9, 2) == billions
    assert len(structure.linear) == linear
    assert len(structure.attention) == attention
    stored = 688.6e9 if folder.startswith("DeepSeek") else 2 * structure.parameters  # in FP8, with its predictor
    assert abs(checkpoint.nbytes - stored) < 1e-3 * checkpoint.nbytes


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no-such-model", "architectures": ["NoSuch"]},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 510, "num_attention_heads": 8},
    ],
)
def test_what_transformers_cannot_build_is_a_users_error(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"cannot build this model from its config\.json") as refused:
        read_structure(tmp_path, {})
    assert "\n" not in refused.value.message


def test_code_of_a_model_is_not_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError):
        read_structure(tmp_path, {})
    assert not (tmp_path / "ran").exists()


def test_modules_are_listed_by_the_names_that_vllm_asks_for(tmp_path: Path) -> None:
    """Parts of Falcon-H1 ask for a quantization under other names than their own; the rest of it does not."""
    expected: dict[str, tuple[str, ...]] = {}
    for layer in range(2):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            expected[f"model.layers.{layer}.self_attn.{part}"] = (f"model.layers.{layer}.{part}",)
        for part in ("in_proj", "out_proj"):
            expected[f"model.layers.{layer}.mamba.{part}"] = (f"model.{layer}.mixer.{part}",)
    assert structure_of(build("falcon_h1", tmp_path / "model")).aliases == expected
