"""The change between two models on the same items, and its one-sided bounds at any confidence.

Which interval belongs to which scores:

| scores                         | bounds                                                                          |
|--------------------------------|---------------------------------------------------------------------------------|
| 0 or 1, independent items      | Tango's score interval                                                          |
| 0 or 1, items share passages   | Tango's score interval of the effective counts, Student's t for the normal      |
| graded                         | Student's t, the standard error by cluster                                      |
| log likelihoods of documents   | Student's t for the ratio of sums, by document or cluster                       |

The linear interval of a clustered mean (difference +- t * SE) would claim certainty for 0/1 scores where no or few
items flip, which is what good checkpoints do. So clusters enter Tango's interval through the effective number of
items, as in survey sampling (Korn and Graubard, Survey Methodology 24, 193-201, 1998): all counts are divided by the
design effect, the factor by which clusters widen the variance of the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eval.errors import MeasurementError
from eval.samples import Pairs
from eval.statistics import means
from eval.statistics.binary import tango_bounds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["binary", "graded", "perplexity"]


@dataclass(frozen=True, slots=True)
class Units:
    """What was drawn independently: items, or clusters of items. Arrays have shape (units,).

    `baseline` and `candidate` are sums of scores (log likelihoods in nats), `weights` numbers of items (of words).
    """

    baseline: NDArray[np.float64]
    candidate: NDArray[np.float64]
    weights: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one task: `difference` is candidate - baseline per item, for perplexity in nats per word.

    Both are signed so that below 0 is worse. `design_effect` is 1 without clusters.
    """

    kind: Kind
    items: int
    units: Units
    difference: float
    standard_error: float
    design_effect: float
    gains: int
    losses: int

    @property
    def clustered(self) -> bool:
        """Whether items share passages."""
        return len(self.units.weights) < self.items

    @property
    def levels(self) -> tuple[float, float]:
        """Mean score of the baseline and of the candidate; perplexities per word of a perplexity task."""
        import numpy as np

        weight = float(np.sum(self.units.weights))
        means = float(np.sum(self.units.baseline)) / weight, float(np.sum(self.units.candidate)) / weight
        if self.kind != "perplexity":
            return means
        # A broken model can be surer of its error than a float holds: 1e304 is said instead.
        return math.exp(min(-means[0], 700.0)), math.exp(min(-means[1], 700.0))

    @property
    def method(self) -> str:
        """What the bounds are, in words."""
        if self.kind == "binary":
            return "Tango score interval, effective counts of clusters" if self.clustered else "Tango score interval"
        name = "cluster-robust t" if self.clustered else "Student t"
        return f"{name}, weighted by words" if self.kind == "perplexity" else name

    def bounds(self, confidence: float) -> tuple[float, float]:
        """Lower and upper bound of the true difference, each one-sided at `confidence` in [0.5, 1)."""
        from scipy.special import ndtri, stdtrit

        z, t = float(ndtri(confidence)), float(stdtrit(len(self.units.weights) - 1, confidence))
        if self.kind == "binary":
            gains, losses, items = (count / self.design_effect for count in (self.gains, self.losses, self.items))
            return tango_bounds(gains, losses, items, t if self.clustered else z)
        half = t * self.standard_error
        return self.difference - half, self.difference + half


def change(pairs: Pairs) -> Change:
    """The change between two models; `MeasurementError` below two units, where no variance exists."""
    import numpy as np

    baseline = np.asarray(pairs.baseline, dtype=np.float64)
    candidate = np.asarray(pairs.candidate, dtype=np.float64)
    items = len(baseline)
    perplexity = pairs.kind == "perplexity"
    weights = np.asarray(pairs.weights, dtype=np.float64) if perplexity else np.ones(items)
    clusters = means.numbered(pairs.clusters)
    units = Units(*(means.totals(values, clusters) for values in (baseline, candidate, weights)))
    if items < 2 or len(units.weights) < 2:
        what = f"{items} items" if items < 2 else f"{items} items of one passage"
        raise MeasurementError(f"{pairs.task}: {what} cannot be compared, the change has no variance")
    moved = candidate - baseline
    gains, losses = int((moved > 0).sum()), int((moved < 0).sum())
    clustered = means.ratio(units.candidate - units.baseline, units.weights)
    binary = not perplexity and _binary(baseline) and _binary(candidate)
    effect, error = 1.0, clustered.standard_error
    if binary and len(units.weights) < items:
        effect = _design_effect(clustered, means.ratio(moved, weights), items)
    if not binary and not perplexity:
        # Without a floor, the same score on all of ten items would count as certainty: one may yet move a full point.
        error = max(error, 1 / len(units.weights))
    return Change(
        kind="perplexity" if perplexity else "binary" if binary else "graded",
        items=items,
        units=units,
        difference=clustered.value,
        standard_error=error,
        design_effect=effect,
        gains=gains,
        losses=losses,
    )


def _binary(scores: NDArray[Any]) -> bool:
    return bool(((scores == 0) | (scores == 1)).all())


def _design_effect(clustered: means.Ratio, single: means.Ratio, items: int) -> float:
    """Variance by clusters over variance by items, at least 1; without any flip as if each cluster were one item.

    A few flips say little about whether flips come together. One more passage in which two items flip is added to
    those seen (4 to the squares by cluster, 2 to those by item): without it, 6 losses among 600 items of 60 passages
    pass 6.3 % of the time at a drop equal to the margin.
    """
    if single.standard_error == 0:
        return items / clustered.units
    return max(1.0, ((clustered.standard_error * items) ** 2 + 4) / ((single.standard_error * items) ** 2 + 2))
