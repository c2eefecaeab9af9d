"""MXFP4 against compressed-tensors' own arithmetic, for every number that a group can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmint.pipeline.quantize.schemes.mx import mxfp4, mxfp4_unsigned_zero
from quantmint.pipeline.quantize.schemes.registry import KERNELS, dequantize
from quantmint.pipeline.quantize.schemes.scales import MX_GROUP


@pytest.fixture(scope="module", autouse=True)
def _reference() -> None:
    """Import it here: while tests are collected every worker would, and within one, the first example is timed."""
    import compressed_tensors.quantization.lifecycle.forward  # noqa: F401


def reference(weight: Any) -> tuple[Any, Any]:
    """The values of E2M1 that llm-compressor rounds to, and its stored exponents."""
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    form = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_GROUP}
    mx = QuantizationArgs(**form, symmetric=True, scale_dtype=torch.uint8)
    groups = weight.reshape(weight.shape[0], -1, MX_GROUP)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), mx)
    return quantize(weight, scale, None, mx), compress_mx_scale(scale, torch.uint8)


def codes(packed: Any) -> Any:
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def assert_same(weight: Any) -> None:
    before = weight.clone()
    made = mxfp4(weight)
    values, exponents = reference(before.clone())
    assert torch.equal(made["weight_scale"], exponents)
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    found = codes(made["weight_packed"])
    assert torch.equal(table[(found & 7).long()], values.float().abs())
    assert torch.equal(found >> 3 == 1, torch.signbit(values))
    assert torch.equal(weight.view(torch.int16), before.view(torch.int16)), "the input was changed"


def test_every_bfloat16_number_rounds_as_in_the_reference() -> None:
    """Beside a neighbour of each of its group's possible exponents."""
    every = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # Beyond these the reference divides by a scale that bfloat16 cannot hold exactly.
    sane = every[every.isfinite() & (every.abs() < 2.0**100) & ((every.abs() > 2.0**-100) | (every == 0))]
    for exponent in range(-6, 7):
        largest = (sane.float().abs() * 2.0**exponent).to(torch.bfloat16)
        usable = (largest.abs() < 2.0**100) & ((largest.abs() > 2.0**-100) | (largest == 0))
        group = torch.zeros(int(usable.sum()), MX_GROUP, dtype=torch.bfloat16)
        group[:, 0], group[:, 1] = sane[usable], largest[usable]
        assert_same(group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5), groups=st.integers(1, 5), power=st.integers(-8, 8))
@settings(max_examples=60, deadline=None)
def test_random_weights_give_the_reference_bytes(dtype: Any, seed: int, rows: int, groups: int, power: int) -> None:
    noise = torch.randn(rows, groups * MX_GROUP, generator=torch.Generator().manual_seed(seed))
    assert_same((noise * 2.0**power).to(dtype))


def test_quarks_zeros_have_no_sign_and_all_else_is_the_same() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, quarks = mxfp4(weight), mxfp4_unsigned_zero(weight)
    before, after = codes(ours["weight_packed"]), codes(quarks["weight"])
    assert (before == 8).any()
    assert torch.equal(before.where(before != 8, 0), after)
    assert torch.equal(ours["weight_scale"], quarks["weight_scale"])
    assert torch.equal(dequantize("mxfp4", ours), dequantize("mxfp4", quarks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exponent_of_a_group_tells_that_it_is_finite(dtype: Any) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    groups = torch.ones(len(every), MX_GROUP, dtype=dtype)
    groups[:, 3] = every
    exponents = mxfp4(groups)["weight_scale"].reshape(-1)
    assert bool((exponents[~every.isfinite()] >= KERNELS["mxfp4"].uncertain).all())
    assert bool((exponents[every.isfinite() & (every.float().abs() < 2.0**126)] < KERNELS["mxfp4"].uncertain).all())
