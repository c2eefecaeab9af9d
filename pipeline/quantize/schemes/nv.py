"""NVFP4 weights: E2M1 elements in groups of 16 along the input, each group with an E4M3 scale, all below a global one.

Bytes equal those of llm-compressor 0.14. No Instinct multiplies this format: vLLM emulates it there.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantmint.calibration.elements import E2M1, decode_elements
from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.schemes.elements import pack_e2m1
from quantmint.pipeline.quantize.schemes.scales import FP8_MAX, NV_GROUP, amax, global_scale
from quantmint.pipeline.quantize.schemes.scheme import Kernel, Parts, WeightScheme


def nvfp4(weight: torch.Tensor, largest: torch.Tensor | None = None) -> Parts:
    """Encode as NVFP4: E2M1 elements in groups of 16 along the input, E4M3 scales of groups, and one global scale.

    ``largest`` is the largest magnitude of all weights that vLLM loads as one; None where ``weight`` is all of them. A
    group's scale is a sixth of its largest magnitude times the global scale, rounded to E4M3. An element is the weight
    divided by (group scale / global scale), rounded to the nearest value of E2M1, ties to the even mantissa.

    Return ``weight_packed`` uint8 [O, I/2], the even column in the low nibble, ``weight_scale`` float8_e4m3fn [O, I/16]
    and ``weight_global_scale`` float32 []. I must be divisible by 16.
    """
    rows, columns = weight.shape
    groups = weight.view(rows, columns // NV_GROUP, NV_GROUP)
    overall = global_scale(amax(weight) if largest is None else largest)
    sixths = amax(groups, dim=2)
    sixths = sixths / sixths.new_full((), E2M1.largest)  # in the weight's dtype, as compressed-tensors has it
    scale = (overall * sixths.float()).clamp_(max=FP8_MAX).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, torch.finfo(torch.float8_e4m3fn).eps, scale)
    scaled = groups.float() / (scale / overall).unsqueeze(-1)
    packed = pack_e2m1(scaled.view(rows, columns), signed_zero=True)
    return {
        "weight_packed": packed,
        "weight_scale": scale.to(torch.float8_e4m3fn),
        "weight_global_scale": overall,
    }


def _decode(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    scale = parts["weight_scale"].float() / parts["weight_global_scale"].float().reshape(())
    return decode_elements("e2m1", 4, parts["weight_packed"]) * scale.repeat_interleave(NV_GROUP, dim=1)


_NVFP4 = Kernel("nvfp4", nvfp4, _decode, whole=True, fused=True)

SCHEMES = (
    WeightScheme("nvfp4", _decode, {"compressed-tensors": _NVFP4}, 8.0),
    WeightScheme("nvfp4_weight_only", _decode, {"compressed-tensors": _NVFP4}, 8.0),
)
