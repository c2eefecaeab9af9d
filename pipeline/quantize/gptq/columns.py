"""Round the columns of a weight in order, each compensating the errors of the columns before it.

With H = R R^T and R upper triangular, tr((W-Q) H (W-Q)^T) is the sum over rows and columns j of R_jj^2 (t_j - q_j)^2,
where t_j = w_j + sum over i < j of (w_i - q_i) R_ij / R_jj: column j is rounded to the nearest of t_j, and no inverse
is needed. Through a group whose scale GPTQ chooses, the candidate scales of the scheme's grid are carried side by side,
and each row keeps the scale with the least sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

from quantmint.calibration.lazy import torch
from quantmint.pipeline.quantize.gpu.kernels import Launch, gpu_kernel
from quantmint.pipeline.quantize.schemes.elements import to_nearest
from quantmint.pipeline.quantize.schemes.scales import MX_GROUP
from quantmint.pipeline.quantize.schemes.scheme import Grid

_BLOCK = 128
"""Columns that one product of matrices brings up to date."""
Rounded = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Elements, divided by their scale, and their errors, float32 [n, O], and the scales of each group."""
_RECORDING = threading.Lock()
"""Held while a CUDA graph is recorded: of two at a time one finds the other's recording, on whichever device."""


def round_columns(
    columns: torch.Tensor,
    reach: torch.Tensor,
    price: torch.Tensor,
    grid: Grid,
    scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight's columns, float32 [I, O], to a grid with ``scales`` [1, O], or with the grid's choice for None.

    ``reach`` [I, I] and ``price`` [I] are those of a `solver.Factor`, in the order of the columns. Return the elements,
    float32 [I, O], divided by their scale, and the scales of each group, or of 32 columns where groups are smaller,
    float32 [n, O]; scales that are no powers of two are exact in ``dtype``. For several weights each tensor has one
    more leading dimension.
    """
    round_block = _round_block if columns.device.type == "cpu" else _replay_block
    rounding = partial(round_block, scales=scales, grid=grid, dtype=dtype)
    elements, _, chosen = _round_in_steps(_BLOCK, rounding, columns, columns, reach, price)
    return elements, chosen


def _round_in_steps(
    step: int,
    rounding: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Rounded],
    columns: torch.Tensor,
    due: torch.Tensor,
    reach: torch.Tensor,
    price: torch.Tensor,
) -> Rounded:
    """Round columns [n, O] a ``step`` at a time by ``rounding``, which gets some of them with their due.

    The errors of each step are compensated in the columns ``due`` of the next ones.
    """
    elements, errors, chosen = torch.empty_like(columns), torch.empty_like(columns), []
    count = columns.shape[-2]
    for first in range(0, count, step):
        here = slice(first, min(first + step, count))
        target = due[..., here, :]
        if first:
            target = _add_product(target, reach[..., here, :first], errors[..., :first, :])
        rounded = rounding(columns[..., here, :], target, reach[..., here, here], price[..., here])
        elements[..., here, :], errors[..., here, :], scales = rounded
        chosen.append(scales.clone())  # the next step may overwrite them
    return elements, errors, torch.cat(chosen, dim=-2)


def _add_product(due: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ``due`` + ``first`` @ ``second``, for matrices or for stacks of matrices."""
    return (torch.addmm if due.ndim == 2 else torch.baddbmm)(due, first, second)


def _round_block(
    columns: torch.Tensor,
    due: torch.Tensor,
    reach: torch.Tensor,
    price: torch.Tensor,
    scales: torch.Tensor | None,
    grid: Grid,
    dtype: torch.dtype,
) -> Rounded:
    """Round a block of columns [n, O] group by group. ``due`` [n, O] compensates for the errors of earlier blocks."""

    def rounding(group: torch.Tensor, target: torch.Tensor, inside: torch.Tensor, prices: torch.Tensor) -> Rounded:
        rounded, scale = _round_group(group, target, inside, prices, scales, grid, dtype)
        return rounded, group - rounded * scale, scale

    # As many columns as have one scale, or 32 where a scale is a row's.
    return _round_in_steps(max(grid.group, MX_GROUP), rounding, columns, due, reach, price)


def _replay_block(
    columns: torch.Tensor,
    due: torch.Tensor,
    reach: torch.Tensor,
    price: torch.Tensor,
    scales: torch.Tensor | None,
    grid: Grid,
    dtype: torch.dtype,
) -> Rounded:
    """Run `_round_block` as a CUDA graph: a GPU runs small kernels faster than a CPU launches them.

    The results are overwritten by the next call with the same shapes.
    """
    tensors = (columns, due, reach, price) if scales is None else (columns, due, reach, price, scales)
    graph, inputs, outputs = _recorded(tuple(tuple(tensor.shape) for tensor in tensors), grid, dtype, columns.device)
    for buffer, tensor in zip(inputs, tensors, strict=True):
        buffer.copy_(tensor)
    graph.replay()
    elements, errors, chosen = outputs
    return elements, errors, chosen


@lru_cache(maxsize=32)  # a few shapes on each of some devices
def _recorded(shapes: tuple[tuple[int, ...], ...], grid: Grid, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a CUDA graph of `_round_block`, the list of tensors that it reads, and the three that it writes.

    ``shapes`` are those of the tensors it reads.
    """
    with _RECORDING, torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        inputs = [torch.ones(shape, device=device) for shape in shapes]
        columns, due, reach, price, *fixed = inputs
        arguments = (columns, due, reach, price, fixed[0] if fixed else None, grid, dtype)
        _round_block(*arguments)  # once before: libraries take the memory that they work in, kernels are compiled
        graph = torch.cuda.CUDAGraph()
        # On a stream of the device: the default one of all graphs is the first device's. Other threads read the next
        # layer's weights meanwhile, and compute on other devices.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = _round_block(*arguments)
        return graph, inputs, outputs


def _kernel(count: int, grid: Grid, device: torch.device) -> Launch | None:
    """Return the kernel that does the work of `_round_group` for groups of ``count`` columns on a GPU."""
    limits = {"LOWEST": f"{float(grid.lowest)}f", "LIMIT": f"{float(grid.limit)}f"}
    return gpu_kernel("round_group", device, COUNT=count, MANTISSA=grid.mantissa, LEAST=f"({grid.least})", **limits)


def _round_group(
    columns: torch.Tensor,
    target: torch.Tensor,
    reach: torch.Tensor,
    price: torch.Tensor,
    scales: torch.Tensor | None,
    grid: Grid,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a few columns [n, O] with ``scales`` [1, O], or for None with the best of the grid's candidates.

    Return the elements [n, O], divided by their scale, and the scale [1, O]. ``target`` [n, O] is ``columns`` after
    compensating the errors of earlier columns. For several weights each tensor has one more leading dimension.
    """
    if scales is None:
        assert grid.candidates is not None  # noqa: S101 - a grid of groups has them
        scales = grid.candidates(target, dtype)
    *front, count, rows = columns.shape
    if (launch := _kernel(count, grid, columns.device)) is not None:
        rounded, chosen = torch.empty_like(columns), torch.empty_like(scales[..., :1, :])
        tensors = [tensor.contiguous() for tensor in (columns, target, reach, price, scales)]
        launch(rows, prod(front), [*tensors, rounded, chosen, rows, scales.shape[-2]])
        return rounded, chosen
    due, scaled = ((matrix.unsqueeze(-2) / scales.unsqueeze(-3)).flatten(-2) for matrix in (target, columns))
    due = _add_product(due, reach.tril(-1), scaled)  # less what is stored of them, one row after the other
    rounded = torch.empty_like(due)
    for step in range(count):
        here = due[..., step, :]
        if step and front:
            here.sub_((reach[..., step : step + 1, :step] @ rounded[..., :step, :]).squeeze(-2))
        elif step:
            here.addmv_(rounded[:step].t(), reach[step, :step], alpha=-1)
        to_nearest(here, grid.mantissa, grid.least, out=rounded[..., step, :])
        rounded[..., step, :].clamp_(grid.lowest, grid.limit)
    count_scales = scales.shape[-2]
    if count_scales == 1:
        return rounded, scales
    squares = due.sub_(rounded).square_()
    cost = (price.unsqueeze(-2) @ squares if front else price @ squares).view_as(scales) * scales.square()
    best = cost.argmin(dim=-2, keepdim=True)
    index = best.unsqueeze(-3).expand(*front, count, 1, rows)
    return rounded.view(*front, count, count_scales, rows).gather(-2, index).squeeze(-2), scales.gather(-2, best)
