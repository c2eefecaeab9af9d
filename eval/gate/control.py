"""The A/A control: the baseline against itself, which says how many answers change although nothing did.

Temperature 0 is not deterministic on a server: which requests share a batch decides the order of sums, and a tie in the
last bits goes the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eval.errors import MeasurementError
from eval.samples import SampleSet, pair


@dataclass(frozen=True, slots=True)
class Control:
    """Of `items` that the baseline answered twice, `flips` changed their score.

    `rate` is flips / items; `low` and `high` bound it (Clopper and Pearson, two-sided).
    """

    items: int
    flips: int
    rate: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Control:
        """Read back what `to_json` wrote; `MeasurementError` for anything else."""
        try:
            return cls(**data)
        except TypeError as error:
            raise MeasurementError(f"not a control: {error}") from error


def measure(baseline: SampleSet, again: SampleSet, confidence: float) -> Control:
    """How often the baseline disagrees with itself on the items that it was asked twice.

    Raises `MeasurementError` where the second run was asked something else. The interval is exact: with no flips in n
    items the rate is still up to 1 - (alpha / 2)**(1 / n) (Clopper and Pearson, Biometrika 26, 404-413, 1934).
    """
    from scipy.stats import beta

    pairs = pair(baseline.on(again), again)
    items = len(pairs.baseline)
    flips = sum(before != after for before, after in zip(pairs.baseline, pairs.candidate, strict=True))
    tail = (1 - confidence) / 2
    low = 0.0 if flips == 0 else float(beta.ppf(tail, flips, items - flips + 1))
    high = 1.0 if flips == items else float(beta.ppf(1 - tail, flips + 1, items - flips))
    return Control(items, flips, flips / items, low, high)
