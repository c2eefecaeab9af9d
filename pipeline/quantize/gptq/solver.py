"""GPTQ (arXiv 2210.17323) of one weight, or of several side by side, on the grid of a scheme's kernel.

    >>> kernel = KERNELS["mxfp4"]
    >>> factor = factorize(hessian, kernel)          # of X^T X, once for all weights that read the same input
    >>> rounded = round_weight(weight, factor, kernel)
    >>> rounded.parts["weight_packed"], rounded.before, rounded.after

Columns with the largest inputs come first (`columns`); groups stay together, so no layout knows of the order. A row
that is no better by the Hessian than rounded to the nearest is rounded to the nearest.

Weights of one shape with a Hessian each, the experts of a layer, can be rounded side by side (`round_stack`): a GPU
takes as long for the columns of sixteen as for those of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from quantmint.calibration.lazy import torch
from quantmint.calibration.room import ROUNDED_AT_A_TIME
from quantmint.pipeline.quantize.engines.stream.switches import many_small_workers
from quantmint.pipeline.quantize.gptq.columns import round_columns
from quantmint.pipeline.quantize.gptq.decomposition import decompose, is_finite
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scales import amax
from quantmint.pipeline.quantize.schemes.scheme import Grid, Kernel

if TYPE_CHECKING:
    from quantmint.pipeline.quantize.schemes.scheme import Parts

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_ROWS = 1024
"""Rows that a thread of a CPU takes at a time: columns of them are short, and threads would wait for each other."""
SUPPORTED = frozenset(name for name, kernel in KERNELS.items() if kernel.grid is not None)
"""Names of the kernels whose grid GPTQ can round to."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A decomposed Hessian, on its device.

    ``order`` int64 [I]: the columns in the order in which they are rounded. ``reach`` float32 [I, I]: row j holds the
    weights with which errors of the columns before j are added to column j. ``price`` float32 [I]: the cost of a
    squared error of each column. ``fault`` says why the Hessian was not decomposed; the three are empty then. For
    several weights each tensor has one more leading dimension.
    """

    hessian: torch.Tensor
    order: torch.Tensor
    reach: torch.Tensor
    price: torch.Tensor
    fault: str | None = None

    @classmethod
    def stacked(cls, factors: Sequence[Factor]) -> Factor:
        """Return the factors of several weights as one, each tensor with a leading dimension; none may have a fault."""
        return cls(
            hessian=torch.stack([factor.hessian for factor in factors]),
            order=torch.stack([factor.order for factor in factors]),
            reach=torch.stack([factor.reach for factor in factors]),
            price=torch.stack([factor.price for factor in factors]),
        )


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A quantized weight.

    ``parts`` are the tensors that the kernel would return, by role. ``nearest_costs`` and ``costs``, float32 [O], are
    (w-q) H (w-q)^T of each row of the weight rounded to the nearest and of ``parts``; NaN where the Hessian is not
    finite. ``fault`` says why all rows were rounded to the nearest, None where they were not.
    """

    parts: Parts
    nearest_costs: torch.Tensor
    costs: torch.Tensor
    fault: str | None = None

    @property
    def before(self) -> float:
        """Return tr((W-Q) H (W-Q)^T) of the weight rounded to the nearest."""
        return float(self.nearest_costs.sum())

    @property
    def after(self) -> float:
        """Return tr((W-Q) H (W-Q)^T) of ``parts``."""
        return float(self.costs.sum())

    def to(self, device: str) -> RoundedWeight:
        """Return a copy whose tensors lie on ``device``."""
        parts = {role: part.to(device) for role, part in self.parts.items()}
        return RoundedWeight(parts, self.nearest_costs.to(device), self.costs.to(device), self.fault)

    def split(self, rows: Sequence[int]) -> list[RoundedWeight]:
        """Split the result of weights stacked by rows into one for each weight, given the number of rows of each."""
        if len(rows) == 1:  # a scale of the whole weight has no rows
            return [self]
        columns = [torch.split(tensor, list(rows)) for tensor in (*self.parts.values(), self.nearest_costs, self.costs)]
        return [
            RoundedWeight(dict(zip(self.parts, parts, strict=True)), nearest, costs, self.fault)
            for *parts, nearest, costs in zip(*columns, strict=True)
        ]

    @classmethod
    def joined(cls, chunks: Sequence[RoundedWeight]) -> RoundedWeight:
        """Return the result of a weight from the results of its chunks of rows, in order."""
        if len(chunks) == 1:
            return chunks[0]
        parts = {
            role: torch.cat([chunk.parts[role] for chunk in chunks]) if part.ndim else part
            for role, part in chunks[0].parts.items()
        }
        nearest = torch.cat([chunk.nearest_costs for chunk in chunks])
        return cls(parts, nearest, torch.cat([chunk.costs for chunk in chunks]), chunks[0].fault)


def factorize(hessian: torch.Tensor, kernel: Kernel, *, dampening: float = 0.01, ordered: bool = True) -> Factor:
    """Decompose a Hessian X^T X, float32 [I, I], for a kernel's grid.

    ``dampening`` is the share of the mean diagonal that is added to the diagonal, ten and a hundred times as much where
    the sum cannot be decomposed. Inputs that are always zero cost the damping alone. With ``ordered``, columns with
    large inputs come first, whole groups at a time. A Hessian that is zero, not finite or never decomposed gives a
    factor with a ``fault``. Raises `KeyError` for a kernel without a grid.
    """
    group = _grid(kernel).group
    diagonal = hessian.diagonal()
    mean, none = diagonal.mean(), hessian.new_empty(0)
    if not is_finite(hessian):
        return Factor(hessian, none, none, none, "the Hessian of its inputs is not finite")
    if not bool(mean > 0):
        return Factor(hessian, none, none, none, "nothing but zeros came in")
    inside = diagonal.view(-1, group).argsort(dim=1, descending=True, stable=True)
    groups = diagonal.view(-1, group).sum(dim=1).argsort(descending=True, stable=True)
    order = (groups.unsqueeze(1) * group + inside[groups]).view(-1)
    if not ordered:
        order = torch.arange(len(order), device=order.device)
    for share in (dampening, 10 * dampening, 100 * dampening):
        reach = _reordered(hessian, order)
        reach.diagonal().add_(share * mean)
        if decompose(reach):
            price = reach.diagonal().clone()
            return Factor(hessian, order, reach.div_(price.unsqueeze(1)), price.square_())
    return Factor(hessian, none, none, none, "the Hessian of its inputs cannot be decomposed")


def round_weight(
    weight: torch.Tensor,
    factor: Factor,
    kernel: Kernel,
    largest: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
) -> RoundedWeight:
    """Quantize a weight [O, I] of 16 or 32 bits on the factor's device, by GPTQ or to the nearest, whichever is better.

    ``largest`` is the largest magnitude of all weights that share the scale of a tensor, None where that is ``weight``.
    ``target``, of the weight's dtype, is stored in the weight's place where it is given, and costs are measured against
    it. The choice is made for each row by the Hessian. Rounding is computed in float32, costs on a GPU in TF32; the
    same input gives the same bytes on the same device. Rows are taken in chunks whose size does not depend on the
    number of threads.
    """
    return finish(attempt([weight], [factor], kernel, largest, target))[0]


def round_stack(weights: Sequence[torch.Tensor], factors: Sequence[Factor], kernel: Kernel) -> list[RoundedWeight]:
    """Quantize weights of one shape [O, I] on one device, each with its own factor, as `round_weight` does one by one.

    They are quantized side by side, except a single weight, a weight whose factor has a fault, and each weight where
    the kernel has one scale for a whole weight. Side by side, sums run in another order, so last bits may differ.
    """
    return finish(attempt(weights, factors, kernel))


@dataclass(frozen=True, slots=True)
class _Try:
    """A weight [O, I], some of its rows, or several weights [E, O, I] with as many factors, rounded in both ways.

    ``target`` is the tensor to be stored, ``nearest`` its parts rounded to the nearest, ``parts`` those of GPTQ, None
    where the factor has a fault. ``weight_nearest`` are the parts of the weight itself, None where the weight is the
    target.
    """

    target: torch.Tensor
    factor: Factor
    nearest: Parts
    parts: Parts | None
    weight_nearest: Parts | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """Weights rounded by GPTQ and to the nearest, before `finish` chooses the better for each row.

    ``alone`` holds the tries of chunks of rows, by the weight's number; ``stack`` is the try of the weights whose
    numbers are in ``stacked``, None where there are none.
    """

    kernel: Kernel
    alone: Mapping[int, Sequence[_Try]]
    stacked: Sequence[int]
    stack: _Try | None


def attempt(
    weights: Sequence[torch.Tensor],
    factors: Sequence[Factor],
    kernel: Kernel,
    largest: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
) -> Attempt:
    """Round weights by GPTQ and to the nearest, as `round_stack` or `round_weight` does, without choosing.

    No product here may be computed in TF32, which `finish` switches on for the whole process: devices that work at the
    same time must all attempt first, and finish then.
    """
    single = len(weights) == 1 or kernel.whole
    alone = [number for number, factor in enumerate(factors) if single or factor.fault is not None]
    tries = {number: _try_rows(weights[number], target, factors[number], kernel, largest) for number in alone}
    stacked = [number for number in range(len(weights)) if number not in tries]
    stack = None
    if stacked:
        factor = Factor.stacked([factors[number] for number in stacked])
        stack = _try(torch.stack([weights[number] for number in stacked]), None, factor, kernel, None)
    return Attempt(kernel, tries, stacked, stack)


def finish(attempted: Attempt) -> list[RoundedWeight]:
    """Return each weight with the better of both roundings for each row, by the Hessian, in the weights' order."""
    kernel = attempted.kernel
    results: dict[int, RoundedWeight] = {}
    with in_tf32():  # what is compared differs by more
        for number, tries in attempted.alone.items():
            device = tries[0].target.device
            results[number] = RoundedWeight.joined(_map_rows(partial(_choose, kernel=kernel), tries, device))
        if attempted.stack is not None:
            rounded = _choose(attempted.stack, kernel=kernel)
            for place, number in enumerate(attempted.stacked):
                parts = {role: part[place] for role, part in rounded.parts.items()}
                results[number] = RoundedWeight(parts, rounded.nearest_costs[place], rounded.costs[place])
    return [results[number] for number in range(len(results))]


def _try_rows(
    weight: torch.Tensor, target: torch.Tensor | None, factor: Factor, kernel: Kernel, largest: torch.Tensor | None
) -> list[_Try]:
    """Round a weight in chunks of rows; a scale of the whole weight is taken from all rows."""
    on_cpu = weight.device.type == "cpu"
    count = _ROWS if on_cpu else max(1, ROUNDED_AT_A_TIME // weight.shape[1])
    if not on_cpu and len(weight) <= count:
        return [_try(weight, target, factor, kernel, largest)]
    stored = weight if target is None else target
    shared = amax(stored) if largest is None and kernel.whole else largest
    rows = torch.split(weight, count)
    targets = [None] * len(rows) if target is None else torch.split(target, count)
    return _map_rows(
        lambda pair: _try(*pair, factor, kernel, shared), list(zip(rows, targets, strict=True)), weight.device
    )


def _map_rows(work: Callable[[_Item], _Result], chunks: Sequence[_Item], device: torch.device) -> list[_Result]:
    """Return ``work`` of each chunk of rows, in order; on a CPU, PyTorch's number of threads take a chunk each."""
    if device.type != "cpu":
        return [work(chunk) for chunk in chunks]
    with many_small_workers(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(work, chunks))


def _try(
    weight: torch.Tensor, target: torch.Tensor | None, factor: Factor, kernel: Kernel, largest: torch.Tensor | None
) -> _Try:
    """Round a weight [O, I], or several with as many factors [E, O, I], by GPTQ and to the nearest, on their device."""
    stored = weight if target is None else target
    nearest = _nearest(stored, kernel, largest)
    if factor.fault is not None:
        return _Try(stored, factor, nearest, None, None)
    weight_nearest = None if target is None else _nearest(weight, kernel, largest)
    columns, grid = _rows_in(stored.float().mT, factor.order), _grid(kernel)
    if grid.group > 1:
        assert grid.pack is not None and grid.encode_scales is not None  # noqa: S101, PT018 - as every grid of groups
        elements, scales = round_columns(columns, factor.reach, factor.price, grid, None, stored.dtype)
        numbers = _restored(elements, factor.order)
        packed = grid.pack(numbers.flatten(0, -2)).view(*numbers.shape[:-1], -1)
        groups = factor.order[..., :: grid.group] // grid.group
        parts = {
            next(iter(nearest)): packed,
            "weight_scale": _restored(grid.encode_scales(scales, stored.dtype), groups),
        }
    else:
        scale = nearest["weight_scale"]
        by_row = scale.float().view(*weight.shape[:-2], 1, -1).expand(*weight.shape[:-2], 1, weight.shape[-2])
        elements, _ = round_columns(columns, factor.reach, factor.price, grid, by_row, stored.dtype)
        parts = {"weight": _restored(elements, factor.order).to(torch.float8_e4m3fn), "weight_scale": scale}
    return _Try(stored, factor, nearest, parts, weight_nearest)


def _choose(tried: _Try, *, kernel: Kernel) -> RoundedWeight:
    """Return the better of both roundings for each row, by the Hessian."""
    source, factor = tried.target.float(), tried.factor
    nearest_costs = _costs(source, tried.nearest, factor, kernel)
    if tried.parts is None:
        return RoundedWeight(tried.nearest, nearest_costs, nearest_costs, factor.fault)
    before = nearest_costs
    if tried.weight_nearest is not None:
        before = _costs(source, tried.weight_nearest, factor, kernel)
    costs = _costs(source, tried.parts, factor, kernel)
    better = costs < nearest_costs
    parts = dict(tried.parts)
    for role, part in tried.parts.items():
        if part.ndim == tried.target.ndim:  # what has fewer dimensions is the same scale
            nearest = tried.nearest[role]
            chosen = torch.where(better.unsqueeze(-1), part.view(torch.uint8), nearest.view(torch.uint8))
            parts[role] = chosen.view(part.dtype)
    return RoundedWeight(parts, before, torch.where(better, costs, nearest_costs))


def _reordered(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a matrix [I, I] with its rows and its columns in an ``order`` [I], beside which little memory is taken."""
    reordered = torch.empty_like(matrix)
    for rows, numbers in zip(torch.split(reordered, _ROWS), torch.split(order, _ROWS), strict=True):
        rows.copy_(matrix[numbers][:, order])
    return reordered


def _grid(kernel: Kernel) -> Grid:
    """Return a kernel's grid. Raises `KeyError` where GPTQ cannot round to it."""
    if kernel.grid is None:
        raise KeyError(kernel.name)
    return kernel.grid


def _nearest(weight: torch.Tensor, kernel: Kernel, largest: torch.Tensor | None) -> Parts:
    """Return the parts of a weight [..., O, I] rounded to the nearest, with the leading dimensions of the weight."""
    parts = kernel.compute(weight.flatten(0, -2), largest)
    return {
        role: part.view(*weight.shape[:-2], -1, *part.shape[1:]) if part.ndim else part for role, part in parts.items()
    }


def _rows_in(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the rows of a matrix [..., I, O] in the order [..., I]."""
    return matrix[order] if matrix.ndim == 2 else matrix.take_along_dim(order.unsqueeze(-1), dim=-2)


def _restored(ordered: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return rows [..., I, O] that were put into an order [..., I] as columns in their own places, [..., O, I]."""
    # Of one group alone the transposed tensor passes for contiguous, and its bytes could not be viewed.
    return _rows_in(ordered, order.argsort(dim=-1)).mT.clone(memory_format=torch.contiguous_format)


def _costs(source: torch.Tensor, parts: Parts, factor: Factor, kernel: Kernel) -> torch.Tensor:
    """Return (w-q) H (w-q)^T of each row of ``source``, where q is decoded from ``parts``: float32 [..., O]."""
    last = source.ndim - 2
    rows = {role: part.flatten(0, last) if part.ndim else part for role, part in parts.items()}
    error = source - kernel.decode(rows).view_as(source)
    return (error @ factor.hessian).mul_(error).sum(dim=-1)


@contextmanager
def in_tf32() -> Iterator[None]:
    """Within the block, let GPUs multiply float32 in TF32, with 11 bits of mantissa and in an eighth of the time.

    The switch holds for the whole process.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
