"""Means and ratios of sums with their standard error, where units of several items are drawn together.

Every score here is a ratio of two sums: of score changes and items, of log likelihoods and words. The items that share
a passage stand or fall together, so the unit that counts as drawn is the passage, of a size of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ratio:
    """sum(y) / sum(w) over `units` clusters, its standard error, and t's degrees of freedom, units - 1."""

    value: float
    standard_error: float
    units: int


def ratio(y: NDArray[np.float64], w: NDArray[np.float64]) -> Ratio:
    """Ratio of the sums of `y` and `w`, shape (units,) each, the totals of each cluster, at least two.

    The standard error is linearised: residuals y - value * w, sum of squares times G / (G - 1), over sum(w). That is
    the clustered standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640, section 2.2) with the usual
    correction for G clusters, Cochran's ratio estimator ("Sampling Techniques", section 6.3) where weights differ, and
    the ordinary standard error of a mean where every unit is one item.
    """
    import numpy as np

    units = len(y)
    if units < 2:
        raise ValueError(f"a standard error needs two units, found {units}")
    total = float(np.sum(w))
    value = float(np.sum(y)) / total
    squares = float(np.sum((y - value * w) ** 2))
    return Ratio(value, (squares * units / (units - 1)) ** 0.5 / total, units)


def totals(values: NDArray[np.float64], clusters: NDArray[Any]) -> NDArray[np.float64]:
    """Sum of `values` in each cluster, shape (clusters,), for cluster numbers 0, 1, ..."""
    import numpy as np

    summed: NDArray[np.float64] = np.bincount(clusters, weights=values)  # type: ignore[assignment]
    return summed


def numbered(clusters: Sequence[str]) -> NDArray[np.int64]:
    """The number of each item's cluster, counted in the order of their first items."""
    import numpy as np

    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], dtype=np.int64)
