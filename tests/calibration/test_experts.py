"""The inputs of experts, held against arithmetic that is written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.hooks import watching
from quantmint.calibration.measurement import Measurement
from quantmint.calibration.observers import Observation
from quantmint.calibration.replica import Replica, load_resident, sources
from tests.measuring import observe

Models = Callable[..., Path]
STACKED = ["mixtral", "qwen3-moe", "qwen2-moe", "deepseek-v3", "qwen3-vl-moe"]


def watch_calls(replica: Replica, batches: list[torch.Tensor]) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that each module of stacked experts is called with, by its name."""
    seen: dict[str, list[tuple[Any, ...]]] = {}
    handles = [
        module.register_forward_pre_hook(lambda _module, args, name=name: seen.setdefault(name, []).append(args))
        for name, module in replica.model.named_modules()
        if type(module).__name__.endswith("Experts")
    ]
    with torch.inference_mode():
        for batch in batches:
            replica.model.base_model(input_ids=batch)
    for handle in handles:
        handle.remove()
    return seen


@torch.inference_mode()
def by_hand(module: Any, expert: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest inputs of gate and up, and of down."""
    gate, up = torch.nn.functional.linear(tokens, module.gate_up_proj[expert]).chunk(2, dim=-1)
    return tokens.abs().amax().float(), (module.act_fn(gate) * up).abs().amax().float()


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["all", "routed"])
@pytest.mark.parametrize("name", STACKED)
def test_inputs_of_stacked_experts(models: Models, blocks: torch.Tensor, name: str, experts: Any) -> None:
    replica, batches = load_resident(models(name), "cpu"), list(blocks.split(4))
    ranges = observe(replica, batches, Observation(experts=experts, min_expert_tokens=1))
    disk = {own: stored for stored, own in sources(replica.model, replica.owned).items()}
    calls, compared = watch_calls(replica, batches), 0
    assert calls
    for layer, given in calls.items():
        module = replica.model.get_submodule(layer)
        for expert in range(module.num_experts):
            found: list[tuple[torch.Tensor, torch.Tensor]] = []
            for hidden, index, _ in given:
                tokens = hidden if experts == "all" else hidden[(index == expert).any(dim=-1)]
                if len(tokens):
                    found.append(by_hand(module, expert, tokens))
            wide, narrow = (torch.stack(column).amax() for column in zip(*found, strict=True))
            gate = disk[f"{layer}.gate_up_proj.{expert}"]
            assert ranges.inputs[gate] == wide
            torch.testing.assert_close(ranges.inputs[disk[f"{layer}.down_proj.{expert}"]], narrow, rtol=0.01, atol=0)
            compared += 1
    assert compared == sum(replica.model.get_submodule(layer).num_experts for layer in calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STACKED, "llama4-text", "gpt-oss"])
def test_what_experts_are_shown_changes_nothing_downstream(models: Models, blocks: torch.Tensor, name: str) -> None:
    replica = load_resident(models(name), "cpu")
    everything = observe(replica, blocks.split(4), Observation(experts="all"))
    routed = observe(replica, blocks.split(4), Observation(experts="routed", min_expert_tokens=1))
    single = {stored for stored in everything.inputs if ".experts." in stored}
    assert single
    for stored, amax in everything.inputs.items():
        assert amax >= routed.inputs[stored] if stored in single else amax == routed.inputs[stored]
    for stored, keys in everything.keys.items():
        assert torch.equal(keys, routed.keys[stored])
    assert any(everything.inputs[stored] > routed.inputs[stored] for stored in single)


def test_experts_that_get_their_rows_scaled(models: Models, blocks: torch.Tensor) -> None:
    """Llama 4 hands every expert all rows, scaled by its score, with zeros for those that go elsewhere."""
    replica, batches = load_resident(models("llama4-text"), "cpu"), list(blocks.split(4))
    (layer, given), *_ = watch_calls(replica, batches).items()
    module = replica.model.get_submodule(layer)
    rows = [hidden.view(module.num_experts, -1, hidden.shape[-1]) for (hidden,) in given]
    routed = observe(replica, batches, Observation(experts="routed", min_expert_tokens=1))
    every = observe(replica, batches, Observation(experts="all"))
    for expert in range(module.num_experts):
        stored = f"{layer}.{expert}.up_proj"
        assert routed.inputs[stored] == max(float(part[expert].abs().amax()) for part in rows)
        assert every.inputs[stored] == max(float(part.abs().amax()) for part in rows)


def test_an_expert_that_few_tokens_reach_counts_all_of_them(models: Models, blocks: torch.Tensor) -> None:
    replica, batches = load_resident(models("qwen3-moe"), "cpu"), list(blocks.split(4))
    every = observe(replica, batches, Observation(experts="all"))
    routed = observe(replica, batches, Observation(experts="routed", min_expert_tokens=1))
    (layer, given), *_ = watch_calls(replica, batches).items()
    tokens = torch.stack([torch.bincount(index.flatten(), minlength=4) for _, index, _ in given]).sum(dim=0).tolist()
    floor = sorted(tokens)[2]  # two experts are below it
    mixed = observe(replica, batches, Observation(experts="routed", min_expert_tokens=floor))
    backwards = observe(replica, batches[::-1], Observation(experts="routed", min_expert_tokens=floor))
    for expert, count in enumerate(tokens):
        wanted = every if count < floor else routed
        for part in ("gate_proj", "down_proj"):
            stored = f"{layer}.{expert}.{part}"
            assert mixed.inputs[stored] == backwards.inputs[stored] == wanted.inputs[stored]


@pytest.mark.parametrize("experts", ["all", "routed"])
def test_tokens_are_counted_as_the_router_sends_them(models: Models, blocks: torch.Tensor, experts: Any) -> None:
    from quantmint.calibration.ranges import run_resident

    replica, batches = load_resident(models("mixtral"), "cpu"), list(blocks.split(4))
    observation = Observation(experts=experts, min_expert_tokens=600)
    whole = Measurement(observation)
    for part in (batches[:1], batches[1:]):
        whole.add(run_resident(replica, part, observation))
    for layer, given in watch_calls(replica, batches).items():
        tokens = torch.stack([torch.bincount(index.flatten(), minlength=4) for _, index, _ in given]).sum(dim=0)
        assert [whole.tokens[f"{layer}.{expert}"] for expert in range(4)] == tokens.tolist()
    assert whole.starved() == {expert: tokens for expert, tokens in whole.tokens.items() if tokens < 600}


class UnknownExperts(torch.nn.Module):
    """Called in a way that nobody could imitate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, hidden: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = hidden.split(sizes)
        return torch.cat([torch.nn.functional.linear(part, self.weight[n]) for n, part in enumerate(parts)])

    def get_output_embeddings(self) -> None:
        return None


def test_experts_that_cannot_be_called_count_what_the_router_sends() -> None:
    torch.manual_seed(0)
    model, hidden = UnknownExperts(), torch.randn(10, 8)
    measurement = Measurement(Observation(experts="all", min_expert_tokens=5))
    with watching(model, "", measurement), torch.inference_mode():
        model(hidden, [7, 3])
    assert measurement.routed_only
    found = measurement.finish()
    assert sorted(found.values()) == sorted([hidden[:7].abs().amax(), hidden[7:].abs().amax()])
    assert measurement.warnings() == (
        "1 of 2 experts were sent fewer than 5 tokens, .1 3",
        "of 2 experts only the tokens that the router sends could be counted",
    )
