"""Formats by the lists of their values, and by the kernels that write checkpoints."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from quantmint.calibration.elements import ELEMENT_TYPES
from quantmint.pipeline.base.schemes import ActivationFormat, table
from quantmint.pipeline.quantize.rounding import activation_rounding, round_activations, round_fp8, round_mx
from quantmint.pipeline.quantize.schemes.mx import mxfp4
from quantmint.pipeline.quantize.schemes.registry import dequantize

# Values of the OCP Microscaling 1.0 elements that are not negative: every mantissa of every exponent.
_GRIDS = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e2m3": sorted({m / 8 for m in range(8)} | {(1 + m / 8) * 2**e for e, m in product((0, 1, 2), range(8))}),
    "e3m2": sorted({m / 16 for m in range(4)} | {(1 + m / 4) * 2**e for e, m in product(range(-2, 5), range(4))}),
}


def inputs(rows: int = 64, columns: int = 256, *, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with zeros and one row of nothing else."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, rows).unsqueeze(1)
    x[:, ::17] = 0
    x[1] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_what_the_weights_kernel_stores(dtype: torch.dtype) -> None:
    x = inputs().to(dtype)
    found = round_mx(x, "e2m1")
    assert found.dtype == dtype
    assert torch.equal(found.float(), dequantize("mxfp4", mxfp4(x)))


@pytest.mark.parametrize("dtype", _GRIDS)
def test_an_mx_group_holds_multiples_of_one_power_of_two(dtype: str) -> None:
    grid = torch.tensor(_GRIDS[dtype], dtype=torch.float64)
    groups = inputs(seed=1).reshape(-1, 32).double()
    found = round_mx(groups.float(), dtype).double()
    for group, rounded in zip(groups, found, strict=True):
        # The scale brings the largest magnitude to the grid's upper end: of a few neighbours, one gives all values.
        top = int(torch.frexp(group.abs().max()).exponent) - int(torch.frexp(grid.max()).exponent)
        candidates = []
        for exponent in (top, top + 1):
            scaled = group / 2.0**exponent
            nearest = (scaled.abs().clamp(max=grid.max()).unsqueeze(-1) - grid).abs()
            candidates.append((nearest.amin(-1), (rounded / 2.0**exponent).abs(), scaled.abs().clamp(max=grid.max())))
        assert any(
            torch.allclose((value - scaled).abs(), distance, rtol=0, atol=1e-12) and bool(torch.isin(value, grid).all())
            for distance, value, scaled in candidates
        )
        assert bool((rounded * group >= 0).all())


def test_a_half_goes_to_the_even_mantissa() -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([6.0, 0.25, 0.75, 2.5, 3.5, 5.0])
    assert round_mx(x, "e2m1")[0, :6].tolist() == [6.0, 0.0, 1.0, 2.0, 4.0, 4.0]


def test_mxfp8_keeps_three_bits_of_mantissa() -> None:
    x = inputs(seed=2)
    error = (round_mx(x, "e4m3") - x).abs()
    largest = x.reshape(64, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(x.shape)
    # Half a step of a normal number, or of the smallest ones: 2 ** -10 where the largest is 448 or below it.
    assert bool((error <= torch.maximum(x.abs() * 2**-4, largest * 2**-17)).all())


def test_fp8_by_token_and_by_group_use_the_largest_of_each() -> None:
    x = inputs(seed=3)
    by_token = round_activations(x, ActivationFormat("dynamic", "per_token", "e4m3"))
    by_group = round_activations(x, ActivationFormat("dynamic", "group", "e4m3", 128))
    for row, token, groups in zip(x, by_token, by_group, strict=True):
        assert torch.equal(token, _fp8(row))
        assert torch.equal(groups, torch.cat([_fp8(part) for part in row.split(128)]))


def test_a_group_at_the_edge_is_smaller() -> None:
    x = inputs(columns=200, seed=4)
    found = round_activations(x, ActivationFormat("dynamic", "group", "e4m3", 128))
    assert torch.equal(found, torch.cat([_fp8_rows(x[:, :128]), _fp8_rows(x[:, 128:])], dim=1))


def test_int8_by_token_is_symmetric() -> None:
    x = inputs(seed=5)
    found = round_activations(x, ActivationFormat("dynamic", "per_token", "int8"))
    steps = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    assert bool(((found - x).abs() <= steps * 0.500001).all())
    assert torch.allclose((found / steps).round(), found / steps, atol=1e-4)


def test_a_static_scale_saturates() -> None:
    x = torch.tensor([[0.0, 1.0, -447.0, 1e6, -1e6]])
    static = table()["fp8"].activations
    assert round_activations(x, static, torch.tensor(2.0)).tolist() == [[0.0, 1.0, -448.0, 896.0, -896.0]]


def test_nvfp4_by_a_measured_range_keeps_small_inputs() -> None:
    inputs = 1e-3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    rounded = activation_rounding(table()["nvfp4"].activations, float(inputs.abs().max()))(inputs)
    assert (rounded - inputs).norm() < 0.12 * inputs.norm()


def test_scales_by_head_are_each_head_s_own() -> None:
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)) * 100
    scales = torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1)
    found = round_fp8(x, scales)
    for head in range(3):
        assert torch.equal(found[:, head], round_fp8(x[:, head], float(scales[head])))


def test_nothing_is_rounded_where_activations_stay() -> None:
    x = inputs()
    assert torch.equal(round_activations(x, table()["mxfp4_weight_only"].activations), x)


def _fp8(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().max().clamp(min=1e-10) / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def _fp8_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([_fp8(row) for row in x])


@pytest.mark.parametrize("dtype", ["e2m1", "e2m3", "e3m2", "e4m3"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_scales_rounded_up_are_the_least_that_cut_nothing(dtype: str, kind: torch.dtype) -> None:
    """The scale is 2 ** ceil(log2(amax / largest)), computed here from its definition in float64."""
    element = ELEMENT_TYPES[dtype]
    x = (torch.randn(512, 32, generator=torch.Generator().manual_seed(3)) * 3).to(kind)
    x[0, 0], x[0, 1:] = element.largest, 0.5  # exactly representable: no larger scale is needed
    found = round_mx(x, dtype, "up").double()
    amax = x.double().abs().amax(-1, keepdim=True)
    scale = 2.0 ** torch.ceil(torch.log2(amax / element.largest))
    assert (amax / scale <= element.largest).all()
    exponent = torch.floor(torch.log2((x.double() / scale).abs().clamp_min(2.0**-60))).clamp_min(element.least_exponent)
    step = 2.0 ** (exponent - element.mantissa_bits)
    expected = ((x.double() / scale / step).round() * step).clamp(-element.largest, element.largest) * scale
    assert torch.equal(found, expected)
    # In E4M3 a mantissa from 1.75 on rounds up in either way, and 1.75 is that of its largest element.
    assert torch.equal(found, round_mx(x, dtype).double()) == (dtype == "e4m3")
