"""All schemes and kernels by name.

>>> kernel_name("mxfp4", "quark")
'mxfp4_unsigned_zero'
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.schemes import fp8, integers, mx, nv
from quantmint.pipeline.quantize.schemes.scheme import Kernel, WeightScheme

SCHEMES: Mapping[str, WeightScheme] = MappingProxyType(
    {scheme.name: scheme for family in (fp8, mx, nv, integers) for scheme in family.SCHEMES}
)
"""Every scheme of ``pipeline/base/schemes.yaml``, by name."""
KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {
        kernel.name: kernel
        for scheme in SCHEMES.values()
        for kernel in (*scheme.kernels.values(), *([scheme.exact] if scheme.exact else []))
    }
)
"""Every kernel of the streaming engine, by name."""

# Encodings whose numbers are elements times powers of two.
_FEW_BITS = frozenset({"mxfp4", "mxfp4_stack", "mxfp8", "fp8_block_e8m0"})


def kernel_name(scheme: str, checkpoint_format: str, encoding: str | None = None) -> str:
    """Return the name of the kernel that encodes a scheme's weights in a layout.

    ``encoding`` is the source's, None for 16 bit: some encodings have kernels without loss. Raises `KeyError` for an
    unknown scheme, or one that only libraries write in this layout.
    """
    exact = SCHEMES[scheme].exact
    if exact is not None and encoding in _FEW_BITS:
        return exact.name
    return SCHEMES[scheme].kernels[checkpoint_format].name


def dequantize(scheme: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Decode a weight to float32 [O, I] from its stored parts, by role.

    Per-channel scales are [O] or [O, 1], per-tensor ones [] or [1], block scales [ceil(O/128), ceil(I/128)], MX scales
    E8M0 bytes of [O, I/32]; those of INT4 groups are [O, I/128] or, in Quark's transposed layout, [I/128, O]. NVFP4 has
    group scales [O, I/16] and a global scale of one number.
    """
    return SCHEMES[scheme].decode(parts)
