"""Channel scaling and order of channels: folds of a layer that follow from what runs through it.

    for matrix, largest in fold_layer(model, name, anatomy, look, reader, parameters):
        ...                                                  # the largest magnitudes that enter the matrix now

Scaling (arXiv 2306.00978): what channels carry is divided by the power of its root mean square with which the product
loses the least, inputs and weights rounded as they are when it is served. The factors become a part of the norm before,
or of the rows of the projection before. What is added to the residual stream counts by the size of that: a few tokens
carry a hundred times as much as others, the next norm divides them by it, and they would decide alone.

Order: channels between the matrices of an MLP are sorted by magnitude, so that those of like size share an MX scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibration.sequential import Look, Seen
from pipeline.quantize.engines.stream.folds import Anatomy, Matrix, Norm, Pair

if TYPE_CHECKING:
    import torch

_STEPS = 10  # and the halves beside the best of them


@dataclass(frozen=True, slots=True)
class Reader:
    """A weight, float32 [O, I], with what becomes of its inputs and of itself.

    ``served`` takes rows [n, I] with the largest magnitude in each channel [I], ``stored`` a weight.
    """

    weight: torch.Tensor
    served: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    stored: Callable[[torch.Tensor], torch.Tensor]


def fold_layer(
    model: Any,
    name: str,
    anatomy: Anatomy,
    look: Look,
    reader: Callable[[Matrix], Reader | None],
    parameters: Mapping[str, float | int | bool],
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Order and scale the channels of a layer; what reads them, with the largest magnitude in each, float32 [I].

    ``reader`` knows what becomes of a matrix; of those that stay in 16 bit nothing.
    """
    layer = model.get_submodule(name)
    pairs = [*anatomy.inner, *([anatomy.value] if anatomy.value is not None else [])]
    places: dict[Norm | Pair, str] = {norm: f"{name}.{norm.weight}".removesuffix(".weight") for norm in anatomy.norms}
    inputs: dict[Norm | Pair, str] = {pair: f"{name}.{pair.second.weight}".removesuffix(".weight") for pair in pairs}
    seen = look(list(inputs.values()), [*places.values(), name])
    sizes = seen[name].rows.float().square().mean(dim=1, keepdim=True).sqrt().clamp_(min=1e-6)
    for fold, place in (places | inputs).items():
        found = seen[place]
        if parameters.get("permutation") and isinstance(fold, Pair) and fold.beside is not None:
            order = by_size(found)
            fold.arrange(layer, order)
            found = Seen(found.rows[:, order], found.largest[order])
        matrices = fold.readers if isinstance(fold, Norm) else (fold.second,)
        largest, readers = found.largest, [each for each in map(reader, matrices) if each is not None]
        if parameters.get("scaling") and readers:
            weights = 1 / sizes if isinstance(fold, Pair) else 1.0
            factors = best_factors(found, readers, fold.spread, fold.count(layer), weights)
            fold.scale(layer, factors)
            largest = largest / fold.spread(factors)
        yield from ((matrix, largest) for matrix in matrices)


def best_factors(
    seen: Seen,
    readers: Sequence[Reader],
    spread: Callable[[torch.Tensor], torch.Tensor],
    count: int,
    weights: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """The factors, float32 [count], of which ``spread`` makes those of the inputs, [I]: ones where none helps.

    ``weights`` of the rows, float32 [n, 1], are what their errors are multiplied with.
    """
    import torch

    rows = seen.rows.float()
    wanted = [rows @ reader.weight.t() for reader in readers]
    # Of channels that are served several times, one after the other by runs, the mean.
    places = spread(torch.arange(count, device=rows.device, dtype=torch.float32)).long()
    squares = rows.square().mean(dim=0)
    size = (rows.new_zeros(count).index_add_(0, places, squares) / (len(places) // count)).sqrt()
    size = size.clamp_(min=float(size.amax()) * 1e-5 or 1.0)
    found: dict[float, tuple[float, torch.Tensor]] = {}

    def lost(power: float) -> float:
        factors = size**power
        factors /= (factors.amax() * factors.amin()).sqrt()
        inputs = spread(factors)
        scaled, largest, total = rows / inputs, seen.largest / inputs, 0.0
        for reader, of in zip(readers, wanted, strict=True):
            made = reader.served(scaled, largest) @ reader.stored(reader.weight * inputs).t()
            total += float(made.sub_(of).mul_(weights).square_().sum())
        found[power] = total, factors
        return total

    best = min((step / _STEPS for step in range(_STEPS + 1)), key=lost)
    for beside in (best - 0.5 / _STEPS, best + 0.5 / _STEPS):
        lost(min(max(beside, 0.0), 1.0))
    return min(found.values(), key=lambda of: of[0])[1]


def by_size(seen: Seen) -> torch.Tensor:
    """The channels in order of the squares that they carry, the largest first: int64 [I]."""
    order: torch.Tensor = seen.rows.float().square().sum(dim=0).argsort(descending=True, stable=True)
    return order
