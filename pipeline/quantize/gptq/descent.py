"""A step of Adam (arXiv 1412.6980), in place."""

from __future__ import annotations

from quantmint.calibration.lazy import torch

_MOMENTUM, _SQUARES, _LEAST = 0.9, 0.95, 1e-12


def descend(
    numbers: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    rate: float,
    step: int,
) -> None:
    """Go step number ``step``, from 1 on, of size ``rate`` at most, down a ``gradient`` in float32.

    ``mean`` and ``square`` are the moments of the gradients so far; like ``numbers`` they are float32 of one shape.
    """
    unbiased = (1 - _SQUARES**step) ** 0.5 / (1 - _MOMENTUM**step)
    mean.lerp_(gradient, 1 - _MOMENTUM)
    square.mul_(_SQUARES).addcmul_(gradient, gradient, value=1 - _SQUARES)
    numbers.addcdiv_(mean, square.sqrt().add_(_LEAST), value=-rate * unbiased)
