"""Move weights before they are rounded, so that their products are nearer to those of the 16-bit reference model.

The reference model's inputs were not rounded and saw no layer that was (GPTAQ, arXiv 2504.02692); its hidden states
differ by what the layers before lost (QEP, arXiv 2504.09629).
"""

from __future__ import annotations

from dataclasses import replace

from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.gptq.solver import in_tf32
from quantmint.pipeline.quantize.gptq.weights import InputGroup

_RIDGE = 0.5


def compensate(group: InputGroup, strength: float) -> InputGroup:
    """Return the group with targets that compensate a share ``strength`` of its error against the reference model.

    Scales are made from the targets then. A group without a reference model, as of experts, is returned unchanged.
    """
    if not group.statistics.has_reference:
        return group
    stacked = torch.cat(group.weights)
    with in_tf32():
        cross = group.statistics.cross_term(stacked)
    targets = compensated(stacked, group.statistics.hessian, cross, strength).to(stacked.dtype)
    return replace(group, targets=torch.split(targets, list(map(len, group.weights))))


def compensated(weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor, strength: float) -> torch.Tensor:
    """Return a weight, float32 [O, I], that compensates a share ``strength`` of the error of its products.

    With inputs X, ``hessian`` is X^T X, and ``cross`` X^T E, float32 [I, O], of the error E. The result is W +
    ``strength`` D, where D minimises |X D^T - E|^2 + r |D|^2. r is half of the mean diagonal, and all of D would be too
    much: other texts lose otherwise. The weight itself is returned where the regularised Hessian cannot be decomposed.
    """
    source = weight.float()
    matrix = hessian.clone()
    matrix.diagonal().add_(_RIDGE * matrix.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(lower.isfinite().all()):
        return source
    return source + strength * torch.cholesky_solve(cross, lower).t()
