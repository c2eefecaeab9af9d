"""Decompose a Hessian in place, so that one of 53,248 columns takes the memory of one matrix and not of three.

>>> decompose(matrix)             # H + r I, which becomes T, lower triangular, with T^T T = H + r I
True
>>> solved(matrix, right)         # (H + r I)^-1 right
"""

from __future__ import annotations

from quantmint.calibration.lazy import torch

_BLOCK = 2048
"""Columns that are decomposed at a time."""


def decompose(matrix: torch.Tensor) -> bool:
    """Replace a symmetric A, float32 [I, I], by the lower triangular T with T^T T = A.

    That is the Cholesky decomposition of A read from its end, which goes from the last column to the first. What lies
    above the diagonal of A is not read. Return whether A is positive definite; without that the content of ``matrix``
    is not defined.
    """
    for end in range(len(matrix), 0, -_BLOCK):
        first = max(0, end - _BLOCK)
        corner = matrix[first:end, first:end]
        lower, info = torch.linalg.cholesky_ex(corner.t().flip(0, 1))
        if int(info):
            return False
        corner.copy_(lower.flip(0, 1).t())
        panel = matrix[first:end, :first]
        panel.copy_(torch.linalg.solve_triangular(corner.t(), panel, upper=True))
        for row in range(0, first, _BLOCK):
            here = slice(row, min(row + _BLOCK, first))
            matrix[here, : here.stop].addmm_(panel[:, here].t(), panel[:, : here.stop], alpha=-1)
    matrix.tril_()
    return is_finite(matrix)


def solve_decomposed(triangle: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return X with T^T T X = ``right``, float32 [I, O], for a ``triangle`` T that `decompose` made."""
    half = torch.linalg.solve_triangular(triangle.t(), right, upper=True)
    solution: torch.Tensor = torch.linalg.solve_triangular(triangle, half, upper=False)
    return solution


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, without a tensor of answers."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
