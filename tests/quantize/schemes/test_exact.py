"""MXFP4 in FP8: every code, under every scale, is held exactly as long as the exponents span few enough binades."""

from __future__ import annotations

import pytest
import torch

from quantmint.calibration.decoders import ENCODINGS
from quantmint.pipeline.quantize.schemes import fp8
from quantmint.pipeline.quantize.schemes.registry import KERNELS, kernel_name

SPAN = 14
"""Binades between the largest and the smallest exponent of the groups that share an FP8 scale."""


def every_code(span: int, least: int, rows: int = 1) -> torch.Tensor:
    """All pairs of codes in groups of each exponent from ``least`` on: bfloat16 [rows, 512 (span + 1)]."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(rows, span + 1)
    exponents = (least + torch.arange(span + 1).repeat_interleave(16)).to(torch.uint8).repeat(rows, 1)
    decoded: torch.Tensor = ENCODINGS["mxfp4"].decode(packed, [exponents])
    return decoded


@pytest.mark.parametrize("least", [40, 100, 127, 200])
@pytest.mark.parametrize("scheme", ["ptpc_fp8", "fp8_block"])
def test_all_codes_are_exact_within_fourteen_binades(scheme: str, least: int) -> None:
    kernel = KERNELS[kernel_name(scheme, "compressed-tensors", "mxfp4")]
    weight = every_code(SPAN, least, 128)
    if scheme == "fp8_block":  # a block for each column of 128, and one row for each exponent
        weight = torch.cat([every_code(0, least + place) for place in range(SPAN + 1)] * 2)
    assert torch.equal(kernel.decode(kernel.compute(weight, None)), weight.float())


def test_a_channel_of_more_binades_is_rounded_as_ever() -> None:
    exact, plain = KERNELS["ptpc_fp8_exact"], KERNELS["ptpc_fp8"]
    wide = every_code(SPAN + 1, 100)
    narrow = torch.nn.functional.pad(every_code(SPAN, 100), (0, 512))
    made, usual = exact.compute(torch.cat([wide, narrow]), None), plain.compute(wide, None)
    assert torch.equal(made["weight"][:1].view(torch.uint8), usual["weight"].view(torch.uint8))
    assert torch.equal(made["weight_scale"][:1], usual["weight_scale"])
    assert torch.equal(exact.decode(made)[1:], narrow.float())


def test_the_bits_tell_every_e4m3_number() -> None:
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)
    within = every[every.abs() <= 448]
    assert torch.equal(fp8._fits_e4m3(within), within.to(torch.float8_e4m3fn).to(torch.bfloat16) == within)


def test_a_channel_of_zeros_has_the_scale_that_it_always_had() -> None:
    zeros = torch.zeros(2, 64, dtype=torch.bfloat16)
    made, usual = KERNELS["ptpc_fp8_exact"].compute(zeros, None), KERNELS["ptpc_fp8"].compute(zeros, None)
    assert torch.equal(made["weight_scale"], usual["weight_scale"])


def test_a_source_in_16_bit_is_never_searched_for_exactness() -> None:
    assert kernel_name("ptpc_fp8", "quark") == "ptpc_fp8"
    assert kernel_name("ptpc_fp8", "quark", "int4") == "ptpc_fp8"
