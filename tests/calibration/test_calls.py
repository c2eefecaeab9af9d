from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantmint.calibration.activations import States
from quantmint.calibration.caches import empty_cache
from quantmint.calibration.calls import loop_of, record, replay_obstacle, skipped_layers
from quantmint.calibration.errors import NotReplayableError
from quantmint.calibration.parts import layer_names
from quantmint.calibration.replica import Replica, load_resident
from quantmint.calibration.weights import build


@pytest.fixture
def loaded(models: Callable[..., Path]) -> Callable[[str], Replica]:
    return lambda name: load_resident(models(name), "cpu")


def test_what_calls_have_in_common_is_kept_once(loaded: Callable[[str], Replica], blocks: torch.Tensor) -> None:
    replica = loaded("gemma3-text")
    recorded = [calls for _, calls in record(replica, [blocks[:4], blocks[4:8]])]
    (first, second), (again, _) = recorded
    masks = [call.kwargs["attention_mask"] for call in (first, second)]
    assert masks[0] is not masks[1], "one layer has a sliding window"
    assert first.kwargs["attention_mask"] is again.kwargs["attention_mask"]
    assert first.kwargs["position_ids"] is second.kwargs["position_ids"]


def test_recording_leaves_the_model_as_it_was(loaded: Callable[[str], Replica], blocks: torch.Tensor) -> None:
    replica = loaded("llama")
    with torch.inference_mode():
        before = replica.model.base_model(input_ids=blocks[:2]).last_hidden_state
        list(record(replica, [blocks[:2]]))
        assert torch.equal(replica.model.base_model(input_ids=blocks[:2]).last_hidden_state, before)


Loop = Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]


def change_the_loop(model: Any, loop: Loop) -> None:
    """Put another loop over the layers into a model, with Llama's own arguments for each."""
    inner = model.model
    own = inner.forward

    def forward(**kwargs: Any) -> Any:
        arguments: dict[str, Any] = {}
        layer = inner.layers[0]
        recorder = layer.forward

        def first(hidden: torch.Tensor, **more: Any) -> torch.Tensor:
            arguments.update(more)
            return hidden

        layer.forward = first
        others = [module.forward for module in inner.layers[1:]]
        for module in inner.layers[1:]:
            module.forward = lambda hidden, **_: hidden
        own(**kwargs)
        layer.forward = recorder
        for module, kept in zip(inner.layers[1:], others, strict=True):
            module.forward = kept
        return loop(inner.layers, inner.embed_tokens(kwargs["input_ids"]), arguments)

    inner.forward = forward


def scaled(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden, **arguments) * 2
    return hidden


def stopping(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[0](hidden, **arguments)


def skipping(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[1](hidden, **arguments)


def twice(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[0](layers[0](hidden, **arguments), **arguments)


def listing(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[0](hidden, **arguments, states=[])


def parallel(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    layers[0](hidden, **arguments)
    return layers[1](hidden, **arguments)


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (scaled, "it does more between its layers than to hand on hidden states"),
        (stopping, "it ran 1 of its 2 layers"),
        (skipping, "it skips layer 0 on text alone"),
        (twice, "it does more between its layers than to hand on hidden states"),
        (listing, "its layers are called with list, which they may change"),
        (parallel, "it does more between its layers than to hand on hidden states"),
    ],
)
def test_a_loop_that_cannot_be_replayed(
    models: Callable[..., Path], loaded: Callable[[str], Replica], blocks: torch.Tensor, loop: Loop, reason: str
) -> None:
    """That is known of a model without weights, and again when it is run."""
    model = build(models("llama"))
    change_the_loop(model, loop)
    assert replay_obstacle(model) == reason
    replica = loaded("llama")
    change_the_loop(replica.model, loop)
    with pytest.raises(NotReplayableError, match=reason):
        list(record(replica, [blocks[:2]]))


@pytest.mark.parametrize(
    ("loop", "skipped"), [(stopping, ["1"]), (skipping, ["0"]), (scaled, []), (twice, []), (parallel, [])]
)
def test_layers_that_no_text_reaches(models: Callable[..., Path], loop: Loop, skipped: list[str]) -> None:
    model = build(models("llama"))
    assert skipped_layers(model) == ()
    change_the_loop(model, loop)
    assert skipped_layers(model) == tuple(f"model.layers.{number}" for number in skipped)


class Handing(torch.nn.Module):
    """A layer that returns a tuple, writes into a mapping, and reads what the layer before has handed on."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, shared: Any, choice: Any = None, past_key_values: Any = None) -> Any:
        count = 0 if choice is None else int(choice)
        known = sum(float(pair[1]) for pair in shared.values())
        shared[count] = torch.tensor(1.0), torch.tensor(2.0**count)
        return hidden + 100 * count + known, None, torch.tensor(count + 1)


def handing(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    shared: dict[int, Any] = {}
    choice = None
    for layer in layers:
        hidden, _, choice = layer(hidden, shared, choice)
    return hidden


def test_what_layers_hand_on_beside_hidden_states_is_carried(
    loaded: Callable[[str], Replica], models: Callable[..., Path], blocks: torch.Tensor
) -> None:
    from dataclasses import replace

    def changed(model: Any) -> Any:
        inner = model.model
        inner.layers = torch.nn.ModuleList(Handing(layer) for layer in inner.layers)
        inner.forward = lambda **kwargs: handing(inner.layers, inner.embed_tokens(kwargs["input_ids"]), kwargs)
        return model

    loop = loop_of(changed(build(models("llama"))))
    assert (loop.length, loop.width) == (3, 128)
    replica = replace(loaded("llama"), loop=loop)
    changed(replica.model)
    (states, calls), *_ = record(replica, [blocks[:2]])
    expected = replica.model.model.forward(input_ids=blocks[:2])
    for name, call in zip(loop.layers, calls, strict=True):
        tensors = {name: tensor.clone() for name, tensor in states.carried.items()}  # as from a file
        layer = replica.model.get_submodule(name)
        states = call.run(layer, States(states.hidden, tensors), empty_cache(replica.model))
        assert call.writes == (call is not calls[-1])
    assert torch.equal(states.hidden, expected)
    assert not states.carried, "nothing is behind the last layer"


def test_what_a_layer_hands_on_must_be_tensors(
    loaded: Callable[[str], Replica], models: Callable[..., Path], blocks: torch.Tensor
) -> None:
    def listed(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        shared: dict[str, Any] = {}
        for layer in layers:
            hidden = layer(hidden, **arguments, shared=shared)
        return hidden

    replica = loaded("llama")
    change_the_loop(replica.model, listed)
    (states, calls), *_ = record(replica, [blocks[:2]])

    def layer(hidden: torch.Tensor, *, shared: Any, **_: Any) -> torch.Tensor:
        shared["why"] = "so"
        return hidden

    with pytest.raises(NotReplayableError, match="its layers hand on str, which is no tensor"):
        calls[0].run(layer, states, empty_cache(replica.model))


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "gemma3", "llama4", "qwen3-vl-moe"])
def test_the_layers_of_the_language_model_are_found(models: Callable[..., Path], name: str) -> None:
    model = build(models(name))
    assert [type(model.get_submodule(layer)).__name__.endswith("DecoderLayer") for layer in layer_names(model)] == [
        True,
        True,
    ]
