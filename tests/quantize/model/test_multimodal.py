"""Language models inside of larger ones, and routers: what is not the language model's own projection stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from quantmint.pipeline.quantize.model.structure import Structure

Models = Callable[..., Path]
StructureOf = Callable[[Path], Structure]


@pytest.mark.parametrize(
    ("name", "alone", "prefix"),
    [("gemma3", "gemma3-text", "language_model."), ("llama4", "llama4-text", "language_model.")],
)
def test_the_language_model_is_what_it_is_alone(
    models: Models, structure_of: StructureOf, name: str, alone: str, prefix: str
) -> None:
    whole, part = structure_of(models(name)), structure_of(models(alone))
    assert dict(whole.linear) == {prefix + module: shape for module, shape in part.linear.items()}
    assert whole.attention == tuple(prefix + module for module in part.attention)


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3-vl-moe"])
def test_every_other_matrix_is_kept_and_listed(models: Models, structure_of: StructureOf, name: str) -> None:
    structure = structure_of(models(name))
    matrices = {
        stored.removesuffix(".weight")
        for stored, (_, info) in open_checkpoint(models(name)).tensors.items()
        if stored.endswith(".weight") and len(info.shape) == 2 and "embed" not in stored.split(".")[-2]
    }
    left = matrices - set(structure.linear)
    seen = {module for module in left if module.startswith(("vision", "model.visual", "multi_modal_projector"))}
    assert len(seen) >= 6
    assert left <= set(structure.kept)
    assert not [module for module in structure.linear if "visi" in module or "visual" in module]


def test_modules_of_the_model_have_other_names_than_tensors_on_disk(models: Models, structure_of: StructureOf) -> None:
    modules = structure_of(models("gemma3")).modules
    assert modules["language_model.model.layers.1.mlp.up_proj"] == "model.language_model.layers.1.mlp.up_proj"
    assert modules["language_model.model.layers.1.self_attn"] == "model.language_model.layers.1.self_attn"
    modules = structure_of(models("mixtral")).modules
    assert modules["model.layers.1.block_sparse_moe.experts.3.w3"] == "model.layers.1.mlp.experts.3.up_proj"
    assert modules["model.layers.1.self_attn.q_proj"] == "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "routers"),
    [
        ("llama4-text", {"model.layers.1.feed_forward.router"}),  # a linear module, by its class
        ("deepseek-v3", {"model.layers.1.mlp.gate"}),
        (
            "qwen2-moe",
            {f"model.layers.{layer}.mlp.{gate}" for layer in (0, 1) for gate in ("gate", "shared_expert_gate")},
        ),
    ],
)
def test_whatever_chooses_or_weighs_experts_is_a_router(
    models: Models, structure_of: StructureOf, name: str, routers: set[str]
) -> None:
    structure = structure_of(models(name))
    assert set(structure.kept) - {"lm_head"} == routers
    assert routers.isdisjoint(structure.linear)
