"""The paired bootstrap of a change: resample the units, keep both models' scores of a unit together.

The interval is Efron's BCa (Efron and Tibshirani, "An Introduction to the Bootstrap", section 14.3; JASA 82, 171-185,
1987): a few flips, nearly all of them losses, make a skewed distribution, and the plain percentile interval is then
too short on the side that matters. The acceleration of a ratio of sums is the skewness of its influence values over 6.

Draws come from NumPy's RandomState (Mersenne Twister), whose stream NumPy keeps as it is for good (NEP 19), from one
constant seed: everybody who resamples the same scores gets the same interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.statistics.paired import Units

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SEED = 20_100_407
RESAMPLES = 2000
# Units times resamples that are drawn at once: 8 bytes each.
_CHUNK = 1 << 20


def interval(units: Units, confidence: float) -> tuple[float, float]:
    """Two-sided BCa interval of the difference (see `paired.Change`) at `confidence`.

    A point where no resample differs from the sample, for instance where nothing flipped: the gate's bounds do not
    claim such certainty, the bootstrap cannot know better.
    """
    import numpy as np
    from scipy.special import ndtr, ndtri

    change = units.candidate - units.baseline
    estimate = float(np.sum(change) / np.sum(units.weights))
    draws = np.sort(_resample(change, units.weights))
    if draws[0] == draws[-1]:
        return estimate, estimate
    influence = change - estimate * units.weights
    acceleration = float(np.sum(influence**3) / np.sum(influence**2) ** 1.5 / 6)
    # Ties with the estimate count half: 0/1 scores have many.
    below = (np.searchsorted(draws, estimate - 1e-12) + np.searchsorted(draws, estimate + 1e-12)) / 2 / RESAMPLES
    bias = float(ndtri(np.clip(below, 0.5 / RESAMPLES, 1 - 0.5 / RESAMPLES)))
    tails = bias + ndtri(np.array([(1 - confidence) / 2, (1 + confidence) / 2]))
    levels = ndtr(bias + tails / (1 - acceleration * tails))
    low, high = np.quantile(draws, levels)
    return float(low), float(high)


def _resample(change: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Differences of `RESAMPLES` resamples. Units that are alike are drawn as counts: 0/1 scores have three kinds."""
    import numpy as np

    state = np.random.RandomState(SEED)
    units = len(change)
    kinds, counts = np.unique(np.stack((change, weights)), axis=1, return_counts=True)
    if kinds.shape[1] <= 64:
        drawn = state.multinomial(units, counts / units, size=RESAMPLES)
        ratios: NDArray[np.float64] = (drawn * kinds[0]).sum(axis=1) / (drawn * kinds[1]).sum(axis=1)
        return ratios
    draws = np.empty(RESAMPLES)
    rows = max(1, _CHUNK // units)
    for start in range(0, RESAMPLES, rows):
        chosen = state.randint(units, size=(min(rows, RESAMPLES - start), units))
        draws[start : start + rows] = change[chosen].sum(axis=1) / weights[chosen].sum(axis=1)
    return draws
