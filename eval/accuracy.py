"""The change in accuracy between two models on the same items, with its uncertainty.

Scores of 0 or 1 get Tango's score interval for the difference of paired proportions (Statistics in Medicine 17,
891-908, 1998). Unlike the textbook "difference +- z * SE" it stays honest when few or no items flip: with no flips in
n items its lower bound is -z**2 / (n + z**2), not 0. Graded scores get Student's t interval of the mean difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eval.errors import MeasurementError
from eval.samples import Pairs


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One task's accuracy on both sides. All values but counts are fractions; differences are candidate - baseline.

    `lower` and `upper` are one-sided bounds, each at `confidence`: the gate reads them. `interval_low` and
    `interval_high` bound a two-sided interval at the same confidence, for display. `gains` counts items that only
    the candidate got right (for graded scores: that rose), `losses` the opposite. `mcnemar_p` is the exact two-sided
    p-value of McNemar's test, None for graded scores. `recovery` is candidate / baseline, None at a baseline of 0.
    """

    task: str
    metric: str
    items: int
    baseline: float
    candidate: float
    difference: float
    standard_error: float
    confidence: float
    lower: float
    upper: float
    interval_low: float
    interval_high: float
    gains: int
    losses: int
    mcnemar_p: float | None
    recovery: float | None

    @property
    def flip_rate(self) -> float:
        """Share of items whose score changed in either direction."""
        return (self.gains + self.losses) / self.items

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Accuracy:
        """Read back what `to_json` wrote."""
        return cls(**data)


def compare(pairs: Pairs, confidence: float = 0.95) -> Accuracy:
    """Compare two models by their scores, shape (items,) each.

    Raises `MeasurementError` below two items, where no variance exists.
    """
    import numpy as np

    baseline = np.asarray(pairs.baseline, dtype=np.float64)
    candidate = np.asarray(pairs.candidate, dtype=np.float64)
    items = len(baseline)
    if items < 2 or baseline.shape != candidate.shape:
        raise MeasurementError(f"{pairs.task}: {items} and {len(candidate)} scores cannot be compared")
    change = candidate - baseline
    gains, losses = int((change > 0).sum()), int((change < 0).sum())
    difference = float(change.mean())
    binary = bool(np.isin(baseline, (0, 1)).all() and np.isin(candidate, (0, 1)).all())
    standard_error = float(change.std(ddof=1) / np.sqrt(items))
    if binary:
        lower, upper = tango_interval(gains, losses, items, 2 * confidence - 1)
        low, high = tango_interval(gains, losses, items, confidence)
    else:
        lower, upper = _t_interval(difference, standard_error, items, 2 * confidence - 1)
        low, high = _t_interval(difference, standard_error, items, confidence)
    mean = float(baseline.mean())
    return Accuracy(
        task=pairs.task,
        metric=pairs.metric,
        items=items,
        baseline=mean,
        candidate=float(candidate.mean()),
        difference=difference,
        standard_error=standard_error,
        confidence=confidence,
        lower=lower,
        upper=upper,
        interval_low=low,
        interval_high=high,
        gains=gains,
        losses=losses,
        mcnemar_p=mcnemar(gains, losses) if binary else None,
        recovery=float(candidate.mean()) / mean if mean > 0 else None,
    )


def mcnemar(gains: int, losses: int) -> float:
    """Exact two-sided McNemar p-value: under no change each flip goes either way with probability 1/2."""
    from scipy.stats import binomtest

    return float(binomtest(gains, gains + losses, 0.5).pvalue) if gains + losses else 1.0


def tango_interval(gains: int, losses: int, items: int, confidence: float) -> tuple[float, float]:
    """Tango's two-sided score interval for (gains - losses) / items, as fractions in [-1, 1].

    The bounds are the differences at which the score statistic equals -z or +z; it falls as the difference grows.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    z = float(norm.ppf((1 + confidence) / 2))
    observed = (gains - losses) / items
    if z == 0:
        return observed, observed

    def excess(difference: float, bound: float) -> float:
        return _score_numerator(gains, losses, items, difference) - bound * _score_deviation(
            gains, losses, items, difference
        )

    # Without flips the statistic is 0/0 at the observed difference itself, so the search starts a hair beside it.
    below, above = max(observed - 1e-12, -1.0), min(observed + 1e-12, 1.0)
    low = -1.0 if losses == items else float(brentq(excess, -1.0, below, args=(z,), xtol=1e-13))
    high = 1.0 if gains == items else float(brentq(excess, above, 1.0, args=(-z,), xtol=1e-13))
    return low, high


def _score_numerator(gains: int, losses: int, items: int, difference: float) -> float:
    return gains - losses - items * difference


def _score_deviation(gains: int, losses: int, items: int, difference: float) -> float:
    """Standard deviation of the numerator when `difference` is true, with the loss rate at its restricted maximum."""
    a = 2 * items
    b = -gains - losses + (2 * items - gains + losses) * difference
    c = -losses * difference * (1 - difference)
    loss_rate = ((max(b * b - 4 * a * c, 0.0)) ** 0.5 - b) / (2 * a)
    return float(max(items * (2 * loss_rate + difference * (1 - difference)), 0.0) ** 0.5)


def _t_interval(difference: float, standard_error: float, items: int, confidence: float) -> tuple[float, float]:
    """Student's t interval; the error is never below that of a single item that changes by a full point.

    Without that floor, identical scores on ten items would count as certainty.
    """
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, items - 1)) * max(standard_error, 1 / items)
    return difference - half, difference + half
