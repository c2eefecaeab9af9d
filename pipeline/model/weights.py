"""Where one weight lies on disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where the 16-bit weight [O, I] of one linear module comes from.

    ``tensor`` is a name on disk. ``expert`` picks an entry of the first dimension of a tensor that stacks experts,
    ``rows`` the output rows [first, last) of that matrix (gate and up lie in one), and ``transposed`` says that it is
    stored as [I, O]. ``scale`` names the tensor of block scales that an FP8 source is multiplied with.
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    scale: str | None = None
