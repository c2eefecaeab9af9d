"""What stored numbers are: weights back in float32, by scheme (the definition of each format), and their checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

from pipeline.base.schemes import scheme as row_of
from pipeline.quantize.formats.checkpoint import Checkpoint
from pipeline.quantize.inspection.findings import Finding, LayerError

if TYPE_CHECKING:
    import torch

    from pipeline.quantize.engines.algorithms import Alters
    from pipeline.quantize.formats.layout import StoredTensor

# Bits of exponent and of mantissa of the OCP Microscaling 1.0 elements, which have no infinity and no NaN.
_MINIFLOATS = {"e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2)}
_NIBBLES_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ's order puts the outputs 0 to 7 of a word


def dequantize(scheme: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rebuild a weight of [O, I] in float32 from its stored parts, by role.

    Per-channel scales are [O] or [O, 1], per-tensor ones [] or [1], block scales [O/128, I/128], MX scales E8M0 bytes
    of [O, I/32]; those of INT4 groups are [O, I/128] or, in Quark's transposed layout, [I/128, O].
    """
    import torch

    row = row_of(scheme).weight
    scale = parts["weight_scale"]
    stored = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    if row.dtype == "int4":
        numbers, scale = (_words(stored), scale) if "weight_packed" in parts else (_transposed_words(stored), scale.t())
        return numbers * scale.float().repeat_interleave(128, dim=1)
    if row.scale == "e8m0":
        table = None if row.dtype == "e4m3" else _minifloats(row.dtype, stored.device)
        values = stored.float() if table is None else table[_codes(row.bits, stored).int()]
        # ldexp and not exp2: the latter is not exact for every integer everywhere.
        exponents = scale.int() - 127
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        return values * powers.masked_fill(scale == 255, torch.nan).repeat_interleave(32, dim=1)
    weight, scale = stored.float(), scale.float()
    if row.granularity == "block":
        rows, columns = weight.shape
        return weight * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight * (scale.reshape(-1, 1) if scale.numel() == weight.shape[0] else scale.reshape(()))


@cache
def _minifloats(dtype: str, device: torch.device) -> torch.Tensor:
    """Every value of an element type in float32, in the order of its codes: sign, exponent, mantissa."""
    import torch

    exponent_bits, mantissa_bits = _MINIFLOATS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values.append(fraction * 2 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2 ** (exponent - bias))
    return torch.tensor([*values, *(-value for value in values)], device=device)


def _codes(bits: int, packed: torch.Tensor) -> torch.Tensor:
    """[O, I] codes from bytes: two of 4 bit in one, or four of 6 bit in three, the first in the lowest bits."""
    import torch

    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    low, middle, high = packed.int().reshape(packed.shape[0], -1, 3).unbind(-1)
    word = low | (middle << 8) | (high << 16)
    return torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(1)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """[O, I] integers from 32-bit words of eight along I, 8 added to each."""
    import torch

    nibbles = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
    return (nibbles.flatten(1) - 8).float()


def _transposed_words(packed: torch.Tensor) -> torch.Tensor:
    """[O, I] integers from [I, O/8] words in AWQ's order of nibbles, each in two's complement."""
    import torch

    nibbles = torch.stack([(packed >> (4 * place)) & 15 for place in _NIBBLES_AWQ], dim=-1).flatten(1)
    return ((nibbles ^ 8) - 8).float().t()


def sqnr_db(source: torch.Tensor, restored: torch.Tensor) -> float:
    """10 log10(sum w^2 / sum (w - q)^2), dB; infinite for an exact copy, NaN where a weight is."""
    signal = source.double().square().sum().item()
    noise = (source.double() - restored.double()).square().sum().item()
    if math.isnan(noise):
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


# Rounding alone gives about 31.5 dB for e4m3, 31 for e2m3, 25.5 for e3m2 and 18 for e2m1, little dependent on the
# distribution because all have an exponent; integers depend on it. Below these floors something else than rounding
# happened.
SQNR_FLOOR_DB: Mapping[str, float] = {
    "ptpc_fp8": 24.0, "fp8": 20.0, "fp8_block": 24.0, "mxfp8": 24.0, "int8_w8a8": 20.0, "w4a16": 6.0,
    "mxfp4": 6.0, "mxfp4_weight_only": 6.0, "mxfp4_fp8": 6.0, "mxfp6_e2m3": 18.0, "mxfp6_e3m2": 16.0,
}  # fmt: skip
# An algorithm that rounds for the output's sake leaves the weights a few dB further from their source; those that it
# leaves uncorrelated with it are wrong all the same.
_COMPENSATED_DB, _LEAST_DB = 10.0, 1.0


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
    read: Reader,
    module: str,
    scheme: str,
    tensors: tuple[StoredTensor, ...],
    source: torch.Tensor | None,
    alters: Alters = "nothing",
) -> Iterator[Finding | LayerError]:
    """Check one quantized module's stored numbers, against its 16-bit weight where that is at hand.

    ``alters`` is what an algorithm did to the weights beside rounding them to the nearest.
    """
    parts = {stored.role: read(stored.name) for stored in tensors}
    for stored in tensors:
        if stored.role.endswith("_scale") and stored.dtype != "U8":
            # AutoRound turns the sign of a group whose largest number fits the side of -8 better than that of 7.
            signed = scheme == "w4a16" and alters == "rounding"
            yield from check_scale(stored.name, parts[stored.role], signed=signed)
        elif stored.role.endswith("_scale") and bool((parts[stored.role] == 255).any()):
            yield Finding("not finite", stored.name, "an E8M0 scale is 255, which is NaN")
        elif stored.role.endswith("_zero_point") and bool(parts[stored.role].any()):
            yield Finding("wrong zero point", stored.name, "it is not zero, which symmetric numbers have")
    restored = dequantize(scheme, parts)
    if "weight_shape" in parts and parts["weight_shape"].tolist() != list(restored.shape):
        found = parts["weight_shape"].tolist()
        yield Finding("wrong shape", f"{module}.weight_shape", f"it says {found}, expected {list(restored.shape)}")
    broken = int((~restored.isfinite()).sum())
    if broken:
        yield Finding("not finite", f"{module}.weight", f"{broken} of {restored.numel()} values are NaN or Inf")
    elif source is not None and alters in ("nothing", "rounding"):
        error = sqnr_db(source, restored)
        yield LayerError(module, scheme, error)
        floor = SQNR_FLOOR_DB[scheme]
        if alters == "rounding":
            floor = max(floor - _COMPENSATED_DB, _LEAST_DB)
        if not error >= floor:
            yield Finding(
                "error too large",
                module,
                f"SQNR {error:.1f} dB against its source, rounding to {scheme} keeps {floor:g}",
            )


def check_scale(name: str, scale: torch.Tensor, *, signed: bool = False) -> Iterator[Finding]:
    """A scale multiplies: NaN, Inf and zero are wrong, and negative ones where it is not ``signed``."""
    values = scale.float().reshape(-1)
    negative = (values < 0) & (not signed)
    for what, wrong in (("NaN or Inf", ~values.isfinite()), ("zero", values == 0), ("negative", negative)):
        count = int(wrong.sum())
        if count:
            yield Finding("bad scale", name, f"{count} of {values.numel()} values are {what}")


def check_kv_scale(name: str, value: float, expected: float | None, *, allow_one: bool) -> Iterator[Finding]:
    """A static KV scale is finite, positive, not the default of 1.0, and what calibration measured."""
    if not math.isfinite(value) or value <= 0:
        yield Finding("bad scale", name, f"a KV scale of {value:g}: expected a finite number above zero")
    elif value == 1.0 and not allow_one:
        yield Finding("default scale", name, "exactly 1.0, the value of a cache that was never calibrated")
    elif expected is not None and value != expected:
        yield Finding("wrong scale", name, f"{value:g}; the calibrated range gives {expected:g}")


def check_copy(name: str, found: torch.Tensor, source: torch.Tensor, *, exact: bool = True) -> Iterator[Finding]:
    """A tensor that stays in 16 bit is the source's: bit for bit, or in dtype and shape where not ``exact``."""
    import torch

    same = found.dtype == source.dtype and found.shape == source.shape
    stored = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (found, source)]
    if not same or (exact and not torch.equal(*stored)):
        yield Finding("altered", name, "it stays in 16 bit, but differs from the source")
    elif found.is_floating_point() and not bool(found.isfinite().all()):
        yield Finding("not finite", name, "it holds NaN or Inf, as its source does")
