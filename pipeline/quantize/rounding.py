"""Round activations and caches as a scheme does when the model runs: to a format's values, back in float32.

The definition of each format, not a fast path. Scales of run-time formats are computed as vLLM's kernels compute them,
those of OCP microscaling as the library that writes the layout does (compressed-tensors 0.19, amd-quark 0.13): both
round the largest magnitude's exponent up where its mantissa would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from quantmint.calibration.elements import ELEMENT_TYPES, ElementType
from quantmint.calibration.inputs import Rounding
from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.schemes import ActivationFormat, MxScales
from quantmint.pipeline.quantize.gpu.kernels import Launch, gpu_kernel
from quantmint.pipeline.quantize.schemes.elements import to_nearest
from quantmint.pipeline.quantize.schemes.scales import FP8_MAX, INT8_MAX, MX_GROUP, NV_GROUP, fp8_scale, global_scale

Scales = Mapping[int, tuple["torch.Tensor | float", "torch.Tensor | float"]]
"""Scales of K and of V by layer: one number, or [heads, 1, 1] with one for each KV head."""
_LEAST = 1e-10  # of a row of zeros, so that nothing divides by it


def round_activations(
    x: torch.Tensor, activations: ActivationFormat, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the inputs of a linear layer, [..., I], rounded to the format of ``activations``, in float32.

    Microscaling formats keep bfloat16, see `round_mx`. ``input_scale`` is the scale of a static format, for NVFP4 the
    global one; other formats take their scales from ``x``.
    """
    if activations.group == MX_GROUP and x.numel():
        assert activations.dtype is not None  # noqa: S101 - a dynamic format has a type
        return round_mx(x, activations.dtype, activations.mx_scales)
    x = x.float()
    if activations.kind == "none" or not x.numel():
        return x
    if activations.kind == "static":
        assert input_scale is not None, "a static format without its scale"  # noqa: S101 - the loader reads it
        return round_nvfp4(x, input_scale) if activations.group == NV_GROUP else round_fp8(x, input_scale)
    return _by_row(x, activations.dtype, activations.group)


@cache
def activation_rounding(activations: ActivationFormat, largest: float | None) -> Rounding:
    """Return the function that rounds inputs as served; equal formats and ranges give the same function object.

    ``largest`` is the range of the inputs of a static format, whose scale is ``largest`` / 448, or for NVFP4
    448 * 6 / ``largest``.
    """
    if activations.kind == "none":
        return lambda inputs: inputs
    scale_of = global_scale if activations.group == NV_GROUP else fp8_scale
    scale = None if largest is None else scale_of(torch.tensor(largest))

    def rounded(inputs: torch.Tensor) -> torch.Tensor:
        input_scale = None if scale is None else scale.to(inputs.device)
        return round_activations(inputs, activations, input_scale).to(inputs.dtype)

    return rounded


def round_fp8(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Round to FP8 e4m3fn by a given scale: x / scale, saturated at 448, to even, times scale; in x's dtype."""
    stored = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return stored.float().mul(scale).to(x.dtype)


def round_nvfp4(x: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
    """Round float32 to NVFP4 along the last dimension, a multiple of 16, with the global scale ``overall``, [].

    A group's scale is a sixth of its largest magnitude times the global one, in E4M3. Groups that round to a scale of
    zero become zero.
    """
    element = ELEMENT_TYPES["e2m1"]
    groups = x.reshape(*x.shape[:-1], -1, NV_GROUP)
    scale = (overall * groups.abs().amax(-1, keepdim=True) / element.largest).clamp_(max=FP8_MAX)
    scale = scale.to(torch.float8_e4m3fn).float() / overall
    scaled = (groups / scale.masked_fill(scale == 0, 1.0)).clamp_(-element.largest, element.largest)
    rounded = to_nearest(scaled, element.mantissa_bits, element.least_exponent, out=torch.empty_like(scaled))
    return (rounded * scale).reshape(x.shape)


def kv_cache(config: Any, scales: Scales, round_: Callable[..., torch.Tensor] = round_fp8) -> Any:
    """Return an empty cache of transformers that rounds K and V, [batch, heads, tokens, head_dim], by ``scales``.

    ``round_(tensor, scale)`` rounds them. Without scales the cache rounds nothing.
    """
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types that mypy could follow
        """A cache that rounds keys and values before it stores them."""

        def update(self, key: Any, value: Any, layer_idx: int, *rest: Any, **named: Any) -> Any:
            of_key, of_value = scales[layer_idx]
            return super().update(round_(key, of_key), round_(value, of_value), layer_idx, *rest, **named)

    return (RoundingCache if scales else DynamicCache)(config=config)


def round_mx(x: torch.Tensor, dtype: str, mx_scales: MxScales = "even") -> torch.Tensor:
    """Round to an OCP microscaling format with elements of ``dtype`` along the last dimension, a multiple of 32.

    The result is bfloat16 for bfloat16, which holds all results, else float32. The scale is 2 ** (floor(log2 amax) -
    emax), one exponent more where amax would round up to the next power of two; 2 ** -126 is the least. With
    ``mx_scales`` "up" it is one more where amax would exceed the largest element, and so the least power of two that is
    at least amax / largest. x must be below 2 ** 100.
    """
    element = ELEMENT_TYPES[dtype]
    mantissa_bits, largest = element.mantissa_bits, element.largest
    x = x if x.dtype == torch.bfloat16 else x.float()
    integers, digits = (torch.int16, 7) if x.dtype == torch.bfloat16 else (torch.int32, 23)
    groups = x.reshape(*x.shape[:-1], -1, MX_GROUP)
    # The smallest addend that carries from a mantissa above that of the largest element.
    fitting = (1 << digits) - 1 - int((largest / 2.0**element.max_exponent - 1) * (1 << digits))
    carry = fitting if mx_scales == "up" else 1 << (digits - 1 - element.deciding)
    if dtype != "e4m3" and (launch := _mx_kernel(element, digits, carry, x.device)) is not None:
        rounded, count = torch.empty_like(x, memory_format=torch.contiguous_format), x.numel() // MX_GROUP
        launch(count, 1, [groups.contiguous(), rounded, count])
        return rounded
    # The exponent's field is read as an integer: adding half a step of the mantissa carries into it.
    magnitude = groups.view(integers) & torch.iinfo(integers).max
    field = (magnitude.amax(-1, keepdim=True) + carry) >> digits
    field = (field - element.max_exponent).clamp_(min=1)
    scale = (field << digits).view(x.dtype)
    if dtype == "e4m3":
        values = (groups.float() / scale.float()).clamp_(-largest, largest)
        return values.to(torch.float8_e4m3fn).to(x.dtype).mul_(scale).reshape(x.shape)
    # As `to_nearest`, with the scale's exponent added to that of the format's smallest normal number.
    least = (field + element.least_exponent).clamp_(min=1) << digits
    power = magnitude.bitwise_and_(-(1 << digits)).clamp_(min=least).view(x.dtype)
    shift = 1.5 * 2.0 ** (digits - mantissa_bits)
    rounded = torch.add(groups, power, alpha=shift).sub_(power, alpha=shift)
    limit = scale * largest
    return rounded.clamp_(-limit, limit).reshape(x.shape)


def _mx_kernel(element: ElementType, digits: int, carry: int, device: torch.device) -> Launch | None:
    """Return the kernel that does the work of `round_mx` on a GPU, for numbers of ``digits`` bits of mantissa."""
    return gpu_kernel(
        "round_mx",
        device,
        BITS="unsigned short" if digits == 7 else "unsigned int",
        DIGITS=digits,
        CARRY=carry,
        MANTISSA=element.mantissa_bits,
        LEAST=f"({element.least_exponent})",
        MOST=element.max_exponent,
        LARGEST=f"{float(element.largest)}f",
    )


def _by_row(x: torch.Tensor, dtype: str | None, group: int | None) -> torch.Tensor:
    """Round to int8 or FP8 with a scale for each row, or for each ``group`` of a row, from its largest magnitude."""
    from torch.nn.functional import pad

    width = x.shape[-1]
    grouped = x if group is None else pad(x, (0, -width % group)).reshape(*x.shape[:-1], -1, group)
    largest = grouped.abs().amax(-1, keepdim=True).clamp(min=_LEAST)
    if dtype == "int8":
        scale = largest / INT8_MAX
        rounded = (grouped / scale).round().clamp(-INT8_MAX, INT8_MAX)
    else:
        scale = largest / FP8_MAX
        rounded = (grouped / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    restored = rounded * scale
    return restored if group is None else restored.flatten(-2)[..., :width]
