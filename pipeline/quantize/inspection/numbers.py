"""Decode stored numbers to float32, by scheme (the definition of each format), and check them.

Weights are checked some rows at a time, so that a check takes the memory of a piece and not of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.schemes import scheme as row_of
from quantmint.pipeline.quantize.engines.algorithms import Alters
from quantmint.pipeline.quantize.formats.checkpoint import Reader
from quantmint.pipeline.quantize.formats.layout import StoredTensor
from quantmint.pipeline.quantize.inspection.findings import Finding, LayerError
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.source import SourceReader

# Bits of exponent and of mantissa of the OCP Microscaling 1.0 elements, which have no infinity and no NaN.
_MINIFLOATS = {"e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2)}
_BLOCK = 128  # rows and columns of a block of fp8_block
_NIBBLES_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ's order puts the outputs 0 to 7 of a word


def dequantize(scheme: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rebuild a weight of [O, I] in float32 from its stored parts, by role.

    Per-channel scales are [O] or [O, 1], per-tensor ones [] or [1], block scales [O/128, I/128], MX scales E8M0 bytes
    of [O, I/32]; those of INT4 groups are [O, I/128] or, in Quark's transposed layout, [I/128, O].
    """
    row = row_of(scheme).weight
    scale = parts["weight_scale"]
    stored = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    if row.dtype == "int4":
        numbers, scale = (_words(stored), scale) if "weight_packed" in parts else (_transposed_words(stored), scale.t())
        return numbers * scale.float().repeat_interleave(128, dim=1)
    if row.scale == "e8m0":
        values = _elements(row.dtype, row.bits, stored)
        # By their bits: exp2 is not exact for every integer everywhere, and ldexp runs on the current GPU alone. Of
        # 2 ** -127 float32 has no normal number.
        powers = torch.where(scale == 0, 1 << 22, scale.int() << 23).view(torch.float32)
        return values * powers.masked_fill(scale == 255, torch.nan).repeat_interleave(32, dim=1)
    weight = _elements(row.dtype, row.bits, stored)
    scale = scale.float()
    if row.granularity == "block":
        rows, columns = weight.shape
        return weight * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight * (scale.reshape(-1, 1) if scale.numel() == weight.shape[0] else scale.reshape(()))


def _elements(dtype: str, bits: int, stored: torch.Tensor) -> torch.Tensor:
    """[O, I] in float32 of stored elements; by a table of all bytes where a processor has no instruction for them."""
    if dtype in _MINIFLOATS and bits == 6:
        low, middle, high = stored.int().reshape(stored.shape[0], -1, 3).unbind(-1)
        word = low | (middle << 8) | (high << 16)
        return _minifloats(dtype, stored.device)[
            torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(1)
        ]
    if stored.dtype in (torch.float8_e4m3fn, torch.uint8):
        found = _of_bytes(dtype, stored.device).index_select(0, stored.view(torch.uint8).reshape(-1).int())
        return found.view(stored.shape[0], -1)
    return stored.float()


@cache
def _of_bytes(dtype: str, device: torch.device) -> torch.Tensor:
    """Return the values of each byte: [256] in float32, or [256, 2] of two elements of 4 bit, the lowest bits first."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if dtype not in _MINIFLOATS:
        return codes.view(torch.float8_e4m3fn).float()
    return _minifloats(dtype, device)[torch.stack((codes & 15, codes >> 4), dim=-1).int()]


@cache
def _minifloats(dtype: str, device: torch.device) -> torch.Tensor:
    """Every value of an element type in float32, in the order of its codes: sign, exponent, mantissa."""
    exponent_bits, mantissa_bits = _MINIFLOATS[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits
        values.append(fraction * 2 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2 ** (exponent - bias))
    return torch.tensor([*values, *(-value for value in values)], device=device)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """[O, I] integers from 32-bit words of eight along I, 8 added to each."""
    nibbles = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
    return (nibbles.flatten(1) - 8).float()


def _transposed_words(packed: torch.Tensor) -> torch.Tensor:
    """[O, I] integers from [I, O/8] words in AWQ's order of nibbles, each in two's complement."""
    nibbles = torch.stack([(packed >> (4 * place)) & 15 for place in _NIBBLES_AWQ], dim=-1).flatten(1)
    return ((nibbles ^ 8) - 8).float().t()


@dataclass(frozen=True, slots=True)
class Error:
    """Sums over the compared elements: squares of the weight and of its error, and how many they are."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0

    def __add__(self, other: Error) -> Error:
        return Error(self.signal + other.signal, self.noise + other.noise, self.count + other.count)

    @property
    def sqnr_db(self) -> float:
        """10 log10(sum w^2 / sum (w - q)^2), dB; infinite for an exact copy, NaN where a weight is."""
        if math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def compare(source: torch.Tensor, restored: torch.Tensor) -> Error:
    """The error of some rows, summed in float32 over a row and in float64 over rows."""
    wanted = source.float()
    sums = [each.square().sum(dim=-1).double().sum() for each in (wanted, wanted - restored)]
    return Error(float(sums[0]), float(sums[1]), source.numel())


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


def check_module(
    read: Reader,
    module: str,
    scheme: str,
    tensors: tuple[StoredTensor, ...],
    original: Callable[[int, int], torch.Tensor] | None,
    alters: Alters = "nothing",
    proven: float | None = None,
) -> Iterator[Finding | LayerError]:
    """Check one quantized module's stored numbers, against its 16-bit weight where that is known.

    ``original`` returns rows [first, last) of the weight in the source, decoded.

    ``alters`` is what an algorithm did to the weights beside rounding them to the nearest. ``proven`` is the SQNR in dB
    that was measured while files were written that are known to be unharmed: then only the first rows are read again,
    to prove that they lie where the header says.
    """
    weight = next(stored for stored in tensors if stored.role in ("weight", "weight_packed"))
    parts = {stored.role: read(stored.name) for stored in tensors if stored is not weight}
    for stored in tensors:
        if stored.role.endswith("_scale") and stored.dtype != "U8":
            # AutoRound turns the sign of a group whose largest number fits the side of -8 better than that of 7.
            signed = scheme == "w4a16" and alters == "rounding"
            yield from check_scale(stored.name, parts[stored.role], signed=signed)
        elif stored.role.endswith("_scale") and bool((parts[stored.role] == 255).any()):
            yield Finding("not finite", stored.name, "an E8M0 scale is 255, which is NaN")
        elif stored.role.endswith("_zero_point") and bool(parts[stored.role].any()):
            yield Finding("wrong zero point", stored.name, "it is not zero, which symmetric numbers have")
    comparable = original is not None and alters in ("nothing", "rounding")
    error, broken, shape = Error(), 0, [0, 0]
    few = _BLOCK * prod(weight.shape[1:])  # a block's rows
    for first, last in _pieces(scheme, weight, read.piece if proven is None else min(few, read.piece)):
        rows = {role: _rows(part, scheme, weight, first, last) for role, part in parts.items()}
        restored = dequantize(scheme, {**rows, weight.role: read.rows(weight.name, first, last)})
        shape = [shape[0] + restored.shape[0], restored.shape[1]]
        if comparable and original is not None:
            error += compare(original(shape[0] - restored.shape[0], shape[0]), restored)
        if not comparable or not math.isfinite(error.noise):
            broken += int((~restored.isfinite()).sum())
        if proven is not None and not broken:
            break
    if proven is None and "weight_shape" in parts and parts["weight_shape"].tolist() != shape:
        stored_shape = parts["weight_shape"].tolist()
        yield Finding("wrong shape", f"{module}.weight_shape", f"it says {stored_shape}, expected {shape}")
    if broken:
        yield Finding("not finite", f"{module}.weight", f"{broken} of {prod(shape)} values are NaN or Inf")
        return
    if not comparable and proven is None:
        return
    floor = SQNR_FLOOR_DB[scheme]
    if alters != "nothing":
        floor = max(floor - _COMPENSATED_DB, _LEAST_DB)
    here = error.sqnr_db if comparable else math.inf
    sqnr = here if proven is None or not here >= floor else proven
    yield LayerError(module, scheme, sqnr)
    if not sqnr >= floor:
        message = f"SQNR {sqnr:.1f} dB against its source, rounding to {scheme} keeps {floor:g}"
        yield Finding("error too large", module, message)


def _pieces(scheme: str, weight: StoredTensor, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of a stored weight, of about ``size`` elements; all of them where it is stored transposed."""
    rows, row = weight.shape[0], row_of(scheme).weight
    transposed = row.dtype == "int4" and weight.role == "weight"
    least = _BLOCK if row.granularity == "block" else 1
    step = rows if transposed else max(size // max(prod(weight.shape[1:]), 1) // least, 1) * least
    return ((first, min(first + step, rows)) for first in range(0, rows, max(step, 1)))


def _rows(part: torch.Tensor, scheme: str, weight: StoredTensor, first: int, last: int) -> torch.Tensor:
    """Return the parts of rows with their scales by channel, group or block; whole-tensor scales as they are."""
    if part.ndim == 0 or last - first == weight.shape[0]:
        return part
    if row_of(scheme).weight.granularity == "block":
        return part[first // _BLOCK : -(-last // _BLOCK)]
    return part[first:last] if part.shape[0] == weight.shape[0] else part


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


def check_copy(
    name: str,
    read: Reader,
    source: SourceReader,
    weight: WeightSource,
    *,
    exact: bool = True,
    proven: bool = False,
) -> Iterator[Finding]:
    """Check that a tensor that stays in 16 bit is the source's: bit for bit, or in dtype and shape where not ``exact``.

    ``weight`` says where the source has it. What was ``proven`` while it was carried over is read no further than its
    first rows.
    """
    info = read.info(name)
    if (info.dtype, info.shape) != (source.dtype(weight), source.shape(weight)):
        yield Finding("altered", name, "it stays in 16 bit, but differs from the source")
        return
    rows = info.shape[0] if info.shape else 1
    step = max(read.piece // max(prod(info.shape[1:]), 1), 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        pieces = [read.rows(name, first, last), source.rows(weight, first, last)]
        if exact and not torch.equal(*(piece.contiguous().reshape(-1).view(torch.uint8) for piece in pieces)):
            yield Finding("altered", name, "it stays in 16 bit, but differs from the source")
            return
        if pieces[0].is_floating_point() and not bool(pieces[0].isfinite().all()):
            yield Finding("not finite", name, "it holds NaN or Inf, as its source does")
            return
        if proven:
            return
