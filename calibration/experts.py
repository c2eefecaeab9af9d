"""Stacked experts in layer mode: X^T X of what the router sends to each of them, and inputs as they will be served.

An expert whose tokens are fewer than its inputs has a sum that says nothing of some directions: in its place stands
that of all tokens of all experts of the layer, and the expert is named by whoever rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quantmint.calibration.hessians import InputStatistics, Rounding, add_square, mirrored
from quantmint.calibration.hooks import hooked, taking_inputs
from quantmint.calibration.lazy import torch


def stacks(model: Any, layer: str, roundings: Mapping[str, Rounding]) -> list[str]:
    """Return the parameters below a layer that stack experts with a rounding, in the order of their products.

    ``roundings`` are by the parameter's name with the expert's number behind.
    """
    rounded = {name.rpartition(".")[0] for name in roundings}
    names = (f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_parameters())
    return [name for name in names if name in rounded]


@contextmanager
def rounding_experts(
    model: Any, names: Sequence[str], roundings: Mapping[str, Rounding], collector: ExpertCollector | None = None
) -> Iterator[None]:
    """Within the block, round the inputs of the experts of some stacks, named in the order of their products.

    A ``collector`` adds up those that it wants. What it does not need is not computed: the results of the layer are
    meaningless then.
    """
    needless = frozenset() if collector is None else frozenset(names[names.index(collector.stack) :])

    def taking(module: str) -> Callable[[str, int, torch.Tensor], torch.Tensor | None]:
        def take(key: str, number: int, entering: torch.Tensor) -> torch.Tensor | None:
            name = f"{module}.{key}"
            if collector is not None and not collector.reads(number):
                return None
            if name in needless and (collector is None or name != collector.stack):
                return None
            rounding = roundings.get(f"{name}.{number}")
            rounded = entering if rounding is None else rounding(entering)
            if collector is not None and name == collector.stack:
                collector.add(number, rounded)
            return None if name in needless else rounded

        return take

    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    with hooked(handle for module in modules for handle in taking_inputs(model.get_submodule(module), taking(module))):
        yield


class ExpertCollector:
    """Sum X^T X of each of some ``experts`` of a ``stack``, float32 [I, I] each.

    ``pooled``: of all tokens of all experts too.
    """

    def __init__(self, stack: str, experts: Collection[int], *, pooled: bool = True) -> None:
        self.stack = stack
        self._experts, self._pooled = experts, pooled
        self._sums: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, int] = {}
        self._all: torch.Tensor | None = None

    def reads(self, expert: int) -> bool:
        """Whether what enters an expert is wanted."""
        return self._pooled or expert in self._experts

    def add(self, expert: int, rows: torch.Tensor) -> None:
        """Add what enters an expert's product, [tokens, I]."""
        # An expert that gets all rows gets zeros for those that the router sent elsewhere.
        rows = rows[(rows != 0).any(dim=-1)]
        if not len(rows):
            return
        square = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float32)
        add_square(square, rows)
        if self._pooled:
            self._all = square.clone() if self._all is None else self._all.add_(square)
        if expert in self._experts:
            self._sums[expert] = self._sums[expert].add_(square) if expert in self._sums else square
            self._tokens[expert] = self._tokens.get(expert, 0) + len(rows)

    def join(self, addend: ExpertCollector, device: str) -> None:
        """Add the sums over more tokens, on a ``device``."""
        if addend._all is not None:
            there = addend._all.to(device)
            self._all = there if self._all is None else self._all.add_(there)
        for expert, square in addend._sums.items():
            there = square.to(device)
            self._sums[expert] = self._sums[expert].add_(there) if expert in self._sums else there
            self._tokens[expert] = self._tokens.get(expert, 0) + addend._tokens[expert]

    def of_all(self) -> torch.Tensor | None:
        """Return the sum of all tokens of all experts; None where the router sent none. Nothing can be added then."""
        return None if self._all is None else mirrored(self._all)

    def statistics(self, of_all: torch.Tensor | None) -> list[InputStatistics]:
        """Return the sums by expert, without experts that the router sent no token to; nothing can be added then.

        ``of_all`` is the sum of all experts' tokens, which stands for that of an expert that few reach.
        """
        if of_all is None:
            return []
        return [
            InputStatistics((f"{self.stack}.{expert}",), of_all, tokens, pooled=True)
            if tokens < len(of_all)
            else InputStatistics((f"{self.stack}.{expert}",), mirrored(self._sums[expert]), tokens)
            for expert, tokens in sorted(self._tokens.items())
        ]
