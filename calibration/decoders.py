"""Decode weights that are stored in fewer than 16 bits; `encodings` tells by their tensors how they are stored.

    ENCODINGS["mxfp4"].decode(elements, [scale])        # bfloat16 [O, I]

Numbers are computed in float32 and rounded to bfloat16 once. In block FP8 the name says inverse, but a weight is the
stored number times the scale of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Final

from quantmint.calibration.elements import NIBBLES_AWQ, bits, decode_elements, power, unpack_int4
from quantmint.calibration.lazy import torch

BLOCK = 128
"""Rows and columns of a block that shares one scale."""
WHOLE = 0
"""In `Encoding.scale_rows`: a tensor that is read whole, whichever rows are decoded."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to store a matrix [O, I] in fewer than 16 bits.

    ``decode`` takes rows of the stored tensor and their scales, and returns bfloat16 [rows, I]. ``scale_rows`` says for
    each scale tensor how many rows of the weight share one of its rows; such a tensor is read by rows, `WHOLE` ones are
    not. One item of the stored tensor holds ``elements`` elements of a row; where it ``packs_outputs``, one element of
    as many rows. A ``turned`` encoding is stored as [I, O], and is decoded whole.
    """

    decode: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    scale_rows: tuple[int, ...] = (1,)
    elements: int = 1
    turned: bool = False
    packs_outputs: bool = False

    @property
    def rows(self) -> int:
        """Return the number of rows that a range of rows to decode must be a multiple of."""
        return lcm(*(rows for rows in self.scale_rows if rows))

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        """Return [O, I] of the weight that a tensor of shape ``stored`` encodes."""
        outputs, inputs = reversed(stored) if self.turned else stored
        return (outputs * self.elements, inputs) if self.packs_outputs else (outputs, inputs * self.elements)


def decode_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply FP8 [O, I] by the scales of its 128x128 blocks, [ceil(O/128), ceil(I/128)]; return bfloat16 [O, I].

    The product is computed in float32 and rounded once.
    """
    rows, columns = weight.shape
    whole = rows // BLOCK
    numbers, factor = _widened(weight, scale)
    wide = (scale.float() * factor).repeat_interleave(BLOCK, 1)[:, :columns]  # [blocks, I]: rows of a block share it
    numbers[: whole * BLOCK].view(whole, BLOCK, columns).mul_(wide[:whole].unsqueeze(1))
    numbers[whole * BLOCK :].mul_(wide[whole:])  # the last block's, where it is not whole
    return numbers.to(torch.bfloat16)


def _decode_fp8(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply FP8 [O, I] by one scale for each row, or one for all; return bfloat16 [O, I]."""
    numbers, factor = _widened(weight, scales[0])
    return numbers.mul_((scales[0].float() * factor).reshape(-1, 1)).to(torch.bfloat16)


def _by_group(numbers: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply float32 [O, I] in place by the scales of n groups along I, float32 [O, n]; return bfloat16 [O, I].

    ``zeros``, float32 [O, n], are subtracted before.
    """
    groups = numbers.view(*scale.shape, -1)
    if zeros is not None:
        groups.sub_(zeros.unsqueeze(-1))
    return groups.mul_(scale.unsqueeze(-1)).to(torch.bfloat16).view(numbers.shape)


def _decode_mxfp8(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return _by_group(weight.float(), power(bits(scales[0])))


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two E2M1 elements of each byte as bfloat16, both in one int32: int32 [256]."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(1)
    return decode_elements("e2m1", 4, every_byte).to(torch.bfloat16).view(torch.int32).flatten()


def _decode_mxfp4(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode MXFP4, bytes [O, I/2] with E8M0 scales, to bfloat16 [O, I], by a table with two elements for each byte.

    An element times a power of two is exact in bfloat16.
    """
    rows, columns = weight.shape
    numbers = _pairs(weight.device).index_select(0, bits(weight).reshape(-1).int()).view(torch.bfloat16)
    groups = numbers.view(rows, -1, 2 * columns // scales[0].shape[1])
    return groups.mul_(power(bits(scales[0])).to(torch.bfloat16).unsqueeze(-1)).view(rows, 2 * columns)


def _decode_mxfp4_stack(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode rows of one expert, uint8 [O, I/2], to bfloat16 [O, I]; a whole stack, [E, O, n, 16], to [E, I, O].

    The latter is how transformers' module holds it.
    """
    if weight.ndim == 2:
        return _decode_mxfp4(weight, scales)
    experts, outputs = weight.shape[:2]
    decoded = _decode_mxfp4(weight.reshape(experts * outputs, -1), [scales[0].reshape(experts * outputs, -1)])
    return decoded.view(experts, outputs, -1).mT.contiguous()


def _decode_nvfp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _by_group(decode_elements("e2m1", 4, weight), scale)


@cache
def _int4_pairs(device: torch.device) -> torch.Tensor:
    """Return the two numbers, -8 to 7, of each byte of INT4 as bfloat16, both in one int32: int32 [256]."""
    every_byte = torch.arange(256, device=device)
    return (torch.stack((every_byte & 15, every_byte >> 4), dim=1) - 8).to(torch.bfloat16).view(torch.int32).flatten()


def _int4_numbers(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of INT4, int32 [O, I/8], as bfloat16 [O, I], by a table with two numbers for each byte."""
    pairs = _int4_pairs(weight.device).index_select(0, weight.contiguous().view(torch.uint8).reshape(-1).int())
    return pairs.view(torch.bfloat16).view(weight.shape[0], -1)


def _decode_int4(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode INT4, int32 [O, I/8] with scales [O, n], to bfloat16 [O, I]."""
    numbers, scale = _int4_numbers(weight), scales[0]
    if scale.dtype != torch.bfloat16:
        return _by_group(numbers.float(), scale.float())
    # A product of two bfloat16 numbers is computed in float32 and rounded once, as everywhere here.
    return numbers.view(*scale.shape, -1).mul_(scale.unsqueeze(-1)).view(numbers.shape)


def _decode_int4_zero(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode INT4 with zero points, int32 [ceil(O/8), n] with eight rows in a word: (number - zero point) * scale."""
    scale, packed = scales
    zeros = unpack_int4(packed.t().contiguous()).t()[: len(weight)]
    return _by_group(_int4_numbers(weight).float(), scale.float(), zeros)


_STRIP = 1024  # columns of a weight that is stored as [I, O] to decode at a time


def _decode_turned(
    nibbles: Callable[[int, int], torch.Tensor], zeros: torch.Tensor, scale: torch.Tensor, group_of: torch.Tensor
) -> torch.Tensor:
    """Return (number - zero point) * scale of a weight stored as [I, O], bfloat16 [O, I].

    ``nibbles(first, last)`` returns columns [first, last) of the numbers, int32 [I, last - first]. ``zeros`` and
    ``scale`` are float32 [n, O], ``group_of`` the group of each input, int [I].
    """
    outputs = scale.shape[1]
    weight = torch.empty(outputs, len(group_of), dtype=torch.bfloat16, device=scale.device)
    for first in range(0, outputs, _STRIP):
        last = min(first + _STRIP, outputs)
        numbers = nibbles(first, last).float()
        numbers.sub_(zeros[:, first:last].contiguous().index_select(0, group_of))
        numbers.mul_(scale[:, first:last].contiguous().index_select(0, group_of))
        weight[first:last] = numbers.t()
    return weight


def _in_order(inputs: int, groups: int, device: torch.device) -> torch.Tensor:
    """Return the group of each of ``inputs`` that are grouped in their order: int64 [I]."""
    return torch.arange(inputs, device=device) // (inputs // groups)


def _unpack_outputs(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Unpack int32 [n, O/8], eight outputs in a word at the places ``order``, to numbers 0 to 15: int32 [n, O]."""
    return torch.stack([(words >> (4 * place)) & 15 for place in order], dim=-1).flatten(1)


def _decode_awq(weight: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode AWQ, int32 [I, O/8] with scales [n, O] and zero points int32 [n, O/8], to bfloat16 [O, I]."""
    scale, packed = scales
    zeros = _unpack_outputs(packed, NIBBLES_AWQ).float()
    order = _in_order(len(weight), len(scale), weight.device)

    def nibbles(first: int, last: int) -> torch.Tensor:
        return _unpack_outputs(weight[:, first // 8 : last // 8], NIBBLES_AWQ)

    return _decode_turned(nibbles, zeros, scale.float(), order)


def _decode_gptq(weight: torch.Tensor, scales: Sequence[torch.Tensor], offset: int) -> torch.Tensor:
    """Decode GPTQ, int32 [I/8, O] with scales [n, O] and zero points int32 [n, O/8], to bfloat16 [O, I].

    ``offset`` is added to the stored zero points. A third tensor, int32 [I], is the group of each input; without it
    they are in order.
    """
    scale, packed, *groups = scales
    zeros = _unpack_outputs(packed, range(8)).add_(offset).float()
    order = groups[0].long() if groups else _in_order(8 * len(weight), len(scale), weight.device)

    def nibbles(first: int, last: int) -> torch.Tensor:
        words = weight[:, first:last]
        return torch.stack([(words >> (4 * place)) & 15 for place in range(8)], dim=1).flatten(0, 1)

    return _decode_turned(nibbles, zeros, scale.float(), order)


ENCODINGS: Final[Mapping[str, Encoding]] = {
    "fp8_block": Encoding(lambda weight, scales: decode_blocks(weight, scales[0]), (BLOCK,)),
    "fp8_block_e8m0": Encoding(lambda weight, scales: decode_blocks(weight, power(bits(scales[0]))), (BLOCK,)),
    "fp8_channel": Encoding(_decode_fp8),
    "fp8_tensor": Encoding(_decode_fp8, (WHOLE,)),
    "mxfp8": Encoding(_decode_mxfp8),
    "mxfp4": Encoding(_decode_mxfp4, elements=2),
    "mxfp4_stack": Encoding(_decode_mxfp4_stack, elements=2),
    "nvfp4": Encoding(
        lambda weight, scales: _decode_nvfp4(weight, scales[0].float() / scales[1].float().reshape(())),
        (1, WHOLE),
        elements=2,
    ),
    "nvfp4_by": Encoding(
        lambda weight, scales: _decode_nvfp4(weight, scales[0].float() * scales[1].float().reshape(())),
        (1, WHOLE),
        elements=2,
    ),
    "int4": Encoding(_decode_int4, elements=8),
    "int4_zero": Encoding(_decode_int4_zero, (1, 8), elements=8),
    "awq": Encoding(_decode_awq, (WHOLE,) * 2, elements=8, turned=True, packs_outputs=True),
    "gptq": Encoding(lambda weight, scales: _decode_gptq(weight, scales, 1), (WHOLE,) * 3, elements=8, turned=True),
    "gptq_v2": Encoding(lambda weight, scales: _decode_gptq(weight, scales, 0), (WHOLE,) * 3, elements=8, turned=True),
}
"""Rules by name."""


_FP16_BIAS, _E4M3_BIAS, _E4M3_NAN = 15, 7, 0x7F


def _widened(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return FP8 numbers divided by a power of two, in float32, and that power of two.

    PyTorch 2.13 converts FP8 one number at a time on a CPU, which takes four fifths of decoding. Shifted into the
    fields of float16, the bits of an FP8 number are 2 ** (7 - 15) times that number, subnormal or not, and vector
    instructions convert float16. Where a number is NaN, or a ``scale`` so large that its product with the power
    overflows, PyTorch converts, and the power is 1.
    """
    factor = 2.0 ** (_FP16_BIAS - _E4M3_BIAS)
    plain = weight.device.type != "cpu" or weight.dtype != torch.float8_e4m3fn or not weight.numel()
    if plain or not bool((scale.abs() < torch.finfo(torch.float32).max / factor).all()):
        return weight.float(), 1.0
    if int((weight.view(torch.uint8) & _E4M3_NAN).amax()) == _E4M3_NAN:
        return weight.float(), 1.0
    # Sign, five bits of exponent and ten of mantissa, of which FP8 has the lowest four and the highest three.
    fields = weight.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return fields.view(torch.float16).float(), factor
