"""Observe a running model: the inputs of its linear modules, and the keys and values for the cache.

Everything is kept under the model's own names, in the order in which a forward meets it first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

from quantmint.calibration.activations import storing
from quantmint.calibration.durable import whole
from quantmint.calibration.errors import CalibrationError
from quantmint.calibration.lazy import torch
from quantmint.calibration.observers import Observation, Observer, Summary, observer

Kind = Literal["input", "k", "v", "latent", "rotary"]
"""Tensor that a magnitude belongs to: the input of a linear module, the keys or values that an attention module caches,
or, of what a server caches for latent attention, the latent that all heads share or the rotated part of their keys."""
Tokens = Literal["routed", "every"]
"""Which tokens an expert's input is made of: those that the router sends there, or every token of the layer."""
Key = tuple[Kind, str]


_PLAIN = ("expert_of", "tokens", "routed_only", "batches")


class Measurement:
    """Summaries of what a running model computes, by kind and name, and the number of tokens that each expert got.

    An expert's name is that of the module that holds its layer's experts, followed by its number. ``routed_only`` are
    experts that cannot be given tokens other than the router's, because it is not known how they are called;
    ``batches`` is the number of batches that were completed.
    """

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.summaries: dict[tuple[Tokens, Key], Summary] = {}
        self.expert_of: dict[Key, str] = {}
        self.tokens: dict[str, int] = {}
        self.routed_only: set[str] = set()
        self.batches = 0
        self._inputs = observer(observation.inputs, share=observation.percentile)
        self._cache = observer(observation.cache, share=observation.percentile)
        self._largest = observer("amax")  # of what is served with a scale of 1, which must not be clipped
        self._running: Tokens = "routed"
        self._attention: list[tuple[str, int]] = []
        self._last: tuple[Any, Summary] | None = None

    def input(self, name: str, tensor: torch.Tensor, *, expert: str | None = None) -> None:
        """Add the input of linear module ``name``; ``expert`` names the expert that the module belongs to, if any."""
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
        self._add(("routed" if expert is None else self._running, key), self._last[1])

    @contextmanager
    def attending(self, name: str, rotary: int = 0) -> Iterator[None]:
        """Within the block, attribute cached keys and values to the attention module ``name``.

        ``rotary`` is the width of the rotated part of the keys of latent attention, 0 for other attention.
        """
        self._attention.append((name, rotary))
        try:
            yield
        finally:
            self._attention.pop()

    @property
    def attention(self) -> str | None:
        """Return the name of the attention module that runs now; None outside of attention."""
        return self._attention[-1][0] if self._attention else None

    def cached(self, name: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add what attention module ``name`` caches: K after the rotary embedding, V, [batch, H_kv, sequence, D]."""
        self._add(("routed", ("k", name)), self._cache.summarise(keys, per_head=True))
        self._add(("routed", ("v", name)), self._cache.summarise(values, per_head=True))
        if self._attention and self._attention[-1][1]:
            rotated = rotary_part(keys, values, self._attention[-1][1])
            self._add(("routed", ("rotary", name)), self._largest.summarise(rotated))

    def latent(self, name: str, tensor: torch.Tensor) -> None:
        """Add the latent, [..., kv_lora_rank], from which latent attention module ``name`` makes keys and values."""
        self._add(("routed", ("latent", name)), self._largest.summarise(tensor))

    def _add(self, key: tuple[Tokens, Key], summary: Summary) -> None:
        known = self.summaries.get(key)
        self.summaries[key] = summary if known is None else self._how(key[1]).combine(known, summary)

    def _how(self, key: Key) -> Observer:
        if key[0] in ("latent", "rotary"):
            return self._largest
        return self._inputs if key[0] == "input" else self._cache

    def routed(self, expert: str, tokens: int) -> None:
        """Add ``tokens`` to the number of tokens that the router sent to an expert."""
        self.tokens[expert] = self.tokens.get(expert, 0) + tokens

    def wants_every_token(self, expert: str) -> bool:
        """Return whether an expert is to be run on every token of the current batch, not only on those of the router.

        With ``experts`` "all" that is so; with "routed", only until the expert got ``min_expert_tokens``: an expert
        that never does has then seen every token of every batch, whatever their order. Experts in ``routed_only`` are
        not.
        """
        if expert in self.routed_only:
            return False
        if self.observation.experts == "all":
            return True
        return self.tokens.get(expert, 0) < self.observation.min_expert_tokens

    @contextmanager
    def every_token(self) -> Iterator[None]:
        """Within the block, count inputs of experts as of every token, apart from those of the model's own forward."""
        self._running = "every"
        try:
            yield
        finally:
            self._running = "routed"

    @property
    def is_routed(self) -> bool:
        """Return whether the model's own forward is running, as opposed to an `every_token` block."""
        return self._running == "routed"

    def end_batch(self) -> None:
        """Count a batch as completed, and free its last tensor."""
        self._last = None
        self.batches += 1

    def starved(self) -> dict[str, int]:
        """Return the experts that the router sent fewer than ``min_expert_tokens`` tokens, with their token counts."""
        floor = self.observation.min_expert_tokens
        return {expert: tokens for expert, tokens in self.tokens.items() if tokens < floor}

    def warnings(self) -> tuple[str, ...]:
        """Return sentences about experts that few tokens reached, and about experts measured on routed tokens only."""
        sentences, starved = [], self.starved()
        if starved:
            least = min(starved, key=starved.__getitem__)
            sentences.append(
                f"{len(starved):,} of {len(self.tokens):,} experts were sent fewer than "
                f"{self.observation.min_expert_tokens:,} tokens, {least} {starved[least]:,}"
            )
        if self.routed_only:
            sentences.append(
                f"of {len(self.routed_only):,} experts only the tokens that the router sends could be counted"
            )
        return tuple(sentences)

    def finish(self) -> dict[Key, torch.Tensor]:
        """Return the magnitudes by kind and name, float32 [] or [H_kv], in the order of the forward."""
        magnitudes: dict[Key, torch.Tensor] = {}
        for key in dict.fromkeys(key for _, key in self.summaries):
            floor, expert = self.observation.kv_floor, self.expert_of.get(key)
            tokens: Tokens = "every" if expert is not None and self.wants_every_token(expert) else "routed"
            amax = self._how(key).finish(self.summaries[tokens, key])
            magnitudes[key] = (
                torch.maximum(amax, torch.tensor(floor)) if key[0] in ("k", "v") and floor is not None else amax
            )
        return magnitudes

    def add(self, part: Measurement) -> None:
        """Add a measurement of other batches, or of another part of the model; ``batches`` stays as it is."""
        for key, summary in part.summaries.items():
            self._add(key, summary)
        self.expert_of.update(part.expert_of)
        self.routed_only |= part.routed_only
        for expert, tokens in part.tokens.items():
            self.routed(expert, tokens)

    def state(self) -> dict[str, Any]:
        """Return everything as values that `torch.save` writes; histograms, mostly zeros, are sparse tensors."""
        summaries = {key: (summary.total.cpu().to_sparse(), summary.dtype) for key, summary in self.summaries.items()}
        return {"summaries": summaries, **{name: getattr(self, name) for name in _PLAIN}}

    @classmethod
    def of(cls, observation: Observation, state: Mapping[str, Any]) -> Measurement:
        """Return the measurement whose `state` is given."""
        measurement = cls(observation)
        measurement.summaries = {
            key: Summary(total.to_dense(), kind) for key, (total, kind) in state["summaries"].items()
        }
        for name in _PLAIN:
            setattr(measurement, name, state[name])
        return measurement

    def save(self, path: Path) -> None:
        """Write the measurement to a file, flushed to the disk. Raises `CalibrationError` where that fails."""
        with storing("the measurement", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path) as partial:
                torch.save(self.state(), partial)

    @classmethod
    def load(cls, observation: Observation, path: Path) -> Measurement:
        """Return the measurement that `save` wrote. Raises `CalibrationError` where the file cannot be read."""
        try:
            return cls.of(observation, torch.load(path, weights_only=True))
        except (OSError, EOFError, RuntimeError, UnpicklingError, LookupError, TypeError, ValueError) as error:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            raise CalibrationError(
                f"{path}: the measurement cannot be read: {reason}; remove the file, and its texts are measured again"
            ) from error


def rotary_part(keys: torch.Tensor, values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the rotated part of latent attention's keys, [batch, H, sequence, ``width``], from what a module caches.

    Some modules cache one head, with the latent as keys and the rotated part as values. Others cache the keys and
    values of all heads; the rotated part is then the last or the first ``width`` columns of the keys, whichever are the
    same in every head. If neither are, return all keys, whose largest magnitude bounds that of the rotated part.
    """
    if keys.shape[1] == values.shape[1] == 1 and values.shape[-1] == width:
        return values
    parts = (keys[..., -width:], keys[..., :width])
    return next((part for part in parts if bool((part == part[:, :1]).all())), keys)
