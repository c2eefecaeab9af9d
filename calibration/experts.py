"""Stacked experts in layer mode: X^T X of what the router sends to each of them, and inputs as they will be served.

An expert whose tokens are fewer than its inputs has a sum that says nothing of some directions: in its place stands
that of all tokens of all experts of the layer, and the expert is named by whoever rounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quantmint.calibration.hessians import InputStatistics, add_square, mirrored
from quantmint.calibration.hooks import hooked, taking_inputs
from quantmint.calibration.inputs import Rounding
from quantmint.calibration.lazy import torch


def stacks(model: Any, layer: str, roundings: Mapping[str, Rounding]) -> list[str]:
    """Return the parameters below ``layer`` that stack experts with an entry in ``roundings``, in the model's order.

    ``roundings`` is keyed by ``{parameter}.{expert number}``.
    """
    rounded = {name.rpartition(".")[0] for name in roundings}
    names = (f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_parameters())
    return [name for name in names if name in rounded]


@contextmanager
def rounding_experts(
    model: Any, names: Sequence[str], roundings: Mapping[str, Rounding], collector: ExpertCollector | None = None
) -> Iterator[None]:
    """Within the block, round the inputs of stacked experts as they are served.

    ``names`` are the stacks in the order in which they multiply; ``roundings`` is keyed by ``{stack}.{expert number}``.
    A ``collector`` adds up the rounded inputs of its stack; products that it does not need are then replaced by zeros,
    so the layer's output is meaningless.
    """
    stack = None if collector is None else collector.stack
    later = frozenset() if stack is None else frozenset(names[names.index(stack) + 1 :])

    def taking(module: str) -> Callable[[str, int, torch.Tensor], torch.Tensor | None]:
        def take(key: str, number: int, entering: torch.Tensor) -> torch.Tensor | None:
            name = f"{module}.{key}"
            if collector is not None and (name in later or not collector.reads(number)):
                return None
            rounding = roundings.get(f"{name}.{number}")
            rounded = entering if rounding is None else rounding(entering)
            if collector is None or name != stack:
                return rounded
            collector.add(number, rounded)
            return None

        return take

    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    with hooked(handle for module in modules for handle in taking_inputs(model.get_submodule(module), taking(module))):
        yield


class ExpertCollector:
    """Sum of X^T X, float32 [I, I], of the inputs of each of some ``experts`` of a ``stack``.

    With ``pooled`` it also sums X^T X over the tokens of all experts of the stack.
    """

    def __init__(self, stack: str, experts: Collection[int], *, pooled: bool = True) -> None:
        self.stack = stack
        self._experts, self._pooled = experts, pooled
        self._sums: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, int] = {}
        self._all: torch.Tensor | None = None

    def reads(self, expert: int) -> bool:
        """Return whether the inputs of an expert are summed here."""
        return self._pooled or expert in self._experts

    def add(self, expert: int, rows: torch.Tensor) -> None:
        """Add the inputs of an expert's product, [tokens, I]; rows that are all zero are left out."""
        # An expert that gets all rows gets zeros for those that the router sent elsewhere.
        rows = rows[(rows != 0).any(dim=-1)]
        if not len(rows):
            return
        if self._pooled:
            self._all = _zeros(rows) if self._all is None else self._all
            add_square(self._all, rows)
        if expert in self._experts:
            if expert not in self._sums:
                self._sums[expert] = _zeros(rows)
            add_square(self._sums[expert], rows)
            self._tokens[expert] = self._tokens.get(expert, 0) + len(rows)

    def join(self, addend: ExpertCollector, device: str) -> None:
        """Add the sums of another collector, moved to ``device``."""
        if addend._all is not None:
            there = addend._all.to(device)
            self._all = there if self._all is None else self._all.add_(there)
        for expert, square in addend._sums.items():
            there = square.to(device)
            self._sums[expert] = self._sums[expert].add_(there) if expert in self._sums else there
            self._tokens[expert] = self._tokens.get(expert, 0) + addend._tokens[expert]

    def of_all(self) -> torch.Tensor | None:
        """Return the pooled X^T X, float32 [I, I]; None where no token came in, or the collector is not ``pooled``.

        Nothing may be added afterwards.
        """
        return None if self._all is None else mirrored(self._all)

    def statistics(self, of_all: torch.Tensor | None) -> list[InputStatistics]:
        """Return the statistics of each expert that got a token, by expert number. Call it after the last `add`.

        ``of_all`` is the pooled sum; it replaces that of an expert with fewer tokens than inputs. Where it is None, the
        list is empty.
        """
        if of_all is None:
            return []
        return [
            InputStatistics((f"{self.stack}.{expert}",), of_all, tokens, pooled=True)
            if tokens < len(of_all)
            else InputStatistics((f"{self.stack}.{expert}",), mirrored(self._sums[expert]), tokens)
            for expert, tokens in sorted(self._tokens.items())
        ]


def _zeros(rows: torch.Tensor) -> torch.Tensor:
    """Return a square of zeros that sums X^T X of such rows, float32 [I, I]."""
    return rows.new_zeros(rows.shape[1], rows.shape[1], dtype=torch.float32)
