"""The view of vLLM's loaders: facts that its source states, and the tables against the installed vLLM."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.model import loader
from quantmint.pipeline.quantize.model.loader import LoaderView, architectures, fusion_names, load_view
from quantmint.pipeline.serving.environment import find_vllm

LOADERS = Path(loader.__file__).with_name("loaders")
LAYER = "model.layers.3"
# Of every kind: dense, mixtures, latent attention, state spaces, multimodal, with drafters.
SAMPLE = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "jamba", "qwen3_next", "llama4", "gemma3", "falcon_h1")


def view(architecture: str, version: str | None = None, **config: object) -> LoaderView:
    loaded = load_view({"architectures": [architecture], **config}, version)
    assert loaded is not None
    return loaded


@cache
def rows(version: str) -> dict[str, Any]:
    """The rows of a version's table by architecture."""
    text = (LOADERS / f"vllm-{version}.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)["architectures"]
    return table


def fused_parts(version: str, architecture: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each fused module that a class can quantize, with the last names of its parts on disk."""
    row = rows(version)[architecture]
    fused: dict[str, list[str]] = row.get("fused", {})
    for pattern in row.get("quantized", ()):
        parts = fused.get(pattern) or fused.get(pattern.rpartition(".")[2], [])
        if parts and not any("." in part for part in parts):
            yield pattern, parts


def test_a_class_without_a_row_has_no_view() -> None:
    assert load_view({"architectures": ["NobodyForCausalLM"]}) is None
    assert load_view({}) is None
    assert load_view({"architectures": ["LlamaForCausalLM"]}, "0.1") is None
    assert load_view({"architectures": ["LlamaForCausalLM"]}, "0.32.4") is not None


@pytest.mark.parametrize(
    ("architecture", "module", "expected"),
    [
        ("LlamaForCausalLM", f"{LAYER}.self_attn.q_proj", True),
        ("LlamaForCausalLM", f"{LAYER}.mlp.down_proj", True),
        ("LlamaForCausalLM", "lm_head", False),
        ("LlamaForCausalLM", "model.embed_tokens", False),
        ("LlamaForCausalLM", f"{LAYER}.mlp.unknown_proj", None),
        # vLLM builds the mixers of Mamba 1 without a quantization, those of Mamba 2 with.
        *(
            ("JambaForCausalLM", f"{LAYER}.mamba.{last}", False)
            for last in ("in_proj", "x_proj", "dt_proj", "out_proj")
        ),
        ("JambaForCausalLM", f"{LAYER}.feed_forward.experts.1.up_proj", True),
        ("JambaForCausalLM", f"{LAYER}.feed_forward.router", False),
        ("MambaForCausalLM", "backbone.layers.3.mixer.in_proj", False),
        ("Mamba2ForCausalLM", "backbone.layers.3.mixer.in_proj", True),
        # The indexer of sparse attention.
        ("DeepseekV32ForCausalLM", f"{LAYER}.self_attn.indexer.wk", False),
        ("DeepseekV32ForCausalLM", f"{LAYER}.self_attn.indexer.weights_proj", False),
        ("DeepseekV32ForCausalLM", f"{LAYER}.self_attn.indexer.wq_b", True),
        ("GlmMoeDsaForCausalLM", f"{LAYER}.self_attn.indexer.wk", False),
        # Routers: of most mixtures they never ask, Qwen3's does.
        ("DeepseekV3ForCausalLM", f"{LAYER}.mlp.gate", False),
        ("MixtralForCausalLM", f"{LAYER}.block_sparse_moe.gate", False),
        ("Qwen3NextForCausalLM", f"{LAYER}.mlp.shared_expert_gate", False),
        ("Qwen3MoeForCausalLM", f"{LAYER}.mlp.gate", True),
        ("MixtralForCausalLM", f"{LAYER}.block_sparse_moe.experts.7.w1", True),
        # Towers, which releases call otherwise than vLLM.
        ("Llama4ForConditionalGeneration", "vision_model.model.layers.0.mlp.fc1", False),
        ("Llama4ForConditionalGeneration", "vision_model.patch_embedding.linear", False),
        ("Gemma3ForConditionalGeneration", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", True),
        ("Gemma3ForConditionalGeneration", "multi_modal_projector.mm_input_projection_weight", None),
        ("Qwen3_5ForConditionalGeneration", "model.visual.blocks.0.mlp.linear_fc1", True),
        ("Qwen3_5ForConditionalGeneration", "model.visual.pos_embed", False),
        ("Qwen3_5ForConditionalGeneration", "model.language_model.layers.3.self_attn.q_proj", True),
    ],
)
def test_what_asks_for_a_quantization(architecture: str, module: str, expected: bool | None) -> None:
    assert view(architecture).is_quantizable(module) is expected


@pytest.mark.parametrize(
    ("architecture", "parent", "lasts"),
    [
        ("LlamaForCausalLM", f"{LAYER}.self_attn", ("q_proj", "k_proj", "v_proj")),
        ("LlamaForCausalLM", f"{LAYER}.mlp", ("gate_proj", "up_proj")),
        ("DeepseekV3ForCausalLM", f"{LAYER}.self_attn", ("q_a_proj", "kv_a_proj_with_mqa")),
        ("DeepseekV32ForCausalLM", f"{LAYER}.self_attn.indexer", ("wk", "weights_proj")),
        ("Qwen3_5ForConditionalGeneration", "model.language_model.layers.0.linear_attn", ("in_proj_qkv", "in_proj_z")),
        ("Qwen3_5ForConditionalGeneration", "model.language_model.layers.0.linear_attn", ("in_proj_b", "in_proj_a")),
        ("JambaForCausalLM", f"{LAYER}.self_attn", ("q_proj", "k_proj", "v_proj")),
        ("GptOssForCausalLM", f"{LAYER}.self_attn", ("q_proj", "k_proj", "v_proj")),
        ("Lfm2ForCausalLM", f"{LAYER}.feed_forward", ("w1", "w3")),
    ],
)
def test_modules_that_are_loaded_as_one(architecture: str, parent: str, lasts: tuple[str, ...]) -> None:
    group = tuple(f"{parent}.{last}" for last in lasts)
    for module in group:
        assert set(view(architecture).fusion_group(module)) == set(group)


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("LlamaForCausalLM", f"{LAYER}.self_attn.o_proj"),
        ("LlamaForCausalLM", f"{LAYER}.mlp.unknown_proj"),
        ("Phi3ForCausalLM", f"{LAYER}.self_attn.qkv_proj"),
        # On disk Qwen3-Next has them as vLLM does.
        ("Qwen3NextForCausalLM", f"{LAYER}.linear_attn.in_proj_qkvz"),
        ("Qwen3NextForCausalLM", f"{LAYER}.linear_attn.in_proj_ba"),
    ],
)
def test_a_module_that_is_loaded_alone(architecture: str, module: str) -> None:
    assert view(architecture).fusion_group(module) == (module,)


def test_the_experts_of_a_layer_are_one_group() -> None:
    group = view("MixtralForCausalLM", num_local_experts=2).fusion_group(f"{LAYER}.block_sparse_moe.experts.1.w2")
    experts = f"{LAYER}.block_sparse_moe.experts"
    assert sorted(group) == [f"{experts}.{expert}.{part}" for expert in range(2) for part in ("w1", "w2", "w3")]


@pytest.mark.parametrize("version", ["0.19", "0.32"])
def test_every_group_of_every_class_has_a_name_that_all_its_members_have(version: str) -> None:
    """Rules over names and the tables of vLLM's classes together miss no group, whatever the class fuses."""
    groups = 0
    for architecture in architectures(version):
        one = view(architecture, version, num_experts=2)
        for pattern, parts in fused_parts(version, architecture):
            for part in parts:
                module = f"{pattern.rpartition('.')[0]}.{part}".replace("*", "0")
                group = one.fusion_group(module)
                names = [set(fusion_names(member, one)) for member in group if len(group) > 1]
                assert not names or set.intersection(*names), (architecture, group, names)
                groups += len(group) > 1
    assert groups > 300


@pytest.mark.parametrize(
    ("architecture", "module", "names"),
    [
        ("LlamaForCausalLM", f"{LAYER}.self_attn.q_proj", (f"{LAYER}.self_attn.{{q_proj, k_proj, v_proj}}",)),
        ("LlamaForCausalLM", f"{LAYER}.self_attn.o_proj", ()),
        ("MixtralForCausalLM", f"{LAYER}.block_sparse_moe.experts.1.w2", (f"{LAYER}.block_sparse_moe.experts.*",)),
        ("DeepseekV4ForCausalLM", "layers.0.attn.wkv", ("layers.0.attn.{wq_a, wkv}",)),
    ],
)
def test_names_of_groups(architecture: str, module: str, names: tuple[str, ...]) -> None:
    assert fusion_names(module, view(architecture, num_local_experts=2)) == names


def test_latent_attention_absorbs_one_projection() -> None:
    for architecture in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM"):
        absorbed = [last for last in ("kv_b_proj", "q_b_proj", "o_proj") if _absorbs(architecture, last)]
        assert absorbed == ["kv_b_proj"]
    assert not _absorbs("LlamaForCausalLM", "o_proj")


def _absorbs(architecture: str, last: str) -> bool:
    return view(architecture).absorbs(f"{LAYER}.self_attn.{last}")


@pytest.mark.parametrize(
    ("architecture", "module", "expected"),
    [
        ("LlamaForCausalLM", f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.qkv_proj"),
        ("MixtralForCausalLM", f"{LAYER}.block_sparse_moe.experts.7.w1", f"{LAYER}.block_sparse_moe.experts"),
        ("JambaForCausalLM", f"{LAYER}.self_attn.k_proj", f"{LAYER}.qkv_proj"),
        ("GPTNeoXForCausalLM", "embed_out", "lm_head"),
        (
            "Gemma3ForConditionalGeneration",
            "model.language_model.layers.3.mlp.up_proj",
            "language_model.model.layers.3.mlp.gate_up_proj",
        ),
        ("NemotronHForCausalLM", "backbone.layers.3.mixer.out_proj", "model.layers.3.mixer.out_proj"),
        ("LlamaForCausalLM", f"{LAYER}.mlp.unknown_proj", f"{LAYER}.mlp.unknown_proj"),
    ],
)
def test_names_in_vllm(architecture: str, module: str, expected: str) -> None:
    assert view(architecture).vllm_name(module) == expected


@pytest.mark.parametrize(
    ("architecture", "module", "expected"),
    [
        ("LlamaForCausalLM", f"{LAYER}.self_attn.k_proj", (f"{LAYER}.self_attn.k_proj",)),
        # A quantization takes its lists through the renames.
        ("JambaForCausalLM", f"{LAYER}.self_attn.k_proj", (f"{LAYER}.self_attn.k_proj",)),
        # Modules that ask under another name than theirs.
        ("FalconH1ForCausalLM", f"{LAYER}.self_attn.k_proj", (f"{LAYER}.k_proj",)),
        ("FalconH1ForCausalLM", f"{LAYER}.self_attn.o_proj", (f"{LAYER}.o_proj",)),
        # A fusion that the class does not tell the quantization about.
        ("StableLmForCausalLM", f"{LAYER}.mlp.up_proj", (f"{LAYER}.mlp.gate_up_proj",)),
        ("MiniCPM3ForCausalLM", f"{LAYER}.self_attn.q_a_proj", ()),  # asks under the empty name
        ("LlamaForCausalLM", "lm_head", ("lm_head",)),
    ],
)
def test_names_in_the_lists_of_a_quantization(architecture: str, module: str, expected: tuple[str, ...]) -> None:
    assert view(architecture, "0.32").listed_names(module) == expected


def test_layers_for_multi_token_prediction_are_their_drafters() -> None:
    deepseek = view("DeepseekV3ForCausalLM", num_hidden_layers=4)
    assert deepseek.is_quantizable("model.layers.4.self_attn.o_proj") is True
    assert deepseek.is_quantizable("model.layers.4.eh_proj") is False
    assert deepseek.is_quantizable("model.layers.3.eh_proj") is None
    assert deepseek.absorbs("model.layers.4.self_attn.kv_b_proj")
    qwen = view("Qwen3NextForCausalLM", num_hidden_layers=4)
    assert qwen.vllm_name("mtp.layers.0.self_attn.q_proj") == "model.layers.0.self_attn.qkv_proj"
    assert qwen.is_quantizable("mtp.layers.0.mlp.gate") is False
    nemotron = view("NemotronHForCausalLM", "0.32", num_hidden_layers=4)
    assert nemotron.is_quantizable("mtp.layers.0.mixer.q_proj") is False
    assert nemotron.is_quantizable("backbone.layers.0.mixer.q_proj") is True


def test_the_most_restrictive_version_decides() -> None:
    module = f"{LAYER}.conv.in_proj"  # quantized since some version after 0.19
    assert view("Lfm2ForCausalLM", "0.19").is_quantizable(module) is False
    assert view("Lfm2ForCausalLM", "0.32").is_quantizable(module) is True
    assert view("Lfm2ForCausalLM").is_quantizable(module) is False


def test_a_backend_counts_until_vllm_has_a_class() -> None:
    module = f"{LAYER}.mlp.experts.1.up_proj"
    assert view("LagunaForCausalLM", "0.19").is_quantizable(module) is None
    assert view("LagunaForCausalLM").is_quantizable(module) is True
    # Of its own in 0.19, in the backend of 0.32.
    assert view("FlexOlmoForCausalLM", "0.32").is_quantizable(module) is True
    assert view("FlexOlmoForCausalLM").is_quantizable(module) is False


@pytest.mark.parametrize("path", sorted(LOADERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_table_holds_together(path: Path) -> None:
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = table["architectures"]
    assert path.stem == f"vllm-{table['vllm'].rpartition('.')[0]}"
    assert sorted(rows) == list(rows) == list(loader.architectures(path.stem.removeprefix("vllm-")))
    assert rows.keys().isdisjoint(table["failures"])
    for name, row in rows.items():
        modules = {*row.get("quantized", ()), *row.get("unquantized", ())}
        assert set(row.get("quantized", ())).isdisjoint(row.get("unquantized", ())), name
        assert {*row.get("absorbed", ()), *row.get("experts", {}), *row.get("unlisted", ())} <= modules, name
        assert row.get("drafter") in (None, *rows), name


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_is_the_installed_vllms(tmp_path: Path) -> None:
    """The rows of a sample and of its drafters; those of all classes take a minute."""
    try:
        python = find_vllm().executable.with_name("python")
    except UserError as error:
        pytest.skip(error.message)
    start, output, reached = time.monotonic(), tmp_path / "table.yaml", tmp_path / "reached.json"
    command = [sys.executable, "-m", "tests.tools.vllm_loaders", *SAMPLE]
    options = ["--python", str(python), "--output", str(output), "--trace", str(reached)]
    subprocess.run([*command, *options], check=True, cwd=Path(__file__).parents[3], timeout=500)
    installed = yaml.safe_load(output.read_text(encoding="utf-8"))
    number = installed["vllm"].rpartition(".")[0]
    path = LOADERS / f"vllm-{number}.yaml"
    if not path.exists():
        pytest.skip(f"no table of vLLM {number}: python -m tests.tools.vllm_loaders writes it")
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["architectures"]
    assert not installed["failures"]
    for name, row in installed["architectures"].items():
        assert row == rows[name], f"{name}: run `python -m tests.tools.vllm_loaders` ({time.monotonic() - start:.0f} s)"
    _hold_reader_against_loads(yaml.safe_load(reached.read_text(encoding="utf-8")), number)


def _hold_reader_against_loads(reached: dict[str, dict[str, str]], version: str) -> None:
    """What the reader says about a module on disk is where vLLM's own `load_weights` put its weight."""
    for architecture, targets in reached.items():
        loaded = view(architecture, version)
        for module, target in targets.items():
            name = module.replace("*", "1")
            assert loaded.versions[0].locate(name) == (target.replace("*", "1") or None), (architecture, module)
