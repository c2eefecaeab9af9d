"""GPTQ (arXiv 2210.17323): a weight is rounded column by column, each making up for the errors of those before it.

    >>> factor = factored(hessian, "mxfp4")          # of X^T X, once for all weights that read the same input
    >>> made = gptq(weight, factor, "mxfp4")
    >>> made.parts["weight_packed"], made.before, made.after

With H = R R^T and R upper triangular, tr((W-Q) H (W-Q)^T) is the sum over rows and columns j of R_jj^2 (t_j - q_j)^2,
where t_j = w_j + sum over i < j of (w_i - q_i) R_ij / R_jj: column j is rounded to the nearest of t_j, and no inverse
is needed. Through a group with a scale of its own several are carried side by side, three exponents of an MX scale or
shares of the largest number for integers, and each row keeps the one whose sum is the least. Columns that see the
most come first; groups stay together, so no layout knows of the order.

Weights of one shape with a Hessian each, the experts of a layer, can be rounded side by side (`gptq_stack`): a GPU
takes as long for the columns of sixteen as for those of one.

A row that is no better by the Hessian than rounded to the nearest is rounded to the nearest.

What is rounded may be another weight than the source's: `compensated` makes one whose products are nearer to those of
the 16-bit model, whose inputs were not rounded and saw no layer that was (GPTAQ, arXiv 2504.02692, and what hidden
states lack already: QEP, arXiv 2504.09629).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quantmint.calibration.lazy import torch
from quantmint.calibration.room import ROUNDED_AT_A_TIME
from quantmint.pipeline.quantize.engines.stream.schedule import many_small_workers
from quantmint.pipeline.quantize.schemes.elements import pack_e2m1, pack_int4, to_nearest
from quantmint.pipeline.quantize.schemes.registry import KERNELS
from quantmint.pipeline.quantize.schemes.scales import INT4_GROUP, MX_GROUP, amax, e8m0, int4_scale
from quantmint.pipeline.quantize.schemes.scheme import Grid

if TYPE_CHECKING:
    from quantmint.pipeline.quantize.schemes.scheme import Parts

_BLOCK = 128
"""Columns that one product of matrices brings up to date."""
_ROWS = 1024
"""Rows that a thread of a CPU takes at a time: columns of them are short, and threads would wait for each other."""
_RIDGE = 0.5
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Of the scale to the nearest, that of integers may be these: what clips the largest number leaves the others finer."""


CARRIED = frozenset(name for name, kernel in KERNELS.items() if kernel.grid is not None)
"""Kernels that GPTQ can stand for."""


def _grid(kernel: str) -> Grid:
    """Return the grid of a kernel; `KeyError` where GPTQ cannot stand for it."""
    grid = KERNELS[kernel].grid
    if grid is None:
        raise KeyError(kernel)
    return grid


@dataclass(frozen=True, slots=True)
class Factor:
    """A decomposed Hessian, on its device.

    ``order`` int64 [I]: the columns in the order in which they are rounded. ``reach`` float32 [I, I]: row j is what
    the errors of the columns before j do to it. ``price`` float32 [I]: what an error costs there. ``fault`` says why
    there is none of these. Of several weights each tensor has one more dimension in front.
    """

    hessian: torch.Tensor
    order: torch.Tensor
    reach: torch.Tensor
    price: torch.Tensor
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """A quantized weight.

    ``parts`` are what the kernel would return, by role. ``nearest`` and ``costs``, float32 [O], are (w-q) H (w-q)^T of
    each row of the weight rounded to the nearest and of ``parts``; NaN where the Hessian is not finite. ``fault``: why
    all of it was rounded to the nearest.
    """

    parts: Parts
    nearest: torch.Tensor
    costs: torch.Tensor
    fault: str | None = None

    @property
    def before(self) -> float:
        """tr((W-Q) H (W-Q)^T) of the weight rounded to the nearest."""
        return float(self.nearest.sum())

    @property
    def after(self) -> float:
        """tr((W-Q) H (W-Q)^T) of ``parts``."""
        return float(self.costs.sum())

    def split(self, rows: Sequence[int]) -> list[Made]:
        """Split the result of weights stacked by rows into one for each, of so many ``rows``."""
        if len(rows) == 1:  # a scale of all has no rows
            return [self]
        columns = [torch.split(each, list(rows)) for each in (*self.parts.values(), self.nearest, self.costs)]
        return [
            Made(dict(zip(self.parts, parts, strict=True)), nearest, costs, self.fault)
            for *parts, nearest, costs in zip(*columns, strict=True)
        ]


def gptq_stack(weights: Sequence[torch.Tensor], factors: Sequence[Factor], kernel: str) -> list[Made]:
    """Quantize weights of one shape [O, I], each with a factor of its own, as `gptq` does one after the other.

    All lie on one device. One weight, a weight whose factor has a fault, and each where the kernel has one scale for a
    whole weight, is quantized alone. Sums of several run in another order than those of one, so last bits may differ.
    """
    single = len(weights) == 1 or KERNELS[kernel].whole
    alone = [at for at, factor in enumerate(factors) if single or factor.fault is not None]
    made = {at: gptq(weights[at], factors[at], kernel) for at in alone}
    together = [at for at in range(len(weights)) if at not in made]
    if together:
        factor = Factor(
            hessian=torch.stack([factors[at].hessian for at in together]),
            order=torch.stack([factors[at].order for at in together]),
            reach=torch.stack([factors[at].reach for at in together]),
            price=torch.stack([factors[at].price for at in together]),
        )
        stack = _gptq(torch.stack([weights[at] for at in together]), None, factor, kernel, None)
        for number, at in enumerate(together):
            parts = {role: part[number] for role, part in stack.parts.items()}
            made[at] = Made(parts, stack.nearest[number], stack.costs[number])
    return [made[at] for at in range(len(weights))]


def factored(hessian: torch.Tensor, kernel: str, *, dampening: float = 0.01, ordered: bool = True) -> Factor:
    """Decompose a Hessian X^T X, float32 [I, I], for one of `kernels.KERNELS`.

    ``dampening`` is a share of the mean diagonal that is added to it, ten and a hundred times as much where the sum
    cannot be decomposed. Inputs that are always zero cost the damping alone. Not ``ordered``, columns keep their
    places. Raises `KeyError` for a kernel that GPTQ is not made for.
    """
    group = _grid(kernel).group
    diagonal = hessian.diagonal()
    mean, none = diagonal.mean(), hessian.new_empty(0)
    if not bool(hessian.isfinite().all()):
        return Factor(hessian, none, none, none, "the Hessian of its inputs is not finite")
    if not bool(mean > 0):
        return Factor(hessian, none, none, none, "nothing but zeros came in")
    inside = diagonal.view(-1, group).argsort(dim=1, descending=True, stable=True)
    groups = diagonal.view(-1, group).sum(dim=1).argsort(descending=True, stable=True)
    order = (groups.unsqueeze(1) * group + inside[groups]).view(-1)
    if not ordered:
        order = torch.arange(len(order), device=order.device)
    backwards = order.flip(0)
    for share in (dampening, 10 * dampening, 100 * dampening):
        matrix = hessian[backwards][:, backwards]
        matrix.diagonal().add_(share * mean)
        lower, info = torch.linalg.cholesky_ex(matrix)
        if not int(info) and bool(lower.isfinite().all()):
            # Of the matrix read from its end, read from its end: R, whose columns are the rows here.
            reach = lower.flip(0, 1).t().contiguous()
            price = reach.diagonal().clone()
            return Factor(hessian, order, reach.div_(price.unsqueeze(1)), price.square_())
    return Factor(hessian, none, none, none, "the Hessian of its inputs cannot be decomposed")


def compensated(weight: torch.Tensor, hessian: torch.Tensor, wanted: torch.Tensor, strength: float) -> torch.Tensor:
    """A weight that makes up for a part of what its products lack: float32 [O, I].

    With inputs X, the ``hessian`` X^T X, and ``wanted`` X^T L, float32 [I, O], where L is lacking, it is W +
    ``strength`` D, where D has the least |X D^T - L|^2 + r |D|^2. r is half of the mean diagonal, and all of D would
    be too much: other texts lose otherwise.
    """
    source = weight.float()
    matrix = hessian.clone()
    matrix.diagonal().add_(_RIDGE * matrix.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(lower.isfinite().all()):
        return source
    return source + strength * torch.cholesky_solve(wanted, lower).t()


def gptq(
    weight: torch.Tensor,
    factor: Factor,
    kernel: str,
    largest: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
) -> Made:
    """Quantize a weight of [O, I] of 16 or 32 bits, on the factor's device, whose rows are independent.

    ``largest`` is the kernel's: the largest magnitude of all that share the scale of a tensor, None where that is
    ``weight``. ``target``, of the weight's type, is what is to be stored in its place, and what costs are of.
    All is computed in float32; the same input gives the same bytes on the same device. Some rows at a time: on a CPU as
    many as a thread takes, however many threads there are, on a GPU as many as the memory is planned for.
    """
    on_cpu = weight.device.type == "cpu"
    count = _ROWS if on_cpu else max(1, ROUNDED_AT_A_TIME // weight.shape[1])
    if not on_cpu and len(weight) <= count:
        return _gptq(weight, target, factor, kernel, largest)
    wanted = weight if target is None else target
    whole = amax(wanted) if largest is None and KERNELS[kernel].whole else largest
    rows = torch.split(weight, count)
    targets = [None] * len(rows) if target is None else torch.split(target, count)
    if on_cpu:
        with many_small_workers(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
            made = list(pool.map(lambda one, other: _gptq(one, other, factor, kernel, whole), rows, targets))
    else:
        made = [_gptq(one, other, factor, kernel, whole) for one, other in zip(rows, targets, strict=True)]
    parts = {
        role: torch.cat([each.parts[role] for each in made]) if part.ndim else part
        for role, part in made[0].parts.items()
    }
    return Made(
        parts, torch.cat([each.nearest for each in made]), torch.cat([each.costs for each in made]), factor.fault
    )


def _gptq(
    weight: torch.Tensor, target: torch.Tensor | None, factor: Factor, kernel: str, largest: torch.Tensor | None
) -> Made:
    """Quantize a weight [O, I], or several with as many factors [E, O, I], on whatever device they lie."""
    wanted = weight if target is None else target
    nearest, source = _nearest(wanted, kernel, largest), wanted.float()
    costs = _costs(source, nearest, factor, kernel)
    if factor.fault is not None:
        return Made(nearest, costs, costs, factor.fault)
    before = costs if target is None else _costs(source, _nearest(weight, kernel, largest), factor, kernel)
    columns, element = _rows_of(source.mT, factor.order), _grid(kernel)
    if element.group > 1:
        elements, scales = _rounded(columns, factor, element, None, wanted.dtype)
        numbers = _in_place(elements, factor.order)
        rows = numbers.flatten(0, -2)
        integers = element.group == INT4_GROUP
        packed = pack_int4(rows) if integers else pack_e2m1(rows, signed_zero=False)
        packed = packed.view(*numbers.shape[:-1], -1)
        stored = scales.to(wanted.dtype) if integers else (scales.view(torch.int32) >> 23).to(torch.uint8)
        groups = factor.order[..., :: element.group] // element.group
        made = {next(iter(nearest)): packed, "weight_scale": _in_place(stored, groups)}
    else:
        scale = nearest["weight_scale"]
        of_rows = scale.float().view(*weight.shape[:-2], 1, -1).expand(*weight.shape[:-2], 1, weight.shape[-2])
        elements, _ = _rounded(columns, factor, element, of_rows, wanted.dtype)
        made = {"weight": _in_place(elements, factor.order).to(torch.float8_e4m3fn), "weight_scale": scale}
    found = _costs(source, made, factor, kernel)
    better = found < costs
    for role, part in made.items():
        if part.ndim == weight.ndim:  # what is not is the same scale
            rows = better.unsqueeze(-1)
            made[role] = torch.where(rows, part.view(torch.uint8), nearest[role].view(torch.uint8)).view(part.dtype)
    return Made(made, before, torch.where(better, found, costs))


def _nearest(weight: torch.Tensor, kernel: str, largest: torch.Tensor | None) -> Parts:
    """Round to the nearest: [..., O, I], whose rows the kernel takes one below the other."""
    parts = KERNELS[kernel].compute(weight.flatten(0, -2), largest)
    return {
        role: part.view(*weight.shape[:-2], -1, *part.shape[1:]) if part.ndim else part for role, part in parts.items()
    }


def _rows_of(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the rows of a matrix [..., I, O] in an order [..., I]."""
    return matrix[order] if matrix.ndim == 2 else matrix.take_along_dim(order.unsqueeze(-1), dim=-2)


def _plus_product(due: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``due`` plus the product of two matrices, or of as many as ``due`` stacks."""
    return (torch.addmm if due.ndim == 2 else torch.baddbmm)(due, left, right)


def _costs(source: torch.Tensor, parts: Parts, factor: Factor, kernel: str) -> torch.Tensor:
    """(w-q) H (w-q)^T of each row as it is read back, float32 [O]."""
    last = source.ndim - 2
    rows = {role: part.flatten(0, last) if part.ndim else part for role, part in parts.items()}
    error = source - KERNELS[kernel].decode(rows).view_as(source)
    with in_tf32():  # what is compared differs by more
        return (error @ factor.hessian).mul_(error).sum(dim=-1)


@contextmanager
def in_tf32() -> Iterator[None]:
    """Let a GPU that can multiply float32 with 11 bits of mantissa, which takes an eighth of the time."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _in_place(ordered: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Turn what was made in an order, [..., I, O], into [..., O, I]."""
    return _rows_of(ordered, order.argsort(dim=-1)).mT.contiguous()


def _rounded(
    columns: torch.Tensor, factor: Factor, element: Grid, scales: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round columns, float32 [I, O] in the factor's order, with scales of [1, O], or chosen ones where that is None.

    Returns elements [I, O] in float32, each times its scale the column, and the scales that were chosen, of ``dtype``
    or powers of two, float32 [I/group, O]. Of several weights each has one more dimension in front.
    """
    reach, group = factor.reach, _group if columns.device.type == "cpu" else _group_at_once
    elements, errors = torch.empty_like(columns), torch.empty_like(columns)
    size, count = max(element.group, MX_GROUP), columns.shape[-2]
    chosen = columns.new_empty(*columns.shape[:-2], -(-count // size), columns.shape[-1])
    for block in range(0, count, _BLOCK):
        end = min(block + _BLOCK, count)
        due = columns[..., block:end, :]
        if block:
            due = _plus_product(due, reach[..., block:end, :block], errors[..., :block, :])
        for first in range(block, end, size):
            here = slice(first, min(first + size, count))
            target = _plus_product(
                due[..., first - block : here.stop - block, :],
                reach[..., here, block:first],
                errors[..., block:first, :],
            )
            given = columns[..., here, :], target, reach[..., here, here], factor.price[..., here]
            rounded, scale = group(*given, scales, element, dtype)
            elements[..., here, :] = rounded
            errors[..., here, :] = columns[..., here, :] - rounded * scale
            chosen[..., first // size, :] = scale[..., 0, :]
    return elements, chosen


def _tried(target: torch.Tensor, element: Grid, dtype: torch.dtype) -> torch.Tensor:
    """Return candidate scales of a group [..., group, O]: float32 [..., n, O], first the one of RTN."""
    largest = target.abs().amax(dim=-2)
    if element.group == INT4_GROUP:
        return torch.stack([int4_scale((largest * share).to(dtype)) for share in _SHARES], dim=-2).float()
    nearest = e8m0(largest)
    # Of a scale of 2 ** -127 float32 has no normal number, and the largest element times 2 ** 127 is too much for it.
    return (torch.stack((nearest, nearest - 1, nearest + 1), dim=-2).clamp_(1, 252) << 23).view(torch.float32)


def _group_at_once(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`_group` on a GPU, which takes less time for some hundred small kernels than a CPU takes to ask for each."""
    shapes = tuple(tuple(each.shape) if isinstance(each, torch.Tensor) else each for each in given)
    graph, own, found = _recorded(shapes, given[0].device)
    for mine, each in zip(own, given, strict=True):
        if isinstance(each, torch.Tensor):
            mine.copy_(each)
    graph.replay()
    rounded, scale = found
    return rounded, scale


@lru_cache(maxsize=4)
def _recorded(shapes: tuple[Any, ...], device: torch.device) -> Any:
    """A CUDA graph of `_group`, what it reads, and what it writes."""
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        own: list[Any] = [torch.ones(each, device=device) if isinstance(each, tuple) else each for each in shapes]
        _group(*own)  # once before, when libraries take the memory that they work in
        graph = torch.cuda.CUDAGraph()
        # Another thread reads the next layer's weights meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = _group(*own)
        return graph, own, found


def _group(
    columns: torch.Tensor,
    target: torch.Tensor,
    reach: torch.Tensor,
    price: torch.Tensor,
    scales: torch.Tensor | None,
    element: Grid,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a few columns [n, O] with ``scales`` [1, O], or with each that `_tried` names where that is None.

    Returns the elements [n, O] of the best scale, and the scale [1, O]. ``target`` is where errors of the columns
    before have moved them to. Of several weights each has one more dimension in front.
    """
    scales = _tried(target, element, dtype) if scales is None else scales
    *front, count, rows = columns.shape
    due, whole = ((each.unsqueeze(-2) / scales.unsqueeze(-3)).flatten(-2) for each in (target, columns))
    due = _plus_product(due, reach.tril(-1), whole)  # less what is stored of them, one row after the other
    rounded = torch.empty_like(due)
    for step in range(count):
        here = due[..., step, :]
        if step and front:
            here.sub_((reach[..., step : step + 1, :step] @ rounded[..., :step, :]).squeeze(-2))
        elif step:
            here.addmv_(rounded[:step].t(), reach[step, :step], alpha=-1)
        to_nearest(here, element.mantissa, element.least, out=rounded[..., step, :])
        rounded[..., step, :].clamp_(element.lowest, element.limit)
    tried = scales.shape[-2]
    if tried == 1:
        return rounded, scales
    squares = due.sub_(rounded).square_()
    cost = (price.unsqueeze(-2) @ squares if front else price @ squares).view_as(scales) * scales.square()
    kept = cost.argmin(dim=-2, keepdim=True)
    of_each = kept.unsqueeze(-3).expand(*front, count, 1, rows)
    return rounded.view(*front, count, tried, rows).gather(-2, of_each).squeeze(-2), scales.gather(-2, kept)
