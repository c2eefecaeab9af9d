"""Plugin for vLLM's CPU build: requests AMX tiles from the kernel where there are any, and makes FP8 fast.

Linux lets a process use AMX tiles after it requested them (arch_prctl, ARCH_REQ_XCOMP_PERM). vLLM's attention does not
request them and relies on an earlier oneDNN product; if none used tiles, the first prompt of several tokens ends the
engine with an illegal instruction.

PyTorch has a fast `torch._scaled_mm` of two FP8 matrices on the CPU for processors with FP16 tiles alone. On Sapphire
and Emerald Rapids it hands them to oneDNN, whose only kernel for them there is a reference loop: 0.78 s for
512 x 256 x 1,024 on 16 cores. Elsewhere it converts both matrices to float32, element by element, 4 ns each: 2.2 ms of
a 256 x 1,024 weight for every token. Here the bits of an element are moved to those of a float16 number, by
instructions that take 8 to 16 elements at a time. The numbers are the same.

`install` copies this file into the environment that it makes; vLLM calls `register` in each of its processes. Imports
nothing of this project.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LIBRARIES: list[torch.library.Library] = []  # a kernel is registered as long as its library lives


def register(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Initialize AMX tiles if the CPU has them, and replace `torch._scaled_mm` unless oneDNN has a kernel for it."""
    features = flags(cpuinfo)
    if "amx_tile" in features:
        import torch

        torch.cpu._init_amx()
    if not _LIBRARIES and lacks_fp8(features):
        replace_kernels()


def flags(cpuinfo: Path) -> frozenset[str]:
    """Return the words of /proc/cpuinfo, which include the processor's features; empty if there is no such file."""
    try:
        return frozenset(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        return frozenset()


def lacks_fp8(features: frozenset[str]) -> bool:
    """Return whether a CPU with these features has no FP16 tiles, which oneDNN's fast FP8 products need."""
    return "amx_fp16" not in features


def to_float32(elements: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a copy of numbers in float32, and the power of two that they must be multiplied by.

    FP8 numbers in E4M3 or E5M2 are shifted into float16, which has a sign bit, five exponent bits of bias 15 and ten
    mantissa bits: E5M2 is its upper byte, and E4M3, of bias 7, is 2**-8 of its number there, subnormals included.
    Other types, and E4M3 with numbers that are NaN, are converted as they are.
    """
    import torch

    if elements.dtype == torch.float8_e5m2:
        return elements.view(torch.int8).to(torch.int16).mul_(1 << 8).view(torch.float16).float(), 1.0
    if elements.dtype != torch.float8_e4m3fn or _has_nan(elements):
        return elements.to(torch.float32, copy=True), 1.0
    # int16 repeats the sign in its upper byte: the exponent's first bit is still a copy of it.
    shifted = elements.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~(1 << 14))
    return shifted.view(torch.float16).float(), 2.0**8


def _has_nan(elements: torch.Tensor) -> bool:
    """Return whether any of these E4M3 numbers is NaN, which has all bits but the sign's."""
    import torch

    if not elements.numel():
        return False
    rows = elements if elements.is_contiguous() else elements.t()  # a weight comes transposed, which takes longer
    return bool(rows.view(torch.int8).amax() == 0x7F or rows.view(torch.uint8).amax() == 0xFF)


def replace_kernels() -> None:
    """Compute `torch._scaled_mm` on the CPU in float32, as PyTorch does on processors without AMX, in less time."""
    import torch

    def scaled_mm(
        mat1: torch.Tensor,
        mat2: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_result: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        """Return ``(mat1 * scale_a) @ (mat2 * scale_b) + bias``, computed in float32, as ``out_dtype`` or ``mat1``'s.

        Shapes are [M, K] and [K, N]; scales are [1], or [M, 1] and [1, N]. ``scale_result`` divides results of one
        byte.
        """
        (first, power_a), (second, power_b) = to_float32(mat1), to_float32(mat2)
        product = torch.mm(first.mul_(scale_a * power_a), second.mul_(scale_b * power_b))
        if bias is not None:
            product += bias
        dtype = out_dtype or mat1.dtype
        if scale_result is not None and dtype.itemsize == 1:
            product /= scale_result
        return product.to(dtype)

    def scaled_mm_out(
        mat1: torch.Tensor,
        mat2: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale_result: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the product into ``out`` and return it; compiled models call this variant."""
        product = scaled_mm(mat1, mat2, scale_a, scale_b, bias, scale_result, out_dtype or out.dtype)
        return out.resize_(product.shape).copy_(product)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that its own kernel is replaced, which is intended
        library.impl("_scaled_mm", scaled_mm, "CPU")  # type: ignore[no-untyped-call]
        library.impl("_scaled_mm.out", scaled_mm_out, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
