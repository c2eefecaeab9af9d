"""Check the stored numbers of a checkpoint against its source.

Weights are checked some rows at a time, so that a check takes the memory of a piece and not of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from quantmint.calibration.lazy import torch
from quantmint.pipeline.base.schemes import scheme as row_of
from quantmint.pipeline.quantize.engines.algorithms import Alters
from quantmint.pipeline.quantize.formats.checkpoint import Reader
from quantmint.pipeline.quantize.formats.layout import StoredTensor
from quantmint.pipeline.quantize.inspection.findings import InspectionFinding, LayerError
from quantmint.pipeline.quantize.model.experts import WeightSource
from quantmint.pipeline.quantize.model.source import SourceReader
from quantmint.pipeline.quantize.schemes.registry import SCHEMES
from quantmint.pipeline.quantize.schemes.scales import BLOCK


@dataclass(frozen=True, slots=True)
class Error:
    """Sums over compared elements: ``signal`` of w^2, ``noise`` of (w - q)^2, and the ``count`` of elements."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0

    def __add__(self, other: Error) -> Error:
        return Error(self.signal + other.signal, self.noise + other.noise, self.count + other.count)

    @property
    def sqnr_db(self) -> float:
        """Return 10 log10(sum w^2 / sum (w - q)^2), dB; infinite for an exact copy, NaN where the noise is NaN.

        It is -infinity where all weights are zero and the copies are not.
        """
        if math.isnan(self.noise):
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


def compare(source: torch.Tensor, restored: torch.Tensor) -> Error:
    """Return the error of ``restored`` rows, summed in float32 along a row and in float64 over rows."""
    expected = source.float()
    sums = [numbers.square().sum(dim=-1).double().sum() for numbers in (expected, expected - restored)]
    return Error(float(sums[0]), float(sums[1]), source.numel())


# An algorithm that rounds for the output's sake leaves the weights a few dB further from their source; those that it
# leaves uncorrelated with it are wrong all the same.
_COMPENSATED_DB, _LEAST_DB = 10.0, 1.0


def altered_floor_db(scheme: str) -> float:
    """Return the least SQNR in dB of a weight in a scheme that an algorithm rounded for the output's sake."""
    return max(SCHEMES[scheme].sqnr_floor_db - _COMPENSATED_DB, _LEAST_DB)


def check_module(
    read: Reader,
    module: str,
    scheme: str,
    tensors: tuple[StoredTensor, ...],
    original: Callable[[int, int], torch.Tensor] | None,
    alters: Alters = "nothing",
    proven: float | None = None,
) -> Iterator[InspectionFinding | LayerError]:
    """Check one quantized module's stored numbers, against its 16-bit weight where that is known.

    Yield findings, and a `LayerError` where the weight is compared or proven. ``original(first, last)`` returns rows
    [first, last) of the weight in the source, decoded; None where it is unknown. ``alters`` is what an algorithm did to
    the weights beside rounding them to the nearest. ``proven`` is the SQNR in dB that was measured while files were
    written that are known to be unharmed: then only the first rows are read again, to prove that they lie where the
    header says.
    """
    weight = next(stored for stored in tensors if stored.role in ("weight", "weight_packed"))
    parts = {stored.role: read(stored.name) for stored in tensors if stored is not weight}
    for stored in tensors:
        if stored.role.endswith("_scale") and stored.dtype != "U8":
            # AutoRound turns the sign of a group whose largest number fits the side of -8 better than that of 7.
            signed = scheme == "w4a16" and alters == "rounding"
            yield from check_scale(stored.name, parts[stored.role], signed=signed)
        elif stored.role.endswith("_scale") and bool((parts[stored.role] == 255).any()):
            yield InspectionFinding("not finite", stored.name, "an E8M0 scale is 255, which is NaN")
        elif stored.role.endswith("_zero_point") and bool(parts[stored.role].any()):
            yield InspectionFinding("wrong zero point", stored.name, "it is not zero, which symmetric numbers have")
    comparable = original is not None and alters in ("nothing", "rounding")
    error, broken, shape = Error(), 0, [0, 0]
    few = BLOCK * prod(weight.shape[1:])  # a block's rows
    for first, last in _pieces(scheme, weight, read.piece if proven is None else min(few, read.piece)):
        rows = {role: _rows(part, scheme, weight, first, last) for role, part in parts.items()}
        restored = SCHEMES[scheme].decode({**rows, weight.role: read.rows(weight.name, first, last)})
        shape = [shape[0] + restored.shape[0], restored.shape[1]]
        if comparable and original is not None:
            error += compare(original(shape[0] - restored.shape[0], shape[0]), restored)
        if not comparable or not math.isfinite(error.noise):
            broken += int((~restored.isfinite()).sum())
        if proven is not None and not broken:
            break
    if proven is None and "weight_shape" in parts and parts["weight_shape"].tolist() != shape:
        stored_shape = parts["weight_shape"].tolist()
        yield InspectionFinding("wrong shape", f"{module}.weight_shape", f"it says {stored_shape}, expected {shape}")
    if broken:
        yield InspectionFinding("not finite", f"{module}.weight", f"{broken} of {prod(shape)} values are NaN or Inf")
        return
    if not comparable and proven is None:
        return
    floor = SCHEMES[scheme].sqnr_floor_db if alters == "nothing" else altered_floor_db(scheme)
    here = error.sqnr_db if comparable else math.inf
    sqnr = here if proven is None or not here >= floor else proven
    yield LayerError(module, scheme, sqnr)
    if not sqnr >= floor:
        message = f"SQNR {sqnr:.1f} dB against its source, rounding to {scheme} keeps {floor:g}"
        yield InspectionFinding("error too large", module, message)


def check_outputs(module: str, scheme: str, sqnr_db: float) -> Iterator[InspectionFinding]:
    """Yield a finding where the outputs of a module that compensates are further from its target's than rounding makes.

    The target moved away from the source's weight, so the distance between weights alone says little of it.
    """
    floor = altered_floor_db(scheme)
    if not sqnr_db >= floor:
        message = f"SQNR {sqnr_db:.1f} dB of its outputs against its target's, rounding to {scheme} keeps {floor:g}"
        yield InspectionFinding("error too large", module, message)


def _pieces(scheme: str, weight: StoredTensor, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, last) of rows of a stored weight, of about ``size`` elements each.

    A weight that is stored transposed is one range.
    """
    rows, row = weight.shape[0], row_of(scheme).weight
    transposed = row.dtype == "int4" and weight.role == "weight"
    least = BLOCK if row.granularity == "block" else 1
    step = rows if transposed else max(size // max(prod(weight.shape[1:]), 1) // least, 1) * least
    return ((first, min(first + step, rows)) for first in range(0, rows, max(step, 1)))


def _rows(part: torch.Tensor, scheme: str, weight: StoredTensor, first: int, last: int) -> torch.Tensor:
    """Return the part of a scale tensor for rows [first, last) of a weight; whole-tensor scales as they are."""
    if part.ndim == 0 or last - first == weight.shape[0]:
        return part
    if row_of(scheme).weight.granularity == "block":
        return part[first // BLOCK : -(-last // BLOCK)]
    return part[first:last] if part.shape[0] == weight.shape[0] else part


def check_scale(name: str, scale: torch.Tensor, *, signed: bool = False) -> Iterator[InspectionFinding]:
    """Yield a finding for NaN or infinity, for zeros, and unless ``signed`` for negative values in a scale tensor."""
    values = scale.float().reshape(-1)
    negative = (values < 0) & (not signed)
    for what, wrong in (("NaN or Inf", ~values.isfinite()), ("zero", values == 0), ("negative", negative)):
        count = int(wrong.sum())
        if count:
            yield InspectionFinding("bad scale", name, f"{count} of {values.numel()} values are {what}")


def check_kv_scale(name: str, value: float, expected: float | None, *, allow_one: bool) -> Iterator[InspectionFinding]:
    """Yield a finding if a KV scale is not finite and positive, is 1.0 without ``allow_one``, or is not ``expected``.

    Exactly 1.0 is the default of a cache that was never calibrated; ``expected`` None means that it is not known.
    """
    if not math.isfinite(value) or value <= 0:
        yield InspectionFinding("bad scale", name, f"a KV scale of {value:g}: expected a finite number above zero")
    elif value == 1.0 and not allow_one:
        yield InspectionFinding("default scale", name, "exactly 1.0, the value of a cache that was never calibrated")
    elif expected is not None and value != expected:
        yield InspectionFinding("wrong scale", name, f"{value:g}; the calibrated range gives {expected:g}")


def check_copy(
    name: str,
    read: Reader,
    source: SourceReader,
    weight: WeightSource,
    *,
    exact: bool = True,
    proven: bool = False,
) -> Iterator[InspectionFinding]:
    """Yield a finding if a tensor that stays in 16 bit is not the source's, bit for bit, or is not finite.

    Without ``exact`` only dtype and shape must be the source's. ``weight`` says where the source has the tensor. With
    ``proven``, because it was checked while it was carried over, only the first rows are read.
    """
    info = read.info(name)
    if (info.dtype, info.shape) != (source.dtype(weight), source.shape(weight)):
        yield InspectionFinding("altered", name, "it stays in 16 bit, but differs from the source")
        return
    rows = info.shape[0] if info.shape else 1
    step = max(read.piece // max(prod(info.shape[1:]), 1), 1)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        pieces = [read.rows(name, first, last), source.rows(weight, first, last)]
        if exact and not torch.equal(*(piece.contiguous().reshape(-1).view(torch.uint8) for piece in pieces)):
            yield InspectionFinding("altered", name, "it stays in 16 bit, but differs from the source")
            return
        if pieces[0].is_floating_point() and not bool(pieces[0].isfinite().all()):
            yield InspectionFinding("not finite", name, "it holds NaN or Inf, as its source does")
            return
        if proven:
            return
