"""Histograms over the bit patterns of 16-bit magnitudes: exact, additive, and the same in any order.

A 16-bit float without its sign is a number below 32,768 that grows with the magnitude. Counting those patterns needs
no range to be known beforehand, so no batch decides where a bin lies; counts add up to the same integers whatever came
first, and every value in a bin is the same value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BINS = 1 << 15
"""Patterns of a 16-bit float without its sign."""
FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""
_CHUNK = 1 << 24  # patterns that are widened at a time
_STEPS = 100  # of the largest magnitude, from 1 down to a half


def count(tensor: torch.Tensor, *, per_head: bool = False) -> torch.Tensor:
    """Count magnitudes by their bit pattern.

    Args:
        tensor: any shape, or [batch, heads, sequence, head_dim] with ``per_head``; bfloat16 or float16. float32 is
            rounded to bfloat16, to within 2^-9, a sixteenth of half a step of FP8.
        per_head: one histogram a head.

    Returns:
        int64 [32768], or [heads, 32768].
    """
    import torch

    if per_head:
        return torch.stack([count(head) for head in tensor.unbind(1)])
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        tensor = tensor.bfloat16()
    patterns = tensor.detach().abs().contiguous().view(torch.int16).flatten()
    starts = range(0, len(patterns), _CHUNK)
    parts = (torch.bincount(patterns[start : start + _CHUNK].int(), minlength=BINS) for start in starts)
    return sum(parts, torch.zeros(BINS, dtype=torch.int64, device=tensor.device))


def magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """The value of each bin, float64 [32768]; infinite or NaN in the last ones."""
    import torch

    kind = torch.float16 if dtype == torch.float16 else torch.bfloat16
    return torch.arange(BINS, dtype=torch.int16).view(kind).double()


def percentile(counts: torch.Tensor, dtype: torch.dtype, share: float) -> torch.Tensor:
    """The smallest magnitude that at least ``share`` percent of all magnitudes do not exceed (the nearest rank).

    Args:
        counts: int64 [..., 32768].
        dtype: of what was counted.
        share: above 0 and up to 100.

    Returns:
        float32 [...]; NaN where something was not finite.
    """
    import torch

    flat = counts.cpu().reshape(-1, BINS)
    below = flat.cumsum(dim=1)
    # In integers: a share of a count above 2^53 would not be exact in floating point.
    parts = round(share * 10**6)
    ranks = [[max(-(-total * parts // 10**8), 1)] for total in map(int, below[:, -1])]
    found = magnitudes(dtype)[torch.searchsorted(below, torch.tensor(ranks)).clamp_(max=BINS - 1).squeeze(1)]
    return _finite_only(found, flat, dtype).float().reshape(counts.shape[:-1])


def least_squares(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest magnitude to scale FP8 by that loses the least: argmin over a of sum n (x - q(x; a))^2.

    ``q(x; a)`` is what x becomes through float8 e4m3fn with the scale a / 448: clipped at a, rounded, multiplied back.
    The candidates are 51, from the largest magnitude seen down to half of it: halving a scale moves the same grid by a
    binade, and changes but the clipping and the smallest numbers. Of equals the largest is taken. llm-compressor's
    observer ``mse`` searches likewise, in one batch at a time, to four fifths, with the exponent 2.4 for the square,
    and averages what it finds, which depends on the order of batches.

    Args:
        counts: int64 [..., 32768].
        dtype: of what was counted.

    Returns:
        float32 [...]; NaN where something was not finite.
    """
    import torch

    flat, values = counts.cpu().reshape(-1, BINS), magnitudes(dtype)
    best = torch.zeros(flat.shape[0], dtype=torch.float64)
    for row, numbers in enumerate(flat):
        seen = numbers.nonzero().squeeze(1)
        if not len(seen) or not bool(values[seen[-1]].isfinite()):
            continue
        x, n = values[seen].float(), numbers[seen].double()
        candidates = values[seen[-1]] * (1 - torch.arange(_STEPS // 2 + 1, dtype=torch.float64) / _STEPS)
        scales = (candidates.float() / FP8_MAX).unsqueeze(1)
        scales = scales.clamp_(min=torch.finfo(torch.float32).tiny)
        stored = (x / scales).clamp_(max=FP8_MAX).to(torch.float8_e4m3fn).float() * scales
        lost = ((x - stored).double().square() * n).sum(dim=1)
        best[row] = candidates[int(lost.argmin())]  # the first of equals
    return _finite_only(best, flat, dtype).float().reshape(counts.shape[:-1])


def _finite_only(found: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    beyond = counts[:, ~magnitudes(dtype).isfinite()].sum(dim=1) > 0
    return found.masked_fill(beyond, float("nan"))
