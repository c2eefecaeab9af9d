"""The arithmetic of each scheme, one function a scheme, in plain PyTorch.

A kernel takes a 16-bit weight of [O, I] and returns what is stored for it by role, scales as one value a row; the
format decides on their shape. Results equal those of llm-compressor 0.14 byte for byte, which equal amd-quark 0.13's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
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


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 e4m3fn with one scale for the whole matrix; the scale of its input comes from calibration.

    Returns:
        ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [] in the weight's dtype.
    """
    import torch

    scale = fp8_scale(weight.abs().amax())
    return {"weight": (weight / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_block(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 e4m3fn with one scale a block of 128 x 128; blocks at the edges are smaller.

    Returns:
        ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [ceil(O/128), ceil(I/128)] in the weight's dtype.
    """
    import torch
    from torch.nn.functional import pad

    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = fp8_scale(blocks.abs().amax(dim=(1, 3)))
    quotient = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view_as(padded)[:rows, :columns]
    return {"weight": quotient.to(torch.float8_e4m3fn), "weight_scale": scale}


def mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """OCP MXFP4: E2M1 elements in groups of 32 along the input, each with a power of two as its scale (E8M0).

    The exponent is that of the group's largest magnitude, rounded up from a mantissa of 1.75, less 2, the exponent of
    E2M1's largest value. Elements go to the nearest value, ties to the even mantissa. Negative elements that round to
    nothing keep their sign, as llm-compressor has it.

    Args:
        weight: [O, I] with I divisible by 32, bfloat16 or float16.

    Returns:
        ``weight_packed`` uint8 [O, I/2], the even column in the low nibble, and ``weight_scale`` uint8 [O, I/32].
    """
    import torch

    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // MX_GROUP, MX_GROUP)
    # float32's exponent field is E8M0 already: adding a quarter of the mantissa's range carries 1.75 into the next one.
    bits = groups.abs().amax(dim=-1).view(torch.int32)
    exponent = (((bits + (1 << 21)) >> 23) - _E2M1_MAX_EXPONENT).clamp_(min=0)
    scaled = groups * torch.exp2(127 - exponent.float()).unsqueeze(-1)
    magnitude = scaled.abs().clamp_(max=6.0)
    # E2M1 counts in halves below 2, in ones below 4, in twos up to 6: 0 .5 1 1.5 | 2 3 | 4 6 are the codes 0 to 7.
    above_two, above_four = (magnitude >= 2).float(), (magnitude >= 4).float()
    steps = magnitude * (2 - above_two - above_four / 2)
    code = steps.round_() + 2 * (above_two + above_four) + 8 * (scaled < 0)
    pairs = code.view(rows, columns // 2, 2)
    packed = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": exponent.to(torch.uint8)}


def mxfp4_unsigned_zero(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`mxfp4` as Quark has it: the tensor is called ``weight``, and zero has no sign."""
    made = mxfp4(weight)
    packed = made["weight_packed"]
    for sign, nibble in ((0x08, 0x0F), (0x80, 0xF0)):
        packed = packed.where((packed & nibble) != sign, packed & ~nibble & 0xFF)
    return {"weight": packed, "weight_scale": made["weight_scale"]}


BLOCK = 128
"""Side of a block of fp8_block, elements."""
_CHUNK = 1 << 20  # bytes of weight that are computed at a time on a CPU: a share of its second-level cache
MX_GROUP = 32
"""Elements that share an MX scale."""
_E2M1_MAX_EXPONENT = 2  # of 6.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel with the number of rows that it can compute apart from all others; None where every row counts."""

    compute: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    rows: int | None

    def __call__(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute a whole weight of [O, I], on a CPU by chunks of rows whose intermediate results stay in its cache.

        The chunks' results are the whole's: no row of one enters another.
        """
        rows = weight.shape[0]
        if self.rows is None or weight.device.type != "cpu":
            return self.compute(weight)
        step = max(_CHUNK // (weight.shape[1] * weight.element_size() or 1) // self.rows, 1) * self.rows
        if rows <= step:
            return self.compute(weight)
        whole: dict[str, torch.Tensor] = {}
        per_row: dict[str, float] = {}
        for start in range(0, rows, step):
            for role, part in self.compute(weight[start : start + step]).items():
                if start == 0:
                    per_row[role] = part.shape[0] / step  # 1, or 1/128 for what a block has one of
                    whole[role] = part.new_empty((ceil(rows * per_row[role]), *part.shape[1:]))
                first = round(start * per_row[role])
                whole[role][first : first + part.shape[0]] = part
        return whole


KERNELS: Mapping[str, Kernel] = {
    "ptpc_fp8": Kernel(ptpc_fp8, rows=1),
    "fp8": Kernel(fp8, rows=None),
    "fp8_block": Kernel(fp8_block, rows=BLOCK),
    "mxfp4": Kernel(mxfp4, rows=1),
    "mxfp4_unsigned_zero": Kernel(mxfp4_unsigned_zero, rows=1),
}


def kernel_name(scheme: str, checkpoint_format: str) -> str:
    """Which kernel makes a scheme's weights in a format: what the activations become is no kernel's business."""
    if scheme.startswith("mxfp4"):
        return "mxfp4_unsigned_zero" if checkpoint_format == "quark" else "mxfp4"
    return scheme
