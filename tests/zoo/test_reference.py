"""The reference runtime answers for models whose modules on disk are split or joined in transformers, or stacked."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.pipeline.base.schemes import scheme
from quantmint.pipeline.quantize.rounding import round_activations
from quantmint.pipeline.serving.reference.model import load
from tests.zoo import matrix, served

MODELS = {
    "hrm_text": 0.1,  # gate, q, k and v of attention are one tensor on disk, four modules in transformers
    "minimax_m3_vl": 0.3,  # gate and up of the shared experts are two tensors on disk, one module in transformers
    "ernie4_5_vl_moe": 1.0,  # the experts of images follow those of text in one list; a router that sways
}
"""The mean distance that quantization may move the log probabilities of each, nats."""


@pytest.fixture(scope="module")
def checkpoints(zoo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a model's name to the folders of its source and its checkpoint in ptpc_fp8."""
    workdir = tmp_path_factory.mktemp("zoo")

    @cache
    def make(name: str) -> tuple[Path, Path]:
        source, out = matrix.source(name, zoo_root), workdir / "made" / name
        outcome = matrix.outcome_of(name, "ptpc_fp8", source, out, keep=True)
        assert str(outcome) == "sound"
        return source, out

    return make


@pytest.mark.parametrize(("name", "limit"), MODELS.items())
def test_a_checkpoint_answers_near_its_source(checkpoints: Any, name: str, limit: float) -> None:
    source, checkpoint = (served._logprobs(load(folder, "cpu").model) for folder in checkpoints(name))
    assert 0 < served.distance(source, checkpoint) < limit


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_transformers_loads(checkpoints: Any, name: str) -> None:
    """Each tensor of the model is bit by bit the one that transformers makes of the dequantized tensors on disk."""
    _, folder = checkpoints(name)
    state, expected = load(folder, "cpu").model.state_dict(), served._dequantized(folder).state_dict()
    assert state.keys() == expected.keys()
    assert [key for key in state if not torch.equal(state[key], expected[key])] == []


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("hrm_text", ("gate_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
        ("minimax_m3_vl", ("gate_up_proj", "down_proj")),
    ],
)
def test_the_input_of_each_layer_is_rounded(checkpoints: Any, name: str, layers: tuple[str, ...]) -> None:
    model = load(checkpoints(name)[1], "cpu").model
    decoder = model.get_decoder()
    linear = {key: module for key, module in decoder.named_modules() if key.rpartition(".")[2] in layers}
    assert {key.rpartition(".")[2] for key in linear} == set(layers)
    for key, module in linear.items():
        if not isinstance(module, torch.nn.Linear):
            continue
        inputs = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0))
        rounded = round_activations(inputs, scheme("ptpc_fp8").activations, None)
        assert torch.equal(module(inputs), rounded @ module.weight.t()), key


def test_experts_of_images_round_their_inputs(checkpoints: Any) -> None:
    model = load(checkpoints("ernie4_5_vl_moe")[1], "cpu").model
    experts = next(module for key, module in model.named_modules() if key.endswith("vision_moe.experts"))
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    index, weights = torch.full((5, 1), 2), torch.ones(5, 1)
    rounded = round_activations(hidden, scheme("ptpc_fp8").activations, None)
    assert not torch.equal(rounded, hidden)
    with torch.inference_mode():
        assert torch.equal(experts(hidden, index, weights), experts(rounded, index, weights))
