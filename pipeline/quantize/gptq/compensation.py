"""Move weights before they are rounded, so that their products are nearer to those of the 16-bit reference model.

The reference model's inputs were not rounded and saw no layer that was (GPTAQ, arXiv 2504.02692); its hidden states
differ by what the layers before lost (QEP, arXiv 2504.09629).

A weight moves as far as tokens that it was not fitted to do not lose by it, which for narrow texts may be not at all.
It moves no further than an inspection accepts: inputs of low rank would let least squares change it at will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.gptq.decomposition import decompose, solve_decomposed
from quantmint.pipeline.quantize.gptq.solver import in_tf32
from quantmint.pipeline.quantize.gptq.weights import InputGroup, Member

_RIDGE = 0.5
_LEAST_ROWS = 32
"""Held-out rows that are too few to judge by where they are fewer."""


def compensate(group: InputGroup, strength: float, reach: Callable[[Member], float]) -> InputGroup:
    """Return the group with targets that compensate a share of its error against the reference model.

    That is the largest share, at most ``strength``, with which the products of held-out rows are no further from those
    of the reference model than the weight's own. A weight without such a share is its own target. A row of a target
    differs from the weight's by ``reach(member)`` times the row's norm at most. Scales are made from the targets then.
    A group without a reference model, as of experts, is returned unchanged.
    """
    statistics = group.statistics
    if not statistics.has_reference:
        return group
    if not strength:  # the reference model runs for tuning alone
        return replace(group, statistics=statistics.add_held_out())
    rows = list(map(len, group.weights))
    stacked, probe = torch.cat(group.weights).float(), statistics.held_out_inputs()
    with in_tf32():
        cross = statistics.cross_term(stacked)
    change = least_squares_change(statistics.hessian, cross)
    with in_tf32():
        shares = supported_shares(probe @ change.t(), statistics.held_out_errors(stacked), rows, strength)
    pieces = zip(
        group.members, group.weights, torch.split(stacked, rows), torch.split(change, rows), shares, strict=True
    )
    targets = tuple(
        moved(source, piece, share, reach(member)).to(weight.dtype) if share else weight
        for member, weight, source, piece, share in pieces
    )
    return replace(
        group,
        statistics=statistics.add_held_out(),
        targets=targets if any(shares) else None,
        compensation=tuple(shares),
        probe=probe,
    )


def least_squares_change(hessian: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """Return the change D of a weight, float32 [O, I], that minimises |X D^T - E|^2 + r |D|^2.

    With inputs X, ``hessian`` is X^T X, and ``cross`` X^T E, float32 [I, O], of the error E; r is half the mean
    diagonal. The change is zero where the regularised Hessian cannot be decomposed.
    """
    for precision in (in_tf32, nullcontext):  # the ridge hides what TF32 rounds, where it can be decomposed at all
        matrix = hessian.clone()
        matrix.diagonal().add_(_RIDGE * matrix.diagonal().mean())
        with precision():
            if decompose(matrix):
                return solve_decomposed(matrix, cross).t()
    return torch.zeros_like(cross).t()


def supported_shares(products: torch.Tensor, errors: torch.Tensor, rows: Sequence[int], most: float) -> list[float]:
    """Return, for each weight of a group, the largest share s of its change, at most ``most``, with |s P - E| <= |E|.

    P are the ``products`` of held-out inputs with the change, and E the ``errors`` that it shall compensate, float32
    [n, O]; ``rows`` are the numbers of columns of each weight. That is twice the share with the least error: on the
    first layers of SmolLM2 the least error alone lost a third of the gain on ordinary texts, and twice its share none.
    Fewer than `_LEAST_ROWS` rows support nothing.
    """
    if len(products) < _LEAST_ROWS:
        return [0.0] * len(rows)
    pairs = zip(torch.split(products, list(rows), 1), torch.split(errors, list(rows), 1), strict=True)
    shares = torch.stack([2 * (product * error).sum() / product.square().sum() for product, error in pairs])
    supported: list[float] = shares.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, most).tolist()
    return supported


def moved(weight: torch.Tensor, change: torch.Tensor, share: float, reach: float) -> torch.Tensor:
    """Return a weight, float32 [O, I], plus a share of its change; a row moves by ``reach`` times its norm at most."""
    tiny = torch.finfo(change.dtype).tiny
    limits = reach * weight.norm(dim=1, keepdim=True) / change.norm(dim=1, keepdim=True).clamp_min(tiny)
    return torch.addcmul(weight, change, limits.clamp_max(share))
