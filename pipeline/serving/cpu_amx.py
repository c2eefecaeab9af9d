"""Plugin for vLLM's CPU build on Intel processors with AMX: requests AMX tiles from the kernel and makes FP8 fast.

Linux lets a process use AMX tiles after it requested them (arch_prctl, ARCH_REQ_XCOMP_PERM). vLLM's attention does not
request them and relies on an earlier oneDNN product; if none used tiles, the first prompt of several tokens ends the
engine with an illegal instruction.

On Sapphire and Emerald Rapids PyTorch hands `torch._scaled_mm` of two FP8 matrices to oneDNN, whose only kernel for
them there is a reference loop: 0.78 s for 512 x 256 x 1,024 on 16 cores, where float32 takes 0.02 s and gives the same
result. `install` copies this file into the environment that it makes; vLLM calls `register` in each of its processes.
Imports nothing of this project.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LIBRARIES: list[torch.library.Library] = []  # a kernel is registered as long as its library lives


def register(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Initialize AMX tiles if the CPU has them, and replace `torch._scaled_mm` where it would be a reference loop."""
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
    """Return whether a CPU with these features has AMX but no FP16 tiles, which oneDNN's fast FP8 products need."""
    return "amx_int8" in features and "amx_fp16" not in features


def replace_kernels() -> None:
    """Compute `torch._scaled_mm` on the CPU in float32, as PyTorch does on processors without AMX."""
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
        product = torch.mm(mat1.float() * scale_a, mat2.float() * scale_b)
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
