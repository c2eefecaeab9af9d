"""Encodings whose scales are powers of two, stored as F8_E8M0: DeepSeek V4's FP8 in blocks and MXFP4 in I8."""

from __future__ import annotations

from math import copysign, ldexp, nan

import pytest
import torch

from quantmint.calibration.decoders import ENCODINGS
from quantmint.calibration.encodings import recognise

EXPONENTS = range(256)


def e4m3(code: int) -> float:
    """Return the number that an E4M3 code stands for, by its definition."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if code & 0x7F == 0x7F:
        return nan
    size = ldexp(mantissa, -9) if exponent == 0 else ldexp(8 + mantissa, exponent - 10)
    return copysign(size, -1 if code & 128 else 1)


def e2m1(code: int) -> float:
    """Return the number that an E2M1 code stands for, by its definition."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    size = 0.5 * mantissa if exponent == 0 else ldexp(2 + mantissa, exponent - 2)
    return copysign(size, -1 if code & 8 else 1)


def times(number: float, exponent: int) -> float:
    """Return number * 2 ** (exponent - 127); NaN for exponent 255, which is NaN."""
    return nan if exponent == 255 else ldexp(number, exponent - 127)


def bfloat16(numbers: list[list[float]]) -> torch.Tensor:
    """Round to float32, in which all of these are exact or infinite, and to bfloat16."""
    return torch.tensor(numbers, dtype=torch.float64).float().to(torch.bfloat16)


def assert_same(decoded: torch.Tensor, expected: torch.Tensor) -> None:
    """Hold two bfloat16 tensors against each other by their bits; any NaN equals any other."""
    assert decoded.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(0.0).view(torch.int16), expected.nan_to_num(0.0).view(torch.int16))


def test_fp8_in_blocks_with_e8m0_scales() -> None:
    """All codes under all exponents: two columns of blocks, 128 rows for each exponent, of which the last has fewer."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128 * 256, 1)[: 128 * 256 - 64]
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 2)
    decoded = ENCODINGS["fp8_block_e8m0"].decode(codes.view(torch.float8_e4m3fn), [scales.view(torch.float8_e8m0fnu)])
    expected = bfloat16([[times(e4m3(code), exponent) for code in range(256)] for exponent in EXPONENTS])
    for row in (0, 63):
        assert_same(decoded[row::128], expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_mxfp4_with_e8m0_scales(dtype: torch.dtype) -> None:
    """All pairs of codes under all exponents; the element in the low bits is the first."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 16).view(torch.float8_e8m0fnu)
    decoded = ENCODINGS["mxfp4"].decode(codes.view(dtype), [scales])
    numbers = [e2m1(nibble) for code in range(256) for nibble in (code & 15, code >> 4)]
    assert_same(decoded, bfloat16([[times(number, exponent) for number in numbers] for exponent in EXPONENTS]))


@pytest.mark.parametrize(
    ("elements", "scale", "encoding"),
    [
        (("F8_E4M3", (192, 256)), ("F8_E8M0", (2, 2)), "fp8_block_e8m0"),
        (("F8_E4M3", (192, 256)), ("F32", (2, 2)), "fp8_block"),  # as in V4-Flash-Base
        (("F8_E4M3", (192, 256)), ("F8_E8M0", (192, 8)), "mxfp8"),
        (("I8", (192, 128)), ("F8_E8M0", (192, 8)), "mxfp4"),
        (("I8", (192, 128)), ("F8_E8M0", (192, 4)), None),
        (("I8", (192, 128)), ("F32", (192, 8)), None),
        (("F8_E4M3", (192, 256)), ("F8_E8M0", (2, 3)), None),
    ],
)
def test_a_scale_beside_its_weight(
    elements: tuple[str, tuple[int, ...]], scale: tuple[str, tuple[int, ...]], encoding: str | None
) -> None:
    encoded = recognise({"attn.wq_a.weight": elements, "attn.wq_a.scale": scale}, "attn.wq_a.weight")
    assert (encoded and encoded.encoding) == encoding
    assert encoded is None or encoded.scales == ("attn.wq_a.scale",)
