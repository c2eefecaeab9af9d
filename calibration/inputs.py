"""Inputs of linear modules, rounded as they will be served: once for all modules that read the same input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from quantmint.calibration.hooks import entering, preceding, with_input
from quantmint.calibration.lazy import torch

Rounding = Callable[["torch.Tensor"], "torch.Tensor"]
"""Rounds an input [..., I] as the served model does, in the dtype that it had."""


class InputRounder:
    """Round inputs, and remember the last one: q, k and v read one tensor, as gate and up do, and run in a row.

    An input is the last one if it is the same tensor object for the same rounding object. No earlier input is
    remembered, since each takes memory. ``reader`` is the name of the first module that read the last input.
    """

    def __init__(self) -> None:
        self.reader = ""
        self._last: tuple[torch.Tensor, Rounding, torch.Tensor] | None = None

    def __call__(self, tensor: torch.Tensor, rounding: Rounding, reader: str = "") -> torch.Tensor:
        """Return ``rounding`` of the input of module ``reader``: the same tensor object again for the last input."""
        if self._last is None or self._last[0] is not tensor or self._last[1] is not rounding:
            self._last, self.reader = (tensor, rounding, rounding(tensor)), reader
        return self._last[2]

    def clear(self) -> None:
        """Forget the last input, and so free its tensors."""
        self._last = None


def rounding_inputs(model: Any, roundings: Mapping[str, Rounding]) -> AbstractContextManager[None]:
    """Return a context in which the inputs of linear modules are rounded; ``roundings`` are by the module's name."""
    rounder = InputRounder()

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_input(args, kwargs, rounder(entering(args, kwargs), roundings[name]))

    return preceding(model, roundings, before)
