"""MXFP8, MXFP6, NVFP4 and INT8 by our own kernels: the bytes that compressed-tensors makes of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantmint.pipeline.quantize.rounding import round_mx, round_nvfp4
from quantmint.pipeline.quantize.schemes.registry import KERNELS, dequantize

DTYPES = [torch.bfloat16, torch.float16]


def weight(dtype: torch.dtype, power: int = 0) -> torch.Tensor:
    """Random groups, one of zeros, and one whose largest magnitude rounds up to the next power of two."""
    numbers = torch.randn(48, 256, generator=torch.Generator().manual_seed(5)) * 2.0**power
    numbers[3, :64] = 0
    numbers[4, :32] *= 1e-3
    numbers[4, 0], numbers[4, 1] = 1.9375 * 2.0**power, -1.9375 * 2.0**power
    return numbers.to(dtype)


def compressed(source: torch.Tensor, **form: Any) -> dict[str, torch.Tensor]:
    """Compress a weight as llm-compressor's memoryless min-max observer and its compressors do."""
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**form, symmetric=True)
    groups = source.view(source.shape[0], -1, args.group_size or source.shape[1])
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    stored = quantize(source, scale, None, args, dtype=torch.int8 if form["type"] == "int" else torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale if form["type"] == "int" else compress_mx_scale(scale, torch.uint8)}


@pytest.mark.parametrize("power", [-7, 0, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("scheme", "form"),
    [
        ("mxfp8", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}),
        ("int8_w8a8", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ],
)
def test_bytes_equal_those_of_compressed_tensors(
    scheme: str, form: dict[str, Any], dtype: torch.dtype, power: int
) -> None:
    source = weight(dtype, power)
    ours, theirs = KERNELS[scheme].compute(source, None), compressed(source, **form)
    for role, expected in theirs.items():
        stored = ours[role].reshape(expected.shape)
        if role == "weight_scale" and scheme == "mxfp8" and dtype == torch.float16:
            # 2 ** -127, the scale of zeros, is zero in float16: the reference stores 1 for it. Any scale gives zeros.
            assert stored[3, :2].tolist() == [0, 0]
            stored[3, :2] = expected[3, :2]
        assert stored.dtype == expected.dtype
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8)), role


@pytest.mark.parametrize("scheme", ["mxfp6_e2m3", "mxfp6_e3m2", "mxfp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_activations_round_alike(scheme: str, dtype: torch.dtype) -> None:
    source = weight(dtype)
    rounded = round_mx(source.float(), scheme.removeprefix("mxfp6_") if "6" in scheme else "e4m3")
    assert torch.equal(dequantize(scheme, KERNELS[scheme].compute(source, None)), rounded)


def test_a_group_that_is_not_finite_has_an_exponent_that_tells() -> None:
    for name, kernel in KERNELS.items():
        if not name.startswith("mx"):
            continue
        source = weight(torch.bfloat16)
        assert int(kernel.compute(source, None)["weight_scale"].max()) < kernel.uncertain, name
        source[0, 0] = torch.inf
        assert int(kernel.compute(source, None)["weight_scale"][0, 0]) >= kernel.uncertain, name


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("power", [-7, 0, 5])
def test_nvfp4_equals_compressed_tensors_and_its_activations(dtype: torch.dtype, power: int) -> None:
    """A group of zeros, and one so small that its scale rounds to zero, get the smallest scale instead."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    source = weight(dtype, power)
    source[5, :16] *= 1e-6
    other = source.abs().max() * 3  # of another weight of the fusion group
    args: QuantizationArgs = NVFP4A16["weights"]
    groups, overall = source.view(48, -1, 16), generate_gparam(-other.reshape(1), other.reshape(1))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, overall)
    state = {"weight": source, "weight_scale": scale, "weight_global_scale": overall}
    theirs = NVFP4PackedCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    ours = KERNELS["nvfp4"].compute(source, other)
    assert set(ours) == set(theirs)
    for role, part in theirs.items():
        assert ours[role].dtype == part.dtype, role
        assert torch.equal(ours[role].reshape(-1).view(torch.uint8), part.reshape(-1).view(torch.uint8)), role
    if dtype == torch.float32:  # activations are rounded in float32; a group whose scale is zero becomes zero
        rounded = round_nvfp4(source, overall.reshape(()))
        restored = dequantize("nvfp4", ours)
        normal = (groups.abs().amax(-1) * overall / 6 > 2**-9).repeat_interleave(16, dim=1)
        assert torch.equal(rounded[normal], restored[normal])
        assert not rounded[~normal].any()
