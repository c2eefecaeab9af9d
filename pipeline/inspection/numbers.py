"""What the stored numbers prove: scales that scale, weights that are numbers, and an error that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.formats.checkpoint import Checkpoint
from pipeline.inspection.dequantize import dequantize, sqnr_db
from pipeline.inspection.findings import Finding, LayerError

if TYPE_CHECKING:
    import torch

    from pipeline.formats.tensors import StoredTensor

# Rounding alone gives about 31.5 dB for FP8 e4m3 and 18 dB for MXFP4, little dependent on the distribution because
# both have an exponent; int8 depends on it. Below these floors something other than rounding happened.
SQNR_FLOOR_DB: Mapping[str, float] = {
    "ptpc_fp8": 24.0, "fp8": 20.0, "fp8_block": 24.0, "int8_w8a8": 20.0,
    "mxfp4": 6.0, "mxfp4_weight_only": 6.0, "mxfp4_fp8": 6.0,
}  # fmt: skip


class Reader:
    """Reads single tensors of a checkpoint; its files stay mapped, nothing is cached."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, object] = {}

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor of that name, as it is stored."""
        from safetensors import safe_open

        shard = self._checkpoint.tensors[name][0]
        if shard not in self._open:
            self._open[shard] = safe_open(self._checkpoint.folder / shard, framework="pt")
        tensor: torch.Tensor = self._open[shard].get_tensor(name)  # type: ignore[attr-defined]
        return tensor


def check_module(
    read: Reader, module: str, scheme: str, tensors: tuple[StoredTensor, ...], source: torch.Tensor | None
) -> Iterator[Finding | LayerError]:
    """Check one quantized module's stored numbers, against its 16-bit weight where that is at hand."""
    parts = {stored.role: read(stored.name) for stored in tensors}
    for stored in tensors:
        if stored.role.endswith("_scale") and stored.dtype != "U8":
            yield from check_scale(stored.name, parts[stored.role])
        elif stored.role.endswith("_scale") and bool((parts[stored.role] == 255).any()):
            yield Finding("not finite", stored.name, "an E8M0 scale is 255, which is NaN")
    restored = dequantize(scheme, parts)
    broken = int((~restored.isfinite()).sum())
    if broken:
        yield Finding("not finite", f"{module}.weight", f"{broken} of {restored.numel()} values are NaN or Inf")
    elif source is not None:
        error = sqnr_db(source, restored)
        yield LayerError(module, scheme, error)
        floor = SQNR_FLOOR_DB[scheme]
        if not error >= floor:
            yield Finding(
                "error too large",
                module,
                f"SQNR {error:.1f} dB against its source, rounding to {scheme} keeps {floor:g}",
            )


def check_scale(name: str, scale: torch.Tensor) -> Iterator[Finding]:
    """A scale multiplies: NaN, Inf, zero and negative ones are wrong."""
    values = scale.float().reshape(-1)
    for what, wrong in (("NaN or Inf", ~values.isfinite()), ("zero", values == 0), ("negative", values < 0)):
        count = int(wrong.sum())
        if count:
            yield Finding("bad scale", name, f"{count} of {values.numel()} values are {what}")


def check_static_scale(name: str, scale: torch.Tensor, expected: float) -> Iterator[Finding]:
    """The scale of a module's inputs is what calibration measured."""
    value = float(scale.float().reshape(()))
    if value != expected:
        yield Finding("wrong scale", name, f"{value:g}; the calibrated range gives {expected:g}")


def check_kv_scale(name: str, value: float, expected: float | None, *, allow_one: bool) -> Iterator[Finding]:
    """A static KV scale is finite, positive, not the default of 1.0, and what calibration measured."""
    if not math.isfinite(value) or value <= 0:
        yield Finding("bad scale", name, f"a KV scale of {value:g}: expected a finite number above zero")
    elif value == 1.0 and not allow_one:
        yield Finding("default scale", name, "exactly 1.0, the value of a cache that was never calibrated")
    elif expected is not None and value != expected:
        yield Finding("wrong scale", name, f"{value:g}; the calibrated range gives {expected:g}")


def check_copy(name: str, found: torch.Tensor, source: torch.Tensor) -> Iterator[Finding]:
    """A tensor that stays in 16 bit is the source's, bit for bit."""
    import torch

    same = found.dtype == source.dtype and found.shape == source.shape
    if not same or not torch.equal(_bits(found), _bits(source)):
        yield Finding("altered", name, "it stays in 16 bit, but differs from the source")
    elif found.is_floating_point() and not bool(found.isfinite().all()):
        yield Finding("not finite", name, "it holds NaN or Inf, as its source does")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
