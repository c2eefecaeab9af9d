"""Experts that transformers stacks in 3-D parameters: their weights put in place, their inputs rounded.

A stack has no linear modules that a hook could be put on. Its products are seen where they are computed, while the
module runs, so that no architecture's arithmetic is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from calibration.hooks import stacked_part
from pipeline.model.weights import Place

if TYPE_CHECKING:
    import torch

Round = Callable[["torch.Tensor"], "torch.Tensor"]


def round_inputs(module: Any, rounds: Mapping[tuple[str, int], Round]) -> None:
    """Round what enters the products of a module that stacks experts, whenever it runs.

    ``rounds`` has an entry for each parameter and number of an expert whose input is rounded.
    """
    modes: list[Any] = []

    def before(module: Any, *_: Any) -> None:
        parameters = {key: p for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
        modes.append(_rounding(parameters, rounds))
        modes[-1].__enter__()

    def after(*_: Any) -> None:
        modes.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


def fill(module: Any, place: Place, weight: torch.Tensor) -> None:
    """Copy a weight, [O, I], into its part of a stack."""
    part = getattr(module, place.parameter)[place.expert]
    part = part.t() if place.transposed else part
    part[slice(*place.rows)].copy_(weight)


def _rounding(parameters: Mapping[str, torch.nn.Parameter], rounds: Mapping[tuple[str, int], Round]) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    products = {torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
    products |= {torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm}

    class Rounding(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in products and len(args) > 1:
                owner = stacked_part(parameters, args[1])
                if owner is not None:
                    args = (self._rounded(args[0], *owner), *args[1:])
            return func(*args, **(kwargs or {}))

        def _rounded(self, entering: torch.Tensor, key: str, one: int | None) -> torch.Tensor:
            if one is not None:
                return rounds[key, one](entering) if (key, one) in rounds else entering
            each = [rounds[key, e](rows) if (key, e) in rounds else rows for e, rows in enumerate(entering)]
            return torch.stack(each)

    return Rounding()
