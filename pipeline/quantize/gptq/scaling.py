"""Channel scaling (arXiv 2306.00978): a fold of a layer with the factors that its products lose the least with.

    for fold, largest in scale_layer(model, name, folds, look, reader):
        ...                                                  # the largest magnitudes that enter its readers now

What channels carry is divided by a power of its root mean square, and the weights that read it are multiplied; both are
rounded as they are when the layer is served. What is added to the residual stream counts by the size of that: a few
tokens carry a hundred times as much as others, the next norm divides them by it, and they would decide alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quantmint.calibration.lazy import torch
from quantmint.calibration.sequential import InputSample, Look
from quantmint.pipeline.quantize.gptq.folds import Fold, Matrix
from quantmint.pipeline.quantize.gptq.solver import in_tf32

_STEPS = 10  # and the halves beside the best of them


@dataclass(frozen=True, slots=True)
class ChannelReader:
    """A weight, float32 [O, I], with what becomes of its inputs and of itself.

    ``served`` takes rows [n, I] with the largest magnitude in each channel [I], ``stored`` a weight.
    """

    weight: torch.Tensor
    served: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    stored: Callable[[torch.Tensor], torch.Tensor]


def scale_layer(
    model: Any,
    name: str,
    folds: Iterable[Fold],
    look: Look,
    reader: Callable[[Matrix], ChannelReader | None],
    ranged: bool,
) -> Iterator[tuple[Fold, torch.Tensor]]:
    """Scale the channels of a layer; each fold with the largest magnitude in each channel, float32 [C].

    All tokens count the same where hidden states are several streams: it is unknown what the next norm divides by.
    ``reader`` knows what becomes of a matrix; of those that stay in 16 bit nothing. ``ranged``: the magnitudes are of
    all batches, and not of those alone that rows are taken from.
    """
    layer = model.get_submodule(name)
    places = {fold: f"{name}.{fold.place}" for fold in folds}
    entering = [place for fold, place in places.items() if fold.entering]
    seen = look(entering, [name, *(place for fold, place in places.items() if not fold.entering)], ranged)
    sizes = 1.0 if name not in seen else seen[name].rows.float().square().mean(1, keepdim=True).sqrt().clamp_(min=1e-6)
    for fold, place in places.items():
        if place not in seen:
            continue
        largest, readers = seen[place].largest, [each for each in map(reader, fold.readers) if each is not None]
        if readers:
            with in_tf32():  # which holds 16 bits of rows and weights, and what is rounded to fewer
                factors = best_factors(seen[place], readers, 1 / sizes if fold.entering else 1.0)
            fold.scale(layer, factors)
            largest = largest / factors
        yield fold, largest


def best_factors(
    seen: InputSample, readers: Sequence[ChannelReader], weights: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """The factors, float32 [C], that products lose the least with: ones where none helps.

    ``weights`` of the rows, float32 [n, 1], are what their errors are multiplied with.
    """
    rows = seen.rows.float()
    wanted = [rows @ reader.weight.t() for reader in readers]
    size = rows.square().mean(dim=0).sqrt()
    size = size.clamp_(min=float(size.amax()) * 1e-5 or 1.0)
    found: dict[float, tuple[float, torch.Tensor]] = {}

    def lost(power: float) -> float:
        factors = size**power
        factors /= (factors.amax() * factors.amin()).sqrt()
        scaled, largest, total = rows / factors, seen.largest / factors, 0.0
        for reader, of in zip(readers, wanted, strict=True):
            made = reader.served(scaled, largest) @ reader.stored(reader.weight * factors).t()
            total += float(made.sub_(of).mul_(weights).square_().sum())
        found[power] = total, factors
        return total

    best = min((step / _STEPS for step in range(_STEPS + 1)), key=lost)
    for beside in (best - 0.5 / _STEPS, best + 0.5 / _STEPS):
        lost(min(max(beside, 0.0), 1.0))
    return min(found.values(), key=lambda of: of[0])[1]
