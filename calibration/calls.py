"""How a model calls its layers: everything but the hidden states, recorded in one run of the embedding part.

The model's own forward prepares masks, position embeddings and whatever else its architecture hands to a layer; its
layers are stood in for by recorders that hand on what they are given. What one layer returns must be, untouched, what
the next is called with: then the layers can be run one at a time, each over all batches, and the model would not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from calibration.errors import NotReplayableError
from calibration.lazy import torch
from calibration.measurement import Measurement, recording_cache
from calibration.observers import Observation
from calibration.replica import Replica

_HIDDEN = object()
_CACHE = object()
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one layer for one batch, with places for the hidden states and the cache."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, layer: Any, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        """Call the layer and return its hidden states.

        Raises `NotReplayableError` where it returns anything else.
        """

        def fill(value: Any) -> Any:
            return hidden if value is _HIDDEN else cache if value is _CACHE else value

        found = layer(*map(fill, self.args), **{name: fill(value) for name, value in self.kwargs.items()})
        if not isinstance(found, torch.Tensor):
            raise NotReplayableError(f"its layers return {type(found).__name__}, not hidden states")
        return found


def layer_names(model: Any, attention: Iterable[str]) -> list[str]:
    """Names of the decoder's layers, in order.

    Raises `NotReplayableError` where there is not one list of them that holds all attention, or they share K and V.
    """
    config = model.config.get_text_config()
    if getattr(config, "num_kv_shared_layers", 0):
        raise NotReplayableError("its last layers use K and V of earlier ones")
    attention = list(attention)
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and any(one.startswith(f"{name}.") for one in attention)
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outer) != 1:
        raise NotReplayableError("its layers are not one list")
    return [f"{outer[0]}.{number}" for number in range(len(model.get_submodule(outer[0])))]


def record(
    replica: Replica, layers: list[str], batches: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, list[Call]]]:
    """For each batch, the hidden states that enter the first layer, and the call of every layer.

    Raises `NotReplayableError` where the model does more between its layers than to hand on hidden states.
    """
    pool: list[torch.Tensor] = []
    for batch in batches:
        with torch.inference_mode():
            tape = _play(replica, layers, batch, pool)
        yield tape


def _play(
    replica: Replica, layers: list[str], batch: torch.Tensor, pool: list[torch.Tensor]
) -> tuple[torch.Tensor, list[Call]]:
    """One batch; ``pool`` has each tensor of the calls once: masks of all layers of a kind and batches are the same."""
    calls: list[Call] = []
    first: list[torch.Tensor] = []
    handed: list[Any] = []
    same: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    cache = recording_cache(Measurement(Observation()), replica.attention)

    def keep(value: Any) -> Any:
        if value is cache:
            return _CACHE
        if isinstance(value, torch.Tensor):
            latest = handed[-1] if handed else first[0]
            return _HIDDEN if value is latest else pooled(value)
        if isinstance(value, tuple):
            return tuple(map(keep, value))
        if not isinstance(value, _PLAIN):
            raise NotReplayableError(f"its layers are called with {type(value).__name__}, which they may change")
        return value

    def pooled(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in same:
            alike = (one for one in pool if one.dtype == tensor.dtype and one.shape == tensor.shape)
            known = next((one for one in alike if torch.equal(one, tensor)), None)
            if known is None:
                pool.append(known := tensor)
            same[id(tensor)] = tensor, known  # the first too: its number is not given to another meanwhile
        return same[id(tensor)][1]

    def recorder(number: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if not isinstance(hidden, torch.Tensor) or number != len(calls) or (handed and hidden is not handed[-1]):
                raise NotReplayableError("it does more between its layers than to hand on hidden states")
            if not first:
                first.append(hidden)
            calls.append(Call(tuple(map(keep, args)), {name: keep(value) for name, value in kwargs.items()}))
            # Another object each time, so that one that was kept from before cannot pass for it.
            handed.append(hidden.view_as(hidden))
            return handed[-1]

        return forward

    modules = [replica.model.get_submodule(name) for name in layers]
    for number, module in enumerate(modules):
        module.forward = recorder(number)
    try:
        replica.trunk(input_ids=batch.to(replica.device), past_key_values=cache, use_cache=True)
    finally:
        for module in modules:
            del module.forward
    if len(calls) != len(layers):
        raise NotReplayableError(f"it ran {len(calls)} of its {len(layers)} layers")
    return first[0], calls
