"""Read experts that lie one by one on the disk straight into the parameter that stacks them.

transformers holds all experts, the stack of each projection and the concatenated stacks at a time, which is three times
the parameter: 45 GB of a layer of DeepSeek R1. Here a tensor is copied to its place as soon as it is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quantmint.calibration.lazy import torch

_READERS = 4  # threads, each of which holds one expert's tensor


@dataclass(frozen=True, slots=True)
class StackPlaces:
    """The places of the single experts' tensors in a stacked parameter [experts, projections * rows, columns].

    ``by_name`` maps each tensor's name to its expert and projection.
    """

    by_name: Mapping[str, tuple[int, int]]
    experts: int
    projections: int

    def rows(self, projection: int, shape: torch.Size) -> slice:
        """Return the rows of ``projection`` within one expert, for a stacked parameter of ``shape``."""
        count = shape[1] // self.projections
        return slice(projection * count, (projection + 1) * count)


def stack_places(owners: Iterable[str], rules: Iterable[Any]) -> StackPlaces | None:
    """Return the places in one stacked parameter of the tensors ``owners`` on disk, by transformers' loading ``rules``.

    None unless there is one tensor for each expert and projection, stacked over the experts and then concatenated by
    rows; transformers loads other parameters itself.
    """
    owners = list(owners)
    for rule in rules:
        operations = [(type(operation).__name__, operation.dim) for operation in _stacking(rule)]
        if operations not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            continue
        patterns = [re.compile(re.escape(pattern).replace(r"\*", r"(\d+)") + "$") for pattern in rule.source_patterns]
        places = {
            name: (int(match[1]), projection)
            for name in owners
            for projection, pattern in enumerate(patterns)
            if pattern.groups == 1 and (match := pattern.search(name)) is not None
        }
        experts, odd = divmod(len(owners), len(patterns))
        expected = {(expert, projection) for expert in range(experts) for projection in range(len(patterns))}
        if places.keys() == set(owners) and not odd and set(places.values()) == expected:
            return StackPlaces(places, experts, len(patterns))
    return None


def _stacking(rule: Any) -> list[Any]:
    """Return the operations of a loading rule; none if one has no dimension, or if the rule has several targets."""
    operations = list(getattr(rule, "operations", None) or [])
    if len(rule.target_patterns) != 1 or not all(hasattr(operation, "dim") for operation in operations):
        return []
    return operations


def read_stack(
    places: StackPlaces, read: Callable[[str], torch.Tensor], shape: torch.Size, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Return a stacked parameter of ``shape`` on a device, read tensor by tensor with ``read`` and cast to ``dtype``.

    Raises `ValueError` where a tensor, or the number of experts, does not fit ``shape``.
    """
    if len(shape) != 3 or shape[0] != places.experts or shape[1] % places.projections:
        raise ValueError(f"found {places.experts} experts, expected {list(shape)} from config.json")
    with torch.inference_mode(False):  # threads write to it, which are in no such mode
        stack = torch.empty(shape, dtype=dtype, device=device)

    def place(name: str) -> None:
        expert, projection = places.by_name[name]
        target = stack[expert, places.rows(projection, shape)]
        with torch.no_grad():
            tensor = read(name)
            if tensor.shape != target.shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(target.shape)} from config.json")
            target.copy_(tensor)

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(place, places.by_name))
    return stack
