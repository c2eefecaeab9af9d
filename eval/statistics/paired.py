"""The change between two models on the same items, and its one-sided bounds at any confidence.

Which interval belongs to which scores:

| scores                         | bounds                                                                          |
|--------------------------------|---------------------------------------------------------------------------------|
| 0 or 1, independent items      | Tango's score interval                                                          |
| graded, independent items      | the same score interval; what may happen is every change seen, and a full point |
| items share passages           | the same, of the effective counts, with Student's t for the normal              |
| log likelihoods of documents   | Student's t for the ratio of sums, by document or cluster, with its skewness    |

`make gate-simulations` holds these, and what was tried beside them, against designs with known truths.

**Tango's score interval** (Statistics in Medicine 17, 891-908, 1998) stays honest when few or no items flip, where the
textbook "difference +- z * SE" claims certainty. By itself it still errs too often: counts are whole, and at a true
drop of a few flips its one-sided 5 % test errs up to 6.8 % of the time towards PASS and 9 % towards FAIL. Continuity
corrections bring both below 5 % (the tests enumerate this exactly, over margins and flip rates, for 50 to 1319 items).

**Graded scores** have the same interval, since Tango's variance is that of the likeliest distribution over -1, 0 and 1
whose mean is the difference in question. Over the changes that were seen, and over -1 and 1 whether seen or not, it is
empirical likelihood (Owen, Biometrika 75, 237-249, 1988). Where all changes are -1, 0 or 1 it is Tango's to the digit.

**Clusters** enter through the effective number of items, as in survey sampling (Korn and Graubard, Survey Methodology
24, 193-201, 1998): all counts are divided by the design effect 1 + correlation * (size - 1), where `size` is that of
the passage of the mean item (Kish, "Survey Sampling", section 5.4). The correlation is that of two changes of one
passage, and t's degrees of freedom are Satterthwaite's of passages of these sizes. Residuals of whole passages, which
assume no one correlation, know nothing where three passages hold half of the items: they pass up to 30 % there.

**Skewness.** A few documents that lose much are a mean's skewness, which makes Student's t too short on their side:
Johnson's correction (JASA 73, 536-544, 1978) makes up for it, `_TAIL` says how a sample's own skewness enters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from quantmint.eval.errors import MeasurementError
from quantmint.eval.samples import Pairs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# In flips. Half a flip is the usual correction of a whole number. The upper bound needs another half: losses at the
# margin are rare, hence skewed upwards, so chance alone exceeds them further than it falls short of them.
LOWER_CORRECTION = 0.5
UPPER_CORRECTION = 1.0


def mcnemar(gains: int, losses: int) -> float:
    """Return the exact two-sided p-value of McNemar's test; 1 without flips.

    Under no change each flip goes either way with probability 1/2.
    """
    from scipy.stats import binomtest

    return float(binomtest(gains, gains + losses, 0.5).pvalue) if gains + losses else 1.0


def tango_bounds(gains: float, losses: float, items: float, z: float) -> tuple[float, float]:
    """Return the lower and upper bound of (gains - losses) / items, in [-1, 1], each at z standard deviations.

    The bounds are the differences at which the corrected score statistic equals z and -z; it falls as the difference
    grows. Counts need not be whole: under a design effect they are effective counts. Raises `ValueError` if z is
    negative.

        >>> low, high = tango_bounds(0, 0, 198, 1.645)  # nothing flipped among 198 items
        >>> round(low, 4), round(high, 4)
        (-0.0181, 0.0223)
    """
    return _score_bounds(gains - losses, items, lambda d: float(score_deviation(gains, losses, items, d)), z)


def _score_bounds(total: float, items: float, deviation: Callable[[float], float], z: float) -> tuple[float, float]:
    """Return the score interval's bounds of total / items, each at z standard deviations.

    `deviation` gives the standard deviation of the total if its argument is the true difference. Raises `ValueError` if
    z is negative.
    """
    from scipy.optimize import brentq

    if not z >= 0:
        raise ValueError(f"z must not be negative, found {z}")
    observed = total / items

    def excess(difference: float, bound: float, correction: float) -> float:
        return total - items * difference - correction - bound * deviation(difference)

    low, high = -1.0, 1.0
    if excess(-1.0, z, LOWER_CORRECTION) > 0:
        low = float(brentq(excess, -1.0, observed, args=(z, LOWER_CORRECTION), xtol=1e-13))
    if excess(1.0, -z, -UPPER_CORRECTION) < 0:
        high = float(brentq(excess, observed, 1.0, args=(-z, -UPPER_CORRECTION), xtol=1e-13))
    return low, high


def score_deviation(gains: Any, losses: Any, items: Any, difference: Any) -> NDArray[Any]:
    """Return the standard deviation of gains - losses if `difference` is the true mean change per item.

    The loss rate is at its restricted maximum likelihood. Arguments are numbers, or arrays of one shape; with rates for
    counts and 1 for `items` the result is that of a single item.
    """
    import numpy as np

    a = 2 * items
    b = -gains - losses + (2 * items - gains + losses) * difference
    c = -losses * difference * (1 - difference)
    loss_rate = (np.sqrt(np.maximum(b * b - 4 * a * c, 0)) - b) / (2 * a)
    deviation: NDArray[Any] = np.sqrt(np.maximum(items * (2 * loss_rate + difference * (1 - difference)), 0))
    return deviation


def graded_deviation(changes: NDArray[Any], counts: Any, difference: Any) -> NDArray[Any]:
    """Return the standard deviation of one item's change, shape (...,), if `difference` is the true mean.

    `changes`, shape (..., values), lie in [-1, 1]; `counts` say how often each was seen. The distribution is the
    likeliest one with this mean over the changes and over -1 and 1: each change has its share over 1 + tilt * (its
    distance from the mean), and what the tilt cannot move lies on -1 if the changes seen are above the mean on average,
    else on 1.
    """
    import numpy as np

    apart = changes - np.asarray(difference)[..., None]
    shares = counts / np.sum(np.broadcast_to(counts, changes.shape), axis=-1, keepdims=True)
    side = np.where(np.sum(shares * apart, axis=-1) >= 0, 1.0, -1.0)
    apart = apart * side[..., None]
    point = np.maximum(1 + side * difference, 1e-12)
    low, high = np.zeros_like(point), 1 / point
    for _ in range(48):
        tilt = (low + high) / 2
        short = np.sum(shares * apart / (1 + tilt[..., None] * apart), axis=-1) > 0
        low, high = np.where(short, tilt, low), np.where(short, high, tilt)
    likely = shares / (1 + low[..., None] * apart)
    unlikely = np.maximum(1 - np.sum(likely, axis=-1), 0)
    deviation: NDArray[Any] = np.sqrt(np.sum(likely * apart**2, axis=-1) + unlikely * point**2)
    return deviation


Kind = Literal["binary", "graded", "perplexity"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio sum(y) / sum(w) over `units` clusters, with its standard error.

    `freedom` are Student's t's degrees of freedom, `skewness` is that of the residuals.
    """

    value: float
    standard_error: float
    units: int
    freedom: float
    skewness: float

    def quantiles(self, confidence: float) -> tuple[float, float]:
        """Return the distances from the value to its lower and to its upper bound, in standard errors.

        Each bound is one-sided at `confidence`, by Student's t with a correction for skewness.
        """
        from scipy.special import stdtrit

        t = float(stdtrit(self.freedom, confidence))
        skew = abs(self.skewness)
        longer = t + skew * (_TAIL[0] + _TAIL[1] * skew) * (1 + 2 * t * t) / (6 * math.sqrt(self.units))
        return (longer, t) if self.skewness < 0 else (t, longer)


# Johnson's term has the skewness itself; few documents show far too little of a long tail, the less the longer it is.
_TAIL = (4.0, 3.0)


def ratio(y: NDArray[np.float64], w: NDArray[np.float64]) -> Ratio:
    """Return the ratio of the sums of `y` and `w`, shape (units,) each: the totals of each cluster, at least two.

    The standard error is linearised: residuals y - value * w, sum of squares times G / (G - 1), over sum(w). That is
    the clustered standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640, section 2.2) with the usual
    correction for G clusters, Cochran's ratio estimator ("Sampling Techniques", section 6.3) where weights differ, and
    the ordinary standard error of a mean where every unit is one item. The degrees of freedom are Satterthwaite's
    (Biometrics Bulletin 2, 110-114, 1946) for residuals as wide as their weights. Raises `ValueError` below two units.
    """
    import numpy as np

    units = len(y)
    if units < 2:
        raise ValueError(f"a standard error needs two units, found {units}")
    total = float(np.sum(w))
    value = float(np.sum(y)) / total
    residuals = y - value * w
    squares = float(np.sum(residuals**2))
    skewness = float(np.sum(residuals**3)) * units**0.5 / squares**1.5 if squares else 0.0
    freedom = min(units - 1.0, satterthwaite(w**2))
    return Ratio(value, (squares * units / (units - 1)) ** 0.5 / total, units, freedom, skewness)


def satterthwaite(variances: NDArray[np.float64]) -> float:
    """Return the degrees of freedom of a sum of `variances`, shape (units,), each estimated from one residual."""
    import numpy as np

    return float(np.sum(variances) ** 2 / np.sum(variances**2))


def totals(values: NDArray[np.float64], clusters: NDArray[Any]) -> NDArray[np.float64]:
    """Return the sum of `values` in each cluster, shape (clusters,); `clusters` are cluster numbers 0, 1, ..."""
    import numpy as np

    return np.bincount(clusters, weights=values)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Units:
    """The independent units, items or clusters of items; arrays have shape (units,).

    `baseline` and `candidate` are sums of scores, `weights` numbers of items. Of a perplexity task they are sums of log
    likelihoods in nats and numbers of words.
    """

    baseline: NDArray[np.float64]
    candidate: NDArray[np.float64]
    weights: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairedChange:
    """The change of one task between two models; below 0 is worse.

    `changes` holds the distinct changes of items, divided by `span`, and how often each was seen; `span` is the range
    of scores, 1 or more. `total` is the ratio of summed changes to summed weights. `effect` is None if no items share
    passages.
    """

    kind: Kind
    items: int
    units: Units
    changes: tuple[NDArray[np.float64], NDArray[np.int64]]
    span: float
    total: Ratio
    standard_error: float
    effect: DesignEffect | None
    gains: int
    losses: int

    @property
    def difference(self) -> float:
        """Return candidate - baseline: the mean change of the score, or of the log likelihood in nats per word."""
        return self.total.value

    @property
    def clustered(self) -> bool:
        """Return whether items share passages."""
        return len(self.units.weights) < self.items

    @property
    def levels(self) -> tuple[float, float]:
        """Return the mean scores of baseline and candidate; of a perplexity task their perplexities per word."""
        import numpy as np

        weight = float(np.sum(self.units.weights))
        means = float(np.sum(self.units.baseline)) / weight, float(np.sum(self.units.candidate)) / weight
        if self.kind != "perplexity":
            return means
        # A broken model can be surer of its error than a float holds: 1e304 is said instead.
        return math.exp(min(-means[0], 700.0)), math.exp(min(-means[1], 700.0))

    @property
    def method(self) -> str:
        """Return the name of the method that computes the bounds, for reports."""
        if self.kind == "perplexity":
            return f"{'cluster-robust t' if self.clustered else 'Student t'} with skewness, weighted by words"
        name = "Tango score interval" if self.kind == "binary" else "score interval"
        return f"{name}, effective counts of clusters" if self.clustered else name

    def bounds(self, confidence: float) -> tuple[float, float]:
        """Return the lower and upper bound of the true difference, each one-sided at `confidence` in [0.5, 1)."""
        from scipy.special import ndtri, stdtrit

        if self.kind == "perplexity":
            below, above = self.total.quantiles(confidence)
            return self.difference - below * self.standard_error, self.difference + above * self.standard_error
        effect, z = 1.0, float(ndtri(confidence))
        if self.effect is not None:
            effect, z = self.effect.factor, float(stdtrit(self.effect.freedom, confidence))
        items = self.items / effect
        if self.kind == "binary":
            return tango_bounds(self.gains / effect, self.losses / effect, items, z)
        root, (values, counts) = math.sqrt(items), self.changes
        low, high = _score_bounds(
            items * self.difference / self.span, items, lambda d: root * float(graded_deviation(values, counts, d)), z
        )
        return low * self.span, high * self.span


def change(pairs: Pairs) -> PairedChange:
    """Return the change from the baseline to the candidate, candidate minus baseline.

    Raises `MeasurementError` below two items or passages, where no variance exists.
    """
    import numpy as np

    baseline = np.asarray(pairs.baseline, dtype=np.float64)
    candidate = np.asarray(pairs.candidate, dtype=np.float64)
    items = len(baseline)
    perplexity = pairs.kind == "perplexity"
    weights = np.asarray(pairs.weights, dtype=np.float64) if perplexity else np.ones(items)
    clusters = np.unique(pairs.clusters, return_inverse=True)[1]
    units = Units(*(totals(values, clusters) for values in (baseline, candidate, weights)))
    if items < 2 or len(units.weights) < 2:
        what = f"{items} items" if items < 2 else f"{items} items of one passage"
        raise MeasurementError(f"{pairs.task}: {what} cannot be compared, the change has no variance")
    moved = candidate - baseline
    total = ratio(units.candidate - units.baseline, units.weights)
    error, effect, span = total.standard_error, None, 1.0
    binary = not perplexity and _binary(baseline) and _binary(candidate)
    if not perplexity:
        scores = np.concatenate((baseline, candidate))
        span = max(1.0, float(scores.max() - scores.min()))
        if len(units.weights) < items:
            apart = (moved - total.value) / span
            effect = design_effect(totals(apart, clusters), totals(apart**2, clusters), units.weights)
            error = ratio(moved, weights).standard_error * effect.factor**0.5
    if not binary and not perplexity:
        # Without a floor, the same score on all of ten items would be reported as certainty.
        error = max(error, 1 / len(units.weights))
    values, counts = np.unique(moved / span, return_counts=True)
    return PairedChange(
        kind="perplexity" if perplexity else "binary" if binary else "graded",
        items=items,
        units=units,
        changes=(values, counts),
        span=span,
        total=total,
        standard_error=error,
        effect=effect,
        gains=int((moved > 0).sum()),
        losses=int((moved < 0).sum()),
    )


def _binary(scores: NDArray[Any]) -> bool:
    return bool(((scores == 0) | (scores == 1)).all())


@dataclass(frozen=True, slots=True)
class DesignEffect:
    """The factor by which passages widen the variance of the difference, and Student's t's degrees of freedom."""

    factor: float
    freedom: float


# Passages of the mean item's size in which, beside what was seen, two changes are taken to come together, for each that
# the items' own passages amount to: the fewer these, the less do they tell of whether changes come together.
_UNSEEN = 10.0


def design_effect(sums: NDArray[np.float64], squares: NDArray[np.float64], sizes: NDArray[np.float64]) -> DesignEffect:
    """Return the design effect of passages, from arrays with one value per passage.

    `sums` and `squares` are sums, and sums of squares, of the distances of a passage's items from the mean change;
    `sizes` are numbers of items. The correlation is that of pairs: products of two changes of a passage over their
    squares. Without any change it is 1, as if each passage were one item.
    """
    import numpy as np

    items = float(np.sum(sizes))
    size = float(np.sum(sizes**2)) / items
    assumed = 2 * _UNSEEN * size / items * (size - 1)
    together = float(np.sum(sums**2 - squares)) + assumed
    correlation = min(1.0, max(0.0, together / (float(np.sum((sizes - 1) * squares)) + assumed)))
    return DesignEffect(1 + correlation * (size - 1), max(1.0, satterthwaite(sizes * (1 + correlation * (sizes - 1)))))


def recovery(change: PairedChange, confidence: float) -> tuple[float | None, float | None, float | None]:
    """Return the recovery with the lower and upper bound of its two-sided interval at `confidence`.

    Recovery is candidate / baseline, of perplexities baseline / candidate. All three are None if the baseline scores 0.
    The bounds alone are None if they are not finite, as for a baseline that cannot be told from 0.

    Of scores it is Fieller's interval (JRSS B 16, 175-185, 1954) of a ratio of two means measured on the same units:
    the ratios r for which the mean of candidate - r * baseline is within t standard errors of 0. Unlike the delta
    method on logarithms it needs no score above 0 and says so when there is no finite answer. The error of the
    difference is at least half the width of `PairedChange.bounds` over t, so that no flips are no certainty here
    either. Of perplexities it is exp of the difference and of its bounds.
    """
    import numpy as np
    from scipy.special import stdtrit

    low, high = change.bounds((1 + confidence) / 2)
    if change.kind == "perplexity":
        # Two documents can have bounds beyond what a float holds.
        left, least, most = (math.exp(min(value, 700.0)) for value in (change.difference, low, high))
        return left, least, most
    units, items = change.units, change.items
    count = len(units.weights)
    mean = float(np.sum(units.baseline)) / items
    if mean == 0:
        return None, None, None
    t = float(stdtrit(count - 1, (1 + confidence) / 2))
    moved = units.candidate - units.baseline - change.difference * units.weights
    level = units.baseline - mean * units.weights
    scale = count / (count - 1) / items**2
    level_variance = float(np.sum(level**2)) * scale
    covariance = float(np.sum(level * moved)) * scale
    moved_variance = max(float(np.sum(moved**2)) * scale, ((high - low) / 2 / t) ** 2)
    # |difference - s * mean| <= t * deviation(difference - s * mean), squared, for s = r - 1.
    a = mean**2 - t**2 * level_variance
    b = change.difference * mean - t**2 * covariance
    c = change.difference**2 - t**2 * moved_variance
    value = 1 + change.difference / mean
    if a <= 0 or b * b < a * c:
        return value, None, None
    root = math.sqrt(b * b - a * c)
    return value, 1 + (b - root) / a, 1 + (b + root) / a
