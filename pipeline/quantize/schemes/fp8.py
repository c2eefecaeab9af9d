"""FP8 e4m3fn weights with a floating-point scale: per output channel, per tensor, or per block of 128 x 128.

Bytes equal those of llm-compressor 0.14, which equal amd-quark 0.13's. In plain PyTorch: the same lines as C++ from
``torch.compile`` (PyTorch 2.13) took twice as long on a CPU, and on a GPU the bus is the bound. `make bench-kernels`
measures both again.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantmint.calibration.elements import decode_elements
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.schemes.scales import BLOCK, FP8_MAX, amax, fp8_scale
from quantmint.pipeline.quantize.schemes.scheme import Grid, Kernel, Parts, WeightScheme


def ptpc_fp8(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as FP8 e4m3fn with one scale for each output channel; activations are scaled per token at run time.

    The quotient is rounded to the dtype of ``weight``, [O, I] of 16 or 32 bits, then to FP8: two roundings, which is
    what both reference libraries do. Return ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [O].
    """
    largest = amax(weight, dim=1)
    scale = fp8_scale(largest)
    return {"weight": _to_fp8(weight, scale.unsqueeze(1), largest.unsqueeze(1)), "weight_scale": scale}


def fp8(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Parts:
    """Encode as FP8 e4m3fn with one scale for the whole matrix; the scale of its input comes from calibration.

    ``largest`` is the largest magnitude of the whole matrix, or of all matrices that share its scale; None where
    ``weight`` is the whole matrix and not some of its rows. Return ``weight`` [O, I] float8_e4m3fn and ``weight_scale``
    [].
    """
    if largest is None:
        largest = amax(weight)
    scale = fp8_scale(largest)
    return {"weight": _to_fp8(weight, scale, largest), "weight_scale": scale}


def fp8_block(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as FP8 e4m3fn with one scale for each block of 128 x 128; blocks at the edges may be smaller.

    Return ``weight`` [O, I] float8_e4m3fn and ``weight_scale`` [ceil(O/128), ceil(I/128)].
    """
    blocks, largest = _blocks(weight)
    return _of_blocks(weight, blocks, fp8_scale(largest), largest)


def ptpc_fp8_exact(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as `ptpc_fp8`, but with a power of two as scale for channels that FP8 then holds without loss.

    An element of MXFP4 is c 2^k with c = 0.5, 1, 1.5, 2, 3, 4 or 6 and the k of its group. Divided by a scale 2^s it is
    an E4M3 number for -8 <= k - s <= 6: 6 * 2^6 = 384 is below 448, and 0.5 * 2^-8 is the smallest number of all. So a
    channel is exact where its groups' exponents span no more than 14. Other channels are rounded as by `ptpc_fp8`.
    """
    largest = amax(weight, dim=1).unsqueeze(1)
    scale = _exact_scale(weight, largest, (1,))
    return {"weight": _to_fp8(weight, scale, largest), "weight_scale": scale.squeeze(1)}


def fp8_block_exact(weight: torch.Tensor, _: torch.Tensor | None = None) -> Parts:
    """Encode as `fp8_block`, but with a power of two as scale for blocks that FP8 then holds without loss."""
    blocks, largest = _blocks(weight)
    scale = _exact_scale(blocks, largest[:, None, :, None], (1, 3)).view(largest.shape)
    return _of_blocks(weight, blocks, scale, largest)


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [O, I] in blocks [m, 128, n, 128], zeros at the edges, and their largest magnitudes, [m, n]."""
    from torch.nn.functional import pad

    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    # By columns first: a reduction over the outer dimension is the one that vector units like.
    by_column = amax(blocks.view(blocks.shape[0], BLOCK, -1), dim=1)
    return blocks, amax(by_column.view(blocks.shape[0], blocks.shape[2], BLOCK), dim=2)


def _of_blocks(weight: torch.Tensor, blocks: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> Parts:
    """Return the stored parts of a weight in ``blocks`` with a ``scale`` and a ``largest`` magnitude each, [m, n]."""
    (rows, columns), (above, _, across, _) = weight.shape, blocks.shape
    quotient = _to_fp8(blocks, scale[:, None, :, None], largest[:, None, :, None])
    stored = quotient.view(above * BLOCK, across * BLOCK)[:rows, :columns].contiguous()
    return {"weight": stored, "weight_scale": scale}


def _exact_scale(weight: torch.Tensor, largest: torch.Tensor, shared: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of numbers that share one along the dimensions ``shared``.

    It is the least power of two that brings the ``largest`` into E4M3's range, where no number is lost by it, and else
    the scale of round-to-nearest.
    """
    exponent = torch.frexp(largest.float() / FP8_MAX).exponent.clamp(-126, 127)
    power = ((exponent + 127) << 23).view(torch.float32).to(weight.dtype)
    quotient = weight / power
    if _is_coarse(quotient):
        return torch.where(largest > 0, power, fp8_scale(largest))
    exact = _fits_e4m3(quotient).view(torch.uint8).amin(dim=shared, keepdim=True).bool()
    return torch.where(exact & (largest > 0), power, fp8_scale(largest))


def _is_coarse(numbers: torch.Tensor) -> bool:
    """Return whether all bfloat16 numbers have at most one mantissa bit and none lies between zero and 2^-8.

    Elements of MXFP4 mostly are so, and all are E4M3 numbers then. It takes a fifth of the time of `_fits_e4m3` on a
    CPU.
    """
    bits = numbers.view(torch.int16) & 0x7FFF
    if int((bits & 0x3F).amax()):
        return False
    return int(bits.sub_(1).bitwise_and_(0x7FFF).amin()) >= (119 << 7) - 1  # zero has become the largest


def _fits_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """Return whether each bfloat16 number, of at most 448, is an E4M3 number, by its bits: bool of the same shape.

    Of the 7 bits of the mantissa the last 4 must be zero, and one more for each power of two below 2^-6, down to 2^-9.
    """
    bits = numbers.view(torch.int16) & 0x7FFF
    fits = ((bits & 0x0F) == 0) & (bits >= 121 << 7)
    for zeros, exponent in ((0x1F, 120), (0x3F, 119)):
        fits |= ((bits & zeros) == 0) & (bits >= exponent << 7)
    return fits | (bits == 118 << 7) | (bits == 0)


def _to_fp8(weight: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    quotient = weight / scale
    # Rounding is monotone, so the quotient of the largest is the largest quotient: it exceeds the format only where
    # the scale is subnormal, and then all are brought back.
    if not bool((largest / scale <= FP8_MAX).all()):
        quotient.clamp_(-FP8_MAX, FP8_MAX)
    return quotient.to(torch.float8_e4m3fn)


def _decode(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 [O, I] with scales per channel, [O] or [O, 1], or one per tensor, [] or [1]."""
    weight, scale = decode_elements("e4m3", 8, parts["weight"]), parts["weight_scale"].float()
    return weight * (scale.reshape(-1, 1) if scale.numel() == weight.shape[0] else scale.reshape(()))


def _decode_blocks(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode to float32 [O, I] with scales of blocks, [ceil(O/128), ceil(I/128)]."""
    weight, scale = decode_elements("e4m3", 8, parts["weight"]), parts["weight_scale"].float()
    rows, columns = weight.shape
    return weight * scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def _decode_sample(parts: Parts, stride: int) -> torch.Tensor:
    weight, scale = parts["weight"][::stride].float(), parts["weight_scale"]
    step = scale[::stride].unsqueeze(1) if scale.ndim == 1 else scale
    if scale.ndim == 2:  # of blocks
        step = scale.repeat_interleave(BLOCK // stride, 0)
        step = step[: len(weight)].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight * step.float()


_GRID = Grid(3, -6, -FP8_MAX, FP8_MAX)
_PTPC = Kernel("ptpc_fp8", ptpc_fp8, _decode, grid=_GRID, decode_sample=_decode_sample)
_TENSOR = Kernel("fp8", fp8, _decode, whole=True, grid=_GRID, decode_sample=_decode_sample)
_BLOCKS = Kernel("fp8_block", fp8_block, _decode_blocks, rows=BLOCK, decode_sample=_decode_sample)
_PTPC_EXACT = Kernel("ptpc_fp8_exact", ptpc_fp8_exact, _decode, decode_sample=_decode_sample)
_BLOCKS_EXACT = Kernel("fp8_block_exact", fp8_block_exact, _decode_blocks, rows=BLOCK, decode_sample=_decode_sample)

SCHEMES = (
    WeightScheme("ptpc_fp8", _decode, {"compressed-tensors": _PTPC, "quark": _PTPC}, 24.0, exact=_PTPC_EXACT),
    WeightScheme("fp8", _decode, {"compressed-tensors": _TENSOR, "quark": _TENSOR}, 20.0),
    WeightScheme(
        "fp8_block", _decode_blocks, {"compressed-tensors": _BLOCKS, "quark": _BLOCKS}, 24.0, exact=_BLOCKS_EXACT
    ),
)
