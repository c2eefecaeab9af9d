"""What is seen of a model while it runs: the inputs of its linear modules, and what its attention hands to the cache.

Everything is kept under the model's own names, in the order in which a forward meets it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from calibration.lazy import torch
from calibration.observers import Observation, Observer, Summary, observer

Kind = Literal["input", "k", "v"]
Tokens = Literal["routed", "every"]
"""Which tokens an expert's input is made of: those that the router sends there, or every token of the layer."""
Key = tuple[Kind, str]


class Measurement:
    """Summaries by kind and name, and how many tokens each expert got.

    An expert's name is that of the module that holds its layer's experts, with its number behind. ``routed_only`` are
    experts that cannot be given tokens other than the router's, because it is not known how they are called;
    ``batches`` is how many were seen to their end.
    """

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.summaries: dict[Key, Summary] = {}
        self.every: dict[Key, Summary] = {}
        self.expert_of: dict[Key, str] = {}
        self.tokens: dict[str, int] = {}
        self.routed_only: set[str] = set()
        self.order: dict[Key, None] = {}
        self.batches = 0
        self._inputs = observer(observation.inputs, share=observation.percentile)
        self._cache = observer(observation.cache, share=observation.percentile)
        self._running: Tokens = "routed"
        self._last: tuple[Any, Summary] | None = None

    def input(self, name: str, tensor: torch.Tensor, *, expert: str | None = None) -> None:
        """Add what enters a linear module; ``expert`` names the one that the module is a part of."""
        if tensor.numel() == 0:  # no token was sent to this expert
            return
        key: Key = ("input", name)
        if expert is not None:
            if self.is_routed and self.observation.experts == "all" and expert not in self.routed_only:
                return  # every token is counted apart, with those that the router sent
            self.expert_of[key] = expert
        # Q, K and V have the same input, likewise gate and up: it is summarised once.
        if self._last is None or self._last[0] is not tensor:
            self._last = tensor, self._inputs.summarise(tensor)
        self.order[key] = None
        _add(self.summaries if expert is None or self.is_routed else self.every, key, self._last[1], self._inputs)

    def cached(self, name: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what an attention module caches: K after the rotary embedding and V, [batch, H_kv, sequence, D]."""
        kinds: tuple[tuple[Kind, torch.Tensor], ...] = (("k", keys), ("v", values))
        for kind, states in kinds:
            key: Key = (kind, name)
            self.order[key] = None
            _add(self.summaries, key, self._cache.summarise(states, per_head=True), self._cache)

    def routed(self, expert: str, tokens: int) -> None:
        """Count the tokens that the router sent to an expert."""
        self.tokens[expert] = self.tokens.get(expert, 0) + tokens

    def wants_every_token(self, expert: str) -> bool:
        """Whether an expert's inputs are to be made of every token, in the batch at hand.

        With "routed", until it has got enough: an expert that never does has then had every token of every batch,
        whatever their order, and one that does needs none of it.
        """
        if expert in self.routed_only:
            return False
        if self.observation.experts == "all":
            return True
        return self.tokens.get(expert, 0) < self.observation.min_expert_tokens

    @contextmanager
    def every_token(self) -> Iterator[None]:
        """What experts are given within is every token, and not what the model computes with."""
        self._running = "every"
        try:
            yield
        finally:
            self._running = "routed"

    @property
    def is_routed(self) -> bool:
        """Whether what runs is the model's own forward."""
        return self._running == "routed"

    def end_batch(self) -> None:
        """Let go of the last tensor."""
        self._last = None
        self.batches += 1

    def starved(self) -> dict[str, int]:
        """Experts that got fewer tokens than the floor, with how many."""
        floor = self.observation.min_expert_tokens
        return {expert: tokens for expert, tokens in self.tokens.items() if tokens < floor}

    def finish(self) -> dict[Key, torch.Tensor]:
        """The magnitudes, float32 [] or [H_kv], in the order of the forward."""
        found: dict[Key, torch.Tensor] = {}
        for key in self.order:
            kind, floor, expert = key[0], self.observation.kv_floor, self.expert_of.get(key)
            whole = (self.every if expert is not None and self.wants_every_token(expert) else self.summaries)[key]
            amax = (self._inputs if kind == "input" else self._cache).finish(whole)
            found[key] = torch.maximum(amax, torch.tensor(floor)) if kind != "input" and floor is not None else amax
        return found


def merged(parts: Iterable[Measurement]) -> Measurement:
    """Measurements of parts of the batches as one."""
    first, *others = parts
    whole = Measurement(first.observation)
    for part in (first, *others):
        for table, theirs in ((whole.summaries, part.summaries), (whole.every, part.every)):
            for key, summary in theirs.items():
                _add(table, key, summary, whole._inputs if key[0] == "input" else whole._cache)
        whole.expert_of.update(part.expert_of)
        whole.routed_only |= part.routed_only
        whole.order.update(part.order)
        for expert, tokens in part.tokens.items():
            whole.routed(expert, tokens)
    return whole


def _add(table: dict[Key, Summary], key: Key, summary: Summary, how: Observer) -> None:
    table[key] = how.combine(table[key], summary) if key in table else summary


def recording_cache(measurement: Measurement, attention: Mapping[int, str]) -> Any:
    """An empty cache of transformers; ``attention`` names the attention module of each layer."""
    from transformers import DynamicCache

    class RecordingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types that mypy could follow
        """Hands back what it is given."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            measurement.cached(attention[layer_idx], key_states, value_states)
            return key_states, value_states

    return RecordingCache()
