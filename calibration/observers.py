"""Observers: how many numbers become the one magnitude that a scale is made from.

    >>> observer("amax").finish(observer("amax").summarise(torch.tensor([-3.0, 1.0])))
    tensor(3.)

A summary is a tensor, and summaries of parts are combined into the whole's by an operation that no order can change:
batches may come in any order, on any number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:
    import torch

ObserverName = Literal["amax", "percentile", "mse"]
ExpertTokens = Literal["all", "routed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What is measured, and how; all of it shapes the ranges.

    ``inputs`` and ``cache`` name the observers of linear inputs, and of K and V; ``percentile`` is that of the observer
    of this name. ``kv_floor`` is the least magnitude of K and V, so that no scale is smaller. ``experts`` says which
    tokens count for an expert's inputs; with "routed", one that gets fewer than ``min_expert_tokens`` counts all.
    """

    inputs: ObserverName = "amax"
    cache: ObserverName = "amax"
    percentile: float = 99.99
    kv_floor: float | None = None
    experts: ExpertTokens = "all"
    min_expert_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known of many numbers: their largest magnitude or a histogram, and the dtype that they had."""

    total: torch.Tensor
    dtype: torch.dtype


class Observer(Protocol):
    """One way to make a magnitude."""

    def summarise(self, tensor: torch.Tensor, *, per_head: bool = False) -> Summary:
        """Summarise a tensor of any shape, or of [batch, heads, sequence, head_dim], then by head."""
        ...

    def combine(self, one: Summary, other: Summary) -> Summary:
        """The summary of both parts; on the device of the first."""
        ...

    def finish(self, whole: Summary) -> torch.Tensor:
        """The magnitude, float32 [] or [heads] on the CPU; NaN or infinite where something that was seen is."""
        ...


class _Amax:
    """The largest magnitude: what llm-compressor calls static_minmax, for a symmetric scheme."""

    def summarise(self, tensor: torch.Tensor, *, per_head: bool = False) -> Summary:
        magnitude = tensor.detach().abs()
        return Summary((magnitude.amax(dim=(0, 2, 3)) if per_head else magnitude.amax()).float(), tensor.dtype)

    def combine(self, one: Summary, other: Summary) -> Summary:
        import torch

        return Summary(torch.maximum(one.total, other.total.to(one.total.device)), one.dtype)

    def finish(self, whole: Summary) -> torch.Tensor:
        return whole.total.cpu()


@dataclass(frozen=True, slots=True)
class _FromHistogram:
    """A magnitude that follows from how often each one was seen."""

    rule: Callable[[torch.Tensor, torch.dtype], torch.Tensor]

    def summarise(self, tensor: torch.Tensor, *, per_head: bool = False) -> Summary:
        from calibration.histogram import count

        return Summary(count(tensor, per_head=per_head), tensor.dtype)

    def combine(self, one: Summary, other: Summary) -> Summary:
        return Summary(one.total + other.total.to(one.total.device), one.dtype)

    def finish(self, whole: Summary) -> torch.Tensor:
        return self.rule(whole.total, whole.dtype)


def observer(name: ObserverName, *, share: float = 99.99) -> Observer:
    """The observer of that name; ``share`` is the percentile's."""
    from calibration import histogram

    if name not in get_args(ObserverName):
        raise ValueError(f"found no observer {name!r}, expected one of {', '.join(get_args(ObserverName))}")
    if name == "amax":
        return _Amax()
    if name == "mse":
        return _FromHistogram(histogram.least_squares)
    return _FromHistogram(lambda counts, dtype: histogram.percentile(counts, dtype, share))
