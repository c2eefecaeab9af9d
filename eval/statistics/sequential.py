"""An evaluation that is judged while it runs: clear cases stop early, the error rates stay what they are.

After each batch of items ("look") the change is held against the margin with bounds at that look's own confidence,
`spending.boundary`. The first look whose lower bound is above -margin decides PASS, whose upper bound is below it
FAIL; what was asked after a decision is not looked at. Each side spends its own error, so at a true change of exactly
-margin a false PASS over all looks is as rare as in one fixed test, and a false FAIL too.

Student's t stands in for the normal where the bounds use it: the looks' nominal levels carry over, as is usual
(Jennison and Turnbull, "Group Sequential Methods", section 3.8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, compress
from typing import Literal

from eval.errors import MeasurementError
from eval.records import Record
from eval.samples import Pairs
from eval.statistics.paired import change
from eval.statistics.spending import boundary, crossing

Decision = Literal["PASS", "FAIL", "GO ON"]
# Fewer items at a look decide nothing that a good checkpoint could pass, and the normal approximation is poor.
LEAST_ITEMS = 50


@dataclass(frozen=True, slots=True)
class Look(Record):
    """One look: `items` so far, their share of the planned ones, the bounds at its confidence, what follows.

    `lower` and `upper` are one-sided bounds of the change at `bound_confidence` each, in the units of
    `Accuracy.difference`. GO ON at the last look means that the evaluation ended undecided.
    """

    items: int
    information: float
    bound_confidence: float
    lower: float
    upper: float
    decision: Decision


def plan_looks(items: int, looks: int) -> tuple[int, ...]:
    """Items seen after each look, in equal steps; fewer looks where one would bring less than `LEAST_ITEMS` items.

    >>> plan_looks(1319, 4)
    (330, 660, 990, 1319)
    >>> plan_looks(90, 4)
    (90,)
    """
    if items < 1 or looks < 1:
        raise ValueError(f"{items} items in {looks} looks cannot be planned")
    steps = max(1, min(looks, items // LEAST_ITEMS))
    return tuple(-(-items * step // steps) for step in range(1, steps + 1))


def decide(pairs: Pairs, margin: float, confidence: float) -> tuple[Look, ...]:
    """The looks up to the first that decides, or to the last item.

    `margin` is in the units of the difference (`accuracy.margin_in_units`). Looks after a decision are ignored, as if
    they had not been asked. Raises `MeasurementError` where a look brought no item, or the last one came too late.
    """
    numbers = sorted(set(pairs.looks))
    if numbers != list(range(len(numbers))):
        raise MeasurementError(f"{pairs.task}: looks {numbers} are not 0, 1, ...: one of them brought no items")
    seen = list(accumulate(pairs.looks.count(number) for number in numbers))
    information = [items / pairs.planned for items in seen]
    try:
        levels = boundary(information, confidence)
    except ValueError as error:
        raise MeasurementError(f"{pairs.task}: {error}") from error
    looks: list[Look] = []
    for number, items, share, level in zip(numbers, seen, information, levels, strict=True):
        lower, upper = change(until(pairs, number)).bounds(level)
        decision: Decision = "PASS" if lower > -margin else "FAIL" if upper < -margin else "GO ON"
        looks.append(Look(items, share, level, lower, upper, decision))
        if decision != "GO ON":
            break
    return tuple(looks)


def until(pairs: Pairs, look: int) -> Pairs:
    """The pairs that were asked up to a look, a 0-based number."""
    kept = [asked <= look for asked in pairs.looks]
    return replace(
        pairs,
        baseline=tuple(compress(pairs.baseline, kept)),
        candidate=tuple(compress(pairs.candidate, kept)),
        weights=tuple(compress(pairs.weights, kept)),
        clusters=tuple(compress(pairs.clusters, kept)),
        looks=tuple(compress(pairs.looks, kept)),
    )


@lru_cache(maxsize=256)
def inflation(looks: int, confidence: float = 0.95, power: float = 0.8) -> float:
    """How many times the items of one fixed test a plan of equal looks needs for the same power.

    >>> round(inflation(4), 3)
    1.029
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    shares = [(number + 1) / looks for number in range(looks)]
    fixed = float(ndtri(confidence) + ndtri(power))

    def missing(drift: float) -> float:
        return sum(upper for upper, _ in crossing(shares, confidence, drift)) - power

    return 1.0 if looks == 1 else (float(brentq(missing, fixed, 1.5 * fixed, xtol=1e-10)) / fixed) ** 2
