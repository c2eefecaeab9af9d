"""Stacked experts: what is taken apart computes what the model's own module computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantmint.pipeline.quantize.formats.checkpoint import SINGLE_NAME
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.imagination import imagine
from quantmint.pipeline.quantize.model.selection import select
from quantmint.pipeline.quantize.model.structure import Structure
from quantmint.pipeline.recipe.quantization import Quantization

Models = Callable[..., Path]
StructureOf = Callable[[Path], Structure]
LLAMA4 = "model.layers.1.feed_forward.experts"
QWEN3_VL = "model.language_model.layers.1.mlp.experts"


def weight(folder: Path, source: WeightSource) -> torch.Tensor:
    """What an engine does with a source, in its simplest form."""
    tensor = load_file(folder / SINGLE_NAME)[source.tensor]
    matrix = tensor if source.expert is None else tensor[source.expert]
    matrix = matrix.T if source.transposed else matrix
    return matrix if source.rows is None else matrix[slice(*source.rows)]


def turn_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if "experts." in name:
            tensors[name] = tensors[name].transpose(1, 2)


def test_llama4_stacks_inputs_before_outputs(models: Models, structure_of: StructureOf) -> None:
    structure = structure_of(models("llama4-text"))
    weights = structure.weights
    assert weights[f"{LLAMA4}.2.gate_proj"] == WeightSource(
        f"{LLAMA4}.gate_up_proj", expert=2, rows=(0, 64), transposed=True
    )
    assert weights[f"{LLAMA4}.2.up_proj"] == WeightSource(
        f"{LLAMA4}.gate_up_proj", expert=2, rows=(64, 128), transposed=True
    )
    assert weights[f"{LLAMA4}.2.down_proj"] == WeightSource(f"{LLAMA4}.down_proj", expert=2, transposed=True)
    assert structure.linear[f"{LLAMA4}.2.gate_proj"] == (64, 128)
    assert structure.linear[f"{LLAMA4}.2.down_proj"] == (128, 64)


def test_the_release_of_qwen3_vl_holds_the_transpose(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path]
) -> None:
    folder = models("qwen3-vl-moe")
    saved = structure_of(folder)
    released = structure_of(rewritten(folder, turn_experts))
    assert saved == released
    for part, rows in (("gate_proj", (0, 96)), ("up_proj", (96, 192)), ("down_proj", None)):
        for structure, transposed in ((saved, False), (released, True)):
            source = structure.weights[f"{QWEN3_VL}.3.{part}"]
            assert (source.expert, source.rows, source.transposed) == (3, rows, transposed)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("name", "experts"), [("llama4-text", LLAMA4), ("qwen3-vl-moe", QWEN3_VL)])
def test_the_parts_compute_what_the_module_computes(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path], name: str, experts: str, turned: bool
) -> None:
    """Whichever way transformers reads the file, we read it the same way."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if turned and name == "llama4-text":
        pytest.skip("transformers loads no transposed Llama 4")
    folder = rewritten(models(name), turn_experts) if turned else models(name)
    weights = structure_of(folder).weights
    loader: Any = AutoModelForCausalLM if name == "llama4-text" else AutoModelForImageTextToText
    module = loader.from_pretrained(folder, dtype=torch.float32).get_submodule(experts)
    inputs = torch.randn(4, 5, 128, generator=torch.Generator().manual_seed(1))  # [expert, token, hidden]
    with torch.no_grad():
        if name == "llama4-text":
            found = module(inputs.reshape(20, 128)).view(4, 5, 128)
        else:
            chosen, share = torch.arange(4).repeat_interleave(5)[:, None], torch.ones(20, 1)
            found = module(inputs.reshape(20, 128), chosen, share).view(4, 5, 128)
    for expert in range(4):
        gate, up, down = (
            weight(folder, weights[f"{experts}.{expert}.{part}_proj"]).float() for part in ("gate", "up", "down")
        )
        expected = (torch.nn.functional.silu(inputs[expert] @ gate.T) * (inputs[expert] @ up.T)) @ down.T
        torch.testing.assert_close(found[expert], expected, rtol=1e-4, atol=1e-4)


def test_what_was_taken_apart_is_recognised(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path]
) -> None:
    folder = models("llama4-text")
    structure = structure_of(folder)

    def unstack(tensors: dict[str, torch.Tensor]) -> None:
        parts = {f"{module}.weight": weight(folder, source) for module, source in structure.weights.items()}
        for name in {source.tensor for source in structure.weights.values()}:
            del tensors[name]
        tensors |= parts

    apart = structure_of(rewritten(folder, unstack))
    assert apart == structure
    assert apart.modules == structure.modules
    assert apart.weights == {
        module: WeightSource(f"{module}.weight") for module in (*structure.linear, *structure.head)
    }


@pytest.mark.parametrize("name", ["llama4-text", "llama4", "qwen3-vl-moe"])
def test_planning_without_weights_finds_the_same(models: Models, structure_of: StructureOf, name: str) -> None:
    _, imagined = imagine(models(name))
    structure = structure_of(models(name))
    assert imagined == structure
    assert imagined.weights == structure.weights


def test_sizes_that_tell_nothing_are_not_guessed_from(
    models: Models, structure_of: StructureOf, rewritten: Callable[..., Path]
) -> None:
    """transformers itself tells the release of Qwen3-VL from a saved one by its sizes; here they are equal."""

    def square(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "experts." in name]:
            tensors[name] = torch.zeros(4, 128, 128 if "gate_up" in name else 64)

    folder = models("qwen3-vl-moe")
    text = json.loads((folder / "config.json").read_text())["text_config"] | {"moe_intermediate_size": 64}
    structure = structure_of(rewritten(folder, square, text_config=text))
    assert all("either of the last two dimensions may be the output" in why for why in structure.unclaimed.values())
    assert len(structure.unclaimed) == 2


def test_interleaved_gate_and_up_are_one_projection(models: Models, structure_of: StructureOf) -> None:
    structure = structure_of(models("gpt-oss"))
    experts = "model.layers.0.mlp.experts"
    assert structure.linear[f"{experts}.3.gate_up_proj"] == (512, 128)
    assert structure.weights[f"{experts}.3.gate_up_proj"] == WeightSource(
        f"{experts}.gate_up_proj", expert=3, transposed=True
    )
    assert structure.biases[f"{experts}.3.down_proj"] == WeightSource(f"{experts}.down_proj_bias", expert=3)
    assert not structure.unclaimed
    choice = select(structure, Quantization(scheme="mxfp4", format="compressed-tensors", exclude=("re:.*experts.*",)))
    assert f"{experts}." in choice.prefixes
    assert not any("experts" in module for module in (*choice.schemes, *choice.kept))
