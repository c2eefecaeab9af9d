"""The arithmetic of each scheme, one function a scheme, in plain PyTorch.

A kernel takes a 16-bit weight of [O, I] and returns what is stored for it by role, scales as one value a row; the
format decides on their shape. Results equal those of llm-compressor 0.14 byte for byte, which equal amd-quark 0.13's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FP8_MAX = 448.0
"""Largest finite value of float8 e4m3fn."""


def fp8_scale(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448 in amax's own dtype; where amax is 0, that dtype's epsilon, so that nothing divides by zero.

    The scale is rounded to the dtype that it is stored in *before* anything is divided by it: what is multiplied back
    when the model runs is the very number that was divided by. (compressed-tensors, ``calculate_qparams``.)
    """
    import torch

    scale = amax / torch.tensor(FP8_MAX, dtype=amax.dtype, device=amax.device)
    return torch.where(scale == 0, torch.finfo(amax.dtype).eps, scale)


def ptpc_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 e4m3fn with one scale an output channel; activations get theirs per token when the model runs.

    Args:
        weight: [O, I], bfloat16 or float16. The quotient is rounded to that dtype, then to FP8: two roundings, which
            is what both reference libraries do.

    Returns:
        ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [O] in the weight's dtype.
    """
    import torch

    scale = fp8_scale(weight.abs().amax(dim=1))
    quotient = (weight / scale.unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX)
    return {"weight": quotient.to(torch.float8_e4m3fn), "weight_scale": scale}


KERNELS: Mapping[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {"ptpc_fp8": ptpc_fp8}
