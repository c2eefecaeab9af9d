from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calibration.calls import layer_names, record
from calibration.errors import NotReplayableError
from calibration.replica import Replica, load_resident
from calibration.weights import build

LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.fixture
def loaded(models: Callable[..., Path]) -> Callable[[str], Replica]:
    return lambda name: load_resident(models(name), "cpu")


def test_what_calls_have_in_common_is_kept_once(loaded: Callable[[str], Replica], blocks: torch.Tensor) -> None:
    replica = loaded("gemma3-text")
    recorded = [calls for _, calls in record(replica, LAYERS, [blocks[:4], blocks[4:8]])]
    (first, second), (again, _) = recorded
    masks = [call.kwargs["attention_mask"] for call in (first, second)]
    assert masks[0] is not masks[1], "one layer has a sliding window"
    assert first.kwargs["attention_mask"] is again.kwargs["attention_mask"]
    assert first.kwargs["position_ids"] is second.kwargs["position_ids"]


def test_recording_leaves_the_model_as_it_was(loaded: Callable[[str], Replica], blocks: torch.Tensor) -> None:
    replica = loaded("llama")
    with torch.inference_mode():
        before = replica.model.base_model(input_ids=blocks[:2]).last_hidden_state
        list(record(replica, LAYERS, [blocks[:2]]))
        assert torch.equal(replica.model.base_model(input_ids=blocks[:2]).last_hidden_state, before)


def change_the_loop(replica: Replica, loop: Callable[[Any, torch.Tensor, dict[str, Any]], torch.Tensor]) -> None:
    """Put another loop over the layers into a model, with Llama's own arguments for each."""
    inner = replica.model.model
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


def skipping(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[0](hidden, **arguments)


def twice(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[0](layers[0](hidden, **arguments), **arguments)


def shared(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    return layers[0](hidden, **arguments, states={})


def parallel(layers: Any, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    layers[0](hidden, **arguments)
    return layers[1](hidden, **arguments)


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (scaled, "does more between its layers"),
        (skipping, "ran 1 of its 2 layers"),
        (twice, "does more between its layers"),
        (shared, "called with dict"),
        (parallel, "does more between its layers"),
    ],
)
def test_a_loop_that_cannot_be_replayed(
    loaded: Callable[[str], Replica], blocks: torch.Tensor, loop: Any, reason: str
) -> None:
    replica = loaded("llama")
    change_the_loop(replica, loop)
    with pytest.raises(NotReplayableError, match=reason):
        list(record(replica, LAYERS, [blocks[:2]]))


def test_a_model_whose_layers_share_keys_and_values(tmp_path: Path) -> None:
    from transformers import Gemma3nTextConfig

    from calibration.replica import attention_by_layer

    Gemma3nTextConfig(
        hidden_size=32,
        intermediate_size=[64] * 4,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        vocab_size_per_layer_input=64,
        architectures=["Gemma3nForCausalLM"],
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    ).save_pretrained(tmp_path)
    model = build(tmp_path)
    with pytest.raises(NotReplayableError, match="K and V of earlier ones"):
        layer_names(model, attention_by_layer(model).values())


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "gemma3", "llama4", "qwen3-vl-moe"])
def test_the_layers_of_the_language_model_are_found(models: Callable[..., Path], name: str) -> None:
    from calibration.replica import attention_by_layer

    model = build(models(name))
    names = layer_names(model, attention_by_layer(model).values())
    assert [type(model.get_submodule(one)).__name__.endswith("DecoderLayer") for one in names] == [True, True]
