"""X^T X of stacked experts: of the tokens that a router sends to each, rounded as they will be; some at a time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from quantmint.calibration.experts import ExpertCollector, rounding_experts, stacks

WIDTH, INNER, TOKENS = 8, 6, 60


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": 4, "num_attention_heads": 2}
        self.experts = MixtralExperts(MixtralConfig(**sizes, num_key_value_heads=2))
        for parameter in self.experts.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.shape[1]))


def coarse(entering: torch.Tensor) -> torch.Tensor:
    return (4 * entering).round() / 4


@pytest.fixture
def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=random)
    index = torch.randint(0, 2, (TOKENS, 1), generator=random)
    index[:5] = 2  # fewer than the width; the last expert gets none
    return hidden, index, torch.rand(TOKENS, 1, generator=random)


@pytest.mark.parametrize("step", [1, 4])
def test_sums_are_of_the_tokens_that_reach_an_expert(
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], step: int
) -> None:
    model, (hidden, index, weights) = Model(), given
    names = stacks(model, "experts", {"experts.down_proj.0": coarse, "experts.gate_up_proj.0": coarse})
    assert names == ["experts.gate_up_proj", "experts.down_proj"], "in the order of the products"
    roundings = {f"{name}.{number}": coarse for name in names for number in range(4)}
    for name in names:
        found, of_all = {}, None
        for start in range(0, 4, step):
            sums = ExpertCollector(name, range(start, start + step), pooled=not start)
            with torch.inference_mode():
                with rounding_experts(model, names, roundings, sums):
                    model.experts(hidden, index, weights)
                of_all = of_all if start else sums.of_all()
                found |= {one.modules[0]: one for one in sums.statistics(of_all)}
        with torch.inference_mode(), rounding_experts(model, names, roundings):
            made = model.experts(hidden, index, weights)
        rows, outputs = by_hand(model, name, hidden, index, weights)
        assert torch.allclose(made, outputs, atol=1e-5), "and the model goes on with what was rounded"
        assert list(found) == [f"{name}.{number}" for number in range(3)]
        everything = torch.cat(list(rows.values()))
        for number in range(3):
            one, width = found[f"{name}.{number}"], everything.shape[1]
            assert one.tokens == len(rows[number])
            assert one.pooled == (len(rows[number]) < width)
            counted = everything if one.pooled else rows[number]
            assert torch.allclose(one.hessian, counted.t() @ counted, atol=1e-4)
    assert found[f"{names[0].replace('gate_up', 'down')}.2"].pooled


def test_nothing_holds_on_to_a_stack_whose_products_were_watched() -> None:
    """A layer of DeepSeek R1 has 22 GB of them, and the next layer needs the room before cycles are collected."""
    model = Model()
    stack = weakref.ref(model.experts.gate_up_proj)
    roundings = {"experts.gate_up_proj.0": coarse}
    gc.disable()
    try:
        with torch.inference_mode(), rounding_experts(model, ["experts.gate_up_proj"], roundings):
            model.experts(torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1))
        del model
        assert stack() is None
    finally:
        gc.enable()


def by_hand(
    model: Model, name: str, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """What enters a product by expert, and what the experts make of it."""
    rows, outputs = {}, torch.zeros_like(hidden)
    with torch.inference_mode():
        for number in range(3):
            chosen = index[:, 0] == number
            came = coarse(hidden[chosen])
            gate, up = (came @ model.experts.gate_up_proj[number].t()).chunk(2, dim=-1)
            inner = coarse(torch.nn.functional.silu(gate) * up)
            rows[number] = came if name.endswith("gate_up_proj") else inner
            outputs[chosen] = inner @ model.experts.down_proj[number].t() * weights[chosen]
    return rows, outputs
