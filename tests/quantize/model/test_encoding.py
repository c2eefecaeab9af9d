"""FP8 sources in blocks, layers that only a multi-token predictor uses, and sources that are refused."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path

import pytest
import torch

from quantmint.calibration.encodings import Encoded
from quantmint.pipeline.base.errors import UserError
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.quantization import Quantization

Models = Callable[..., Path]
StructureOf = Callable[[Path], Structure]
Tensors = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
PREDICTOR = "model.layers.2"


def encode(tensors: Tensors) -> None:
    """As DeepSeek releases it: projections in FP8, everything else as it was, a predictor behind the last layer."""
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("model.layers.1.", f"{PREDICTOR}.")] = tensors[name].clone()
    tensors[f"{PREDICTOR}.eh_proj.weight"] = torch.zeros(128, 256, dtype=torch.bfloat16)
    tensors[f"{PREDICTOR}.enorm.weight"] = torch.zeros(128, dtype=torch.bfloat16)
    tensors[f"{PREDICTOR}.embed_tokens.weight"] = torch.zeros(512, 128, dtype=torch.bfloat16)
    tensors[f"{PREDICTOR}.shared_head.head.weight"] = torch.zeros(512, 128, dtype=torch.bfloat16)
    for name in [name for name in tensors if "_proj" in name and name.endswith(".weight") and "eh_proj" not in name]:
        blocks = [ceil(size / 128) for size in tensors[name].shape]
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(blocks)


def test_fp8_weights_have_their_scales(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path]
) -> None:
    plain = structure_of(models("deepseek-v3"))
    structure = structure_of(rewritten(models("deepseek-v3"), encode, quantization_config=FP8))
    assert structure.quantized_by is None
    assert structure.linear == plain.linear
    assert structure.attention == plain.attention
    weights = {module: source for module, source in structure.weights.items() if module not in structure.head}
    assert weights == {
        module: WeightSource(f"{module}.weight", encoded=Encoded("fp8_block", (f"{module}.weight_scale_inv",)))
        for module in (*structure.linear, *structure.predictor_linear)
    }
    assert list(structure.head) == ["lm_head"]
    ahead = f"{PREDICTOR}.mlp.experts.3.up_proj.weight"
    assert structure.encoded[ahead].scales == (f"{ahead}_scale_inv",)
    assert {source.tensor for source in weights.values()} == set(structure.encoded)


def test_a_predictors_projections_are_kept_and_nothing_else_of_it(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path]
) -> None:
    plain = structure_of(models("deepseek-v3"))
    structure = structure_of(rewritten(models("deepseek-v3"), encode, quantization_config=FP8))
    ahead = set(structure.kept) - set(plain.kept)
    projections = {
        name.replace("model.layers.1.", f"{PREDICTOR}.")
        for name in (*plain.linear, *plain.kept)
        if name.startswith("model.layers.1.")
    }
    assert ahead == projections | {f"{PREDICTOR}.eh_proj", f"{PREDICTOR}.shared_head.head"}


def test_a_weight_without_its_scale_is_named(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path]
) -> None:
    def lose(tensors: Tensors) -> None:
        encode(tensors)
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]

    folder = rewritten(models("deepseek-v3"), lose, quantization_config=FP8)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: it is F8_E4M3 \[256, 128\]"):
        structure_of(folder)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8, which none"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"fp8, in blocks of \[64, 64\]"),
    ],
)
def test_any_other_quantized_source_is_refused_by_its_method(
    models: Models,
    structure_of: StructureOf,
    rewritten: Callable[..., Path],
    declared: dict[str, object],
    named: str,
) -> None:
    structure = structure_of(rewritten(models("llama"), lambda _: None, quantization_config=declared))
    with pytest.raises(
        UserError, match=f"^source: found a model that is quantized already .quant_method {named}."
    ) as refused:
        select(structure, Quantization.model_validate({"scheme": "ptpc_fp8"}))
    assert "16-bit release" in str(refused.value.hint)
