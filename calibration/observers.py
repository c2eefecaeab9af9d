"""Observers: how many numbers become the one magnitude that a scale is made from.

    >>> observer("amax").finish(observer("amax").summarise(torch.tensor([-3.0, 1.0])))
    tensor(3.)

A summary is a tensor, and summaries of parts are combined into the whole's by an operation that no order can change:
batches may come in any order, on any number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quantmint.calibration.lazy import torch

BINS = 1 << 15
"""Patterns of a 16-bit float without its sign."""
FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""
_CHUNK = 1 << 24  # patterns that are widened at a time
_STEPS = 100  # of the largest magnitude, from 1 down to a half


def count(tensor: torch.Tensor, *, per_head: bool = False) -> torch.Tensor:
    """Count magnitudes by their bit pattern: int64 [32768], or [heads, 32768] with ``per_head``.

    ``tensor`` is bfloat16 or float16 of any shape; with ``per_head`` it is [batch, heads, sequence, head_dim]. Other
    dtypes are rounded to bfloat16, to within 2^-9, a sixteenth of half a step of FP8.
    """
    if per_head:
        return torch.stack([count(head) for head in tensor.unbind(1)])
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        tensor = tensor.bfloat16()
    patterns = tensor.detach().abs().contiguous().view(torch.int16).flatten()
    starts = range(0, len(patterns), _CHUNK)
    parts = (torch.bincount(patterns[start : start + _CHUNK].int(), minlength=BINS) for start in starts)
    return sum(parts, torch.zeros(BINS, dtype=torch.int64, device=tensor.device))


def magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """Return the magnitude that each bin of `count` stands for, float64 [32768]; the last bins are infinite or NaN.

    ``dtype`` is that of the counted tensor; any but float16 counts as bfloat16.
    """
    kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
    return torch.arange(BINS, dtype=torch.int16).view(kind).double()


def percentile(counts: torch.Tensor, dtype: torch.dtype, share: float) -> torch.Tensor:
    """Return the smallest magnitude that at least ``share`` percent of all magnitudes do not exceed (nearest rank).

    ``counts``, int64 [..., 32768], says how often each magnitude of a 16-bit ``dtype`` occurred, by its bits without
    the sign. The result is float32 [...]; NaN where something was not finite.
    """
    flat = counts.cpu().reshape(-1, BINS)
    below = flat.cumsum(dim=1)
    # In integers: a share of a count above 2^53 would not be exact in floating point.
    parts = round(share * 10**6)
    ranks = [[max(-(-total * parts // 10**8), 1)] for total in map(int, below[:, -1])]
    found = magnitudes(dtype)[torch.searchsorted(below, torch.tensor(ranks)).clamp_(max=BINS - 1).squeeze(1)]
    return _finite_only(found, flat, dtype).float().reshape(counts.shape[:-1])


def least_squares(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the magnitude a to scale FP8 by that has the least squared error, argmin over a of sum n (x - q(x; a))^2.

    ``counts``, int64 [..., 32768], says how often each magnitude x of a 16-bit ``dtype`` occurred (n), by its bits
    without the sign. ``q(x; a)`` is x after float8 e4m3fn with the scale a / 448: clipped at a, rounded, multiplied
    back. The 51 candidates go from the largest magnitude down to half of it: halving a scale moves the same grid by a
    binade, and changes only the clipping and the smallest numbers. Among equal errors the largest a is taken. The
    result is float32 [...]; NaN where something was not finite.
    """
    flat, values = counts.cpu().reshape(-1, BINS), magnitudes(dtype)
    best = torch.zeros(flat.shape[0], dtype=torch.float64)
    for row, numbers in enumerate(flat):
        bins = numbers.nonzero().squeeze(1)
        if not len(bins) or not bool(values[bins[-1]].isfinite()):
            continue
        x, n = values[bins].float(), numbers[bins].double()
        candidates = values[bins[-1]] * (1 - torch.arange(_STEPS // 2 + 1, dtype=torch.float64) / _STEPS)
        scales = (candidates.float() / FP8_MAX).unsqueeze(1)
        scales = scales.clamp_(min=torch.finfo(torch.float32).tiny)
        stored = (x / scales).clamp_(max=FP8_MAX).to(torch.float8_e4m3fn).float() * scales
        lost = ((x - stored).double().square() * n).sum(dim=1)
        best[row] = candidates[int(lost.argmin())]  # the first of equals
    return _finite_only(best, flat, dtype).float().reshape(counts.shape[:-1])


def _finite_only(ranges: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    beyond = counts[:, ~magnitudes(dtype).isfinite()].sum(dim=1) > 0
    return ranges.masked_fill(beyond, float("nan"))


ObserverName = Literal["amax", "percentile", "mse"]
ExpertTokens = Literal["all", "routed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The settings of a measurement; each of them affects the ranges.

    ``inputs`` and ``cache`` name the observers of linear inputs, and of K and V; ``percentile`` is the share, in
    percent, of the observer of that name. ``kv_floor`` is the least magnitude of K and V, so that no scale is smaller.
    ``experts`` says which tokens count for an expert's inputs; with "routed", an expert that gets fewer than
    ``min_expert_tokens`` is measured on all tokens.
    """

    inputs: ObserverName = "amax"
    cache: ObserverName = "amax"
    percentile: float = 99.99
    kv_floor: float | None = None
    experts: ExpertTokens = "all"
    min_expert_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of many numbers: ``total`` is their largest magnitude or a histogram, ``dtype`` is theirs."""

    total: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Observer:
    """Reduces tensors to one magnitude: by ``rule`` from a histogram of magnitudes, or without a rule to the largest.

    The largest magnitude is what llm-compressor calls static_minmax, for a symmetric scheme.
    """

    rule: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None

    def summarise(self, tensor: torch.Tensor, *, per_head: bool = False) -> Summary:
        """Summarise a tensor of any shape; with ``per_head``, each head of [batch, heads, sequence, head_dim] apart."""
        if self.rule is not None:
            return Summary(count(tensor, per_head=per_head), tensor.dtype)
        magnitude = tensor.detach().abs()
        return Summary((magnitude.amax(dim=(0, 2, 3)) if per_head else magnitude.amax()).float(), tensor.dtype)

    def combine(self, one: Summary, other: Summary) -> Summary:
        """Return the summary of both parts, on the device of the first."""
        how = torch.maximum if self.rule is None else torch.add
        return Summary(how(one.total, other.total.to(one.total.device)), one.dtype)

    def finish(self, whole: Summary) -> torch.Tensor:
        """Return the magnitude, float32 [] or [heads] on the CPU; NaN or infinite where a summarised number is."""
        return whole.total.cpu() if self.rule is None else self.rule(whole.total, whole.dtype)


def observer(name: ObserverName, *, share: float = 99.99) -> Observer:
    """Return the observer of that name; ``share`` is the percentage of "percentile"."""
    if name == "amax":
        return Observer()
    return Observer(least_squares if name == "mse" else lambda counts, dtype: percentile(counts, dtype, share))
