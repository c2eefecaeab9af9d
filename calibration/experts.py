"""Stacked experts in layer mode: X^T X of what the router sends to each of them, and inputs as they will be served.

An expert whose tokens are fewer than its inputs has a sum that says nothing of some directions: in its place stands
that of all tokens of all experts of the layer, and the expert is named by whoever rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quantmint.calibration.hessians import InputStatistics, Rounding, add_square, mirrored
from quantmint.calibration.hooks import hooked, taking_inputs
from quantmint.calibration.lazy import torch

See = Callable[[str, int, "torch.Tensor"], None]
"""Takes a stack's name, an expert's number, and what enters its product, [tokens, I], rounded."""


def stacks(model: Any, layer: str, roundings: Mapping[str, Rounding]) -> list[str]:
    """Return the parameters below a layer that stack experts with a rounding, in the order of their products.

    ``roundings`` are by the parameter's name with the expert's number behind.
    """
    rounded = {name.rpartition(".")[0] for name in roundings}
    names = (f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_parameters())
    return [name for name in names if name in rounded]


@contextmanager
def rounding_experts(
    model: Any, names: Sequence[str], roundings: Mapping[str, Rounding], see: See = lambda *_: None
) -> Iterator[None]:
    """Within the block, round the inputs of the experts of some stacks, and show them to ``see``."""

    def taking(module: str) -> Callable[[str, int, torch.Tensor], torch.Tensor]:
        def take(key: str, number: int, entering: torch.Tensor) -> torch.Tensor:
            rounding = roundings.get(f"{module}.{key}.{number}")
            rounded = entering if rounding is None else rounding(entering)
            see(f"{module}.{key}", number, rounded)
            return rounded

        return take

    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    with hooked(handle for module in modules for handle in taking_inputs(model.get_submodule(module), taking(module))):
        yield


class ExpertCollector:
    """Sum X^T X of each of some experts of a stack, and of all its tokens; float32 [I, I] each."""

    def __init__(self, name: str, numbers: range) -> None:
        self._name, self._numbers = name, numbers
        self._sums: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, int] = {}
        self._all: torch.Tensor | None = None

    def see(self, name: str, number: int, rows: torch.Tensor) -> None:
        """Add what enters an expert's product, [tokens, I]."""
        if name != self._name:
            return
        # An expert that gets all rows gets zeros for those that the router sent elsewhere.
        rows = rows[(rows != 0).any(dim=-1)]
        if not len(rows):
            return
        if self._all is None:
            self._all = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float32)
        add_square(self._all, rows)
        if number in self._numbers:
            square = self._sums.setdefault(number, torch.zeros_like(self._all))
            add_square(square, rows)
            self._tokens[number] = self._tokens.get(number, 0) + len(rows)

    def join(self, addend: ExpertCollector, device: str) -> None:
        """Add the sums over more tokens, on a ``device``."""
        if addend._all is None:
            return
        self._all = torch.zeros_like(addend._all, device=device) if self._all is None else self._all
        self._all += addend._all.to(device)
        for number, square in addend._sums.items():
            here = self._sums.setdefault(number, torch.zeros_like(self._all))
            here += square.to(device)
            self._tokens[number] = self._tokens.get(number, 0) + addend._tokens[number]

    def statistics(self) -> list[InputStatistics]:
        """Return the sums by expert, without experts that the router sent no token to."""
        if self._all is None:
            return []
        of_all, width = mirrored(self._all), self._all.shape[0]
        return [
            InputStatistics((f"{self._name}.{number}",), of_all, tokens, pooled=True)
            if tokens < width
            else InputStatistics((f"{self._name}.{number}",), mirrored(self._sums[number]), tokens)
            for number, tokens in sorted(self._tokens.items())
        ]
