"""The kernels against compressed-tensors' own arithmetic, also on input that no sane model holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantmint.pipeline.quantize.schemes.fp8 import ptpc_fp8
from quantmint.pipeline.quantize.schemes.registry import dequantize
from quantmint.pipeline.quantize.schemes.scales import fp8_scale

DTYPES = [torch.bfloat16, torch.float16]
SIXTEEN_BITS = st.integers(0, 0xFFFF)


@pytest.fixture(scope="module", autouse=True)
def _reference() -> None:
    """Import it here: while tests are collected every worker would, and within one, the first example is timed."""
    import compressed_tensors.quantization.lifecycle.forward  # noqa: F401


def reference(weight: Any) -> tuple[Any, Any]:
    """What llm-compressor stores: the weight's bytes and the scales of its rows.

    It keeps no zero points for a symmetric format; adding one of 0 would turn -0 into +0.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    channel = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    scale, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), channel)
    return quantize(weight, scale, None, channel, dtype=torch.float8_e4m3fn), scale


def assert_same(weight: Any) -> dict[str, Any]:
    before = weight.clone()
    made = ptpc_fp8(weight)
    stored, scale = reference(before.clone())
    assert made["weight"].dtype == torch.float8_e4m3fn
    assert made["weight_scale"].dtype == weight.dtype
    assert made["weight"].shape == weight.shape
    assert made["weight_scale"].shape == weight.shape[:1]
    assert torch.equal(made["weight"].view(torch.uint8), stored.view(torch.uint8))
    assert torch.equal(made["weight_scale"].view(torch.int16), scale.reshape(-1).view(torch.int16))
    assert torch.equal(weight.view(torch.int16), before.view(torch.int16)), "the input was changed"
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_bits_give_the_reference_bytes(dtype: Any, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    bits = data.draw(st.lists(SIXTEEN_BITS, min_size=rows * columns, max_size=rows * columns))
    weight = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).reshape(rows, columns)
    # Where a row holds NaN, only that it stays NaN is promised: its sign bit is the processor's.
    sound = weight.isfinite().all(dim=1)
    if sound.any():
        assert_same(weight[sound])
    if not sound.all():
        made = ptpc_fp8(weight[~sound])
        assert (~dequantize("ptpc_fp8", made).isfinite()).any(dim=1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_finite_value_alone_in_its_row(dtype: Any) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same(values[values.isfinite()].reshape(-1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(dtype: Any, bad: float) -> None:
    """The reference does not refuse such a weight either; it is for inspection to find."""
    weight = torch.ones(2, 64, dtype=dtype)
    weight[1, 3] = bad
    made, (stored, scale) = ptpc_fp8(weight), reference(weight)
    assert torch.equal(made["weight"][0].view(torch.uint8), stored[0].view(torch.uint8))
    assert torch.equal(made["weight"][1].float().isnan(), stored[1].float().isnan())
    assert torch.equal(made["weight_scale"].isfinite(), scale.reshape(-1).isfinite())
    assert not dequantize("ptpc_fp8", made)[1].isfinite().all()


@given(bits=SIXTEEN_BITS)
def test_a_kv_scale_is_what_the_reference_computes(bits: int) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    amax = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).abs()
    if not amax.isfinite():
        return
    scale, _ = calculate_qparams(-amax, amax, QuantizationArgs(num_bits=8, type="float"))
    assert torch.equal(fp8_scale(amax).reshape(1), scale)
