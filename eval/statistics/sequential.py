"""An evaluation that is judged while it runs: clear cases stop early, the error rates stay what they are.

After each batch of items ("look") the change is held against the margin with bounds at that look's own confidence,
`boundary`. The first look whose lower bound is above -margin decides PASS, whose upper bound is below it
FAIL; what was asked after a decision is not looked at. Each side spends its own error, so at a true change of exactly
-margin a false PASS over all looks is as rare as in one fixed test, and a false FAIL too.

Lan and DeMets (Biometrika 70, 659-663, 1983) spend the error over the looks: after a share t of the information, an
error of 2 - 2 * Phi(z_{alpha/2} / sqrt(t)) may have been spent (their alpha*_1, which mimics O'Brien and Fleming's
boundary): almost nothing early, nearly all at the end. The boundary of a look is whatever spends what is due at it. The
distribution of a statistic that has not crossed yet follows by integrating from look to look (Armitage, McPherson and
Rowe, JRSS A 132, 235-244, 1969; Jennison and Turnbull, "Group Sequential Methods", chapter 19).

Student's t stands in for the normal where the bounds use it: the looks' nominal levels carry over, as is usual
(Jennison and Turnbull, "Group Sequential Methods", section 3.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, compress
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from quantmint.eval.errors import MeasurementError
from quantmint.eval.records import Record
from quantmint.eval.samples import Pairs
from quantmint.eval.statistics.paired import change

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_NORMAL = NormalDist()
# Beyond so many standard deviations lies no probability that counts: Phi(-8) is 6e-16.
_REACH = 8.0
# Nodes of Gauss's rule in a panel as wide as one standard deviation of an increment: exact to about 1e-10.
_NODES = 8
# What an early look gets at least, so that its bounds are finite: 20 looks together spend 2e-11 too much.
_LEAST = 1e-12


def spent(fraction: float, alpha: float) -> float:
    """Return the error that may have been spent after a fraction of the information; all of it, `alpha`, from 1 on."""
    if fraction >= 1:
        return alpha
    return 2 * _NORMAL.cdf(-_NORMAL.inv_cdf(1 - alpha / 2) / math.sqrt(fraction))


def boundary(information: Sequence[float], confidence: float) -> tuple[float, ...]:
    """Return the one-sided nominal confidence of each look, Phi(z_k); all looks together err at 1 - confidence.

    `information` holds the fractions of the planned items that the looks have seen, ascending, above 0; only the last
    may exceed 1 (more items than planned: what is left is spent). A single look at 1 gets `confidence` itself. Raises
    `ValueError` for other fractions, and for a confidence outside [0.5, 1).

        >>> [round(level, 4) for level in boundary((0.25, 0.5, 0.75, 1), 0.975)]
        [1.0, 0.9985, 0.9908, 0.978]
    """
    return _boundary(tuple(map(float, information)), float(confidence))


@lru_cache(maxsize=256)
def _boundary(information: tuple[float, ...], confidence: float) -> tuple[float, ...]:
    from scipy.optimize import brentq

    _check(information)
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence {confidence} is outside [0.5, 1)")
    alpha = 1 - confidence
    levels: list[float] = []
    walk = BoundaryWalk.start()
    before = 0.0

    def missing(z: float, walk: BoundaryWalk, step: float, root: float, due: float) -> float:
        return walk.beyond(step, z * root, 1) - due

    for number, fraction in enumerate(information):
        due = max(spent(fraction, alpha) - before, _LEAST)
        before += due
        step = fraction - walk.fraction
        if not levels:
            z = _NORMAL.inv_cdf(1 - due)
        else:
            z = float(brentq(missing, -_REACH, _REACH, args=(walk, step, math.sqrt(fraction), due), xtol=1e-12))
        levels.append(confidence if fraction >= 1 and not levels else _NORMAL.cdf(z))
        following = information[number + 1] - fraction if number + 1 < len(information) else step
        walk = walk.step(step, -_REACH * math.sqrt(fraction), z * math.sqrt(fraction), following)
    return tuple(levels)


def crossing(
    information: Sequence[float],
    confidence: float,
    drift: float,
    *,
    spread: float = 1.0,
    steps: tuple[float, float] = (0.0, 0.0),
) -> tuple[tuple[float, float], ...]:
    """Return for each look the chances of crossing the upper and the lower boundary there, without an earlier crossing.

    `drift` is the expectation of the statistic Z at full information, in standard deviations: 0 on the margin, the
    distance to the margin over the standard error elsewhere. The boundaries are those of `boundary` and their mirror
    image, times `spread`, the test's assumed deviation over the true one, and further off by `steps`, the corrections
    of the upper and of the lower boundary in standard deviations at full information.
    """
    levels = boundary(information, confidence)
    chances: list[tuple[float, float]] = []
    walk = BoundaryWalk.start(drift)
    for number, (fraction, level) in enumerate(zip(information, levels, strict=True)):
        step = fraction - walk.fraction
        limit = spread * _NORMAL.inv_cdf(level) * math.sqrt(fraction)
        low, high = -limit - steps[1], limit + steps[0]
        chances.append((walk.beyond(step, high, 1), walk.beyond(step, low, -1)))
        following = information[number + 1] - fraction if number + 1 < len(information) else step
        walk = walk.step(step, low, high, following)
    return tuple(chances)


@dataclass(frozen=True, slots=True)
class BoundaryWalk:
    """The distribution at the information `fraction` of a Brownian motion that has not left its bounds so far.

    Without bounds X(t) is normal with mean drift * t and variance t. `mass` is the probability at the `nodes` of a
    quadrature rule, shape (nodes,) each.
    """

    fraction: float
    drift: float
    nodes: NDArray[np.float64]
    mass: NDArray[np.float64]

    @classmethod
    def start(cls, drift: float = 0.0) -> BoundaryWalk:
        """Return the walk before any item: at 0 with certainty."""
        import numpy as np

        return cls(0.0, drift, np.zeros(1), np.ones(1))

    def beyond(self, step: float, limit: float, side: int) -> float:
        """Return the chance of being above `limit` (`side` 1) or below it (-1) after `step` more information."""
        import numpy as np
        from scipy.special import ndtr

        return float(np.sum(self.mass * ndtr(side * (self.nodes + self.drift * step - limit) / math.sqrt(step))))

    def step(self, step: float, low: float, high: float, following: float) -> BoundaryWalk:
        """Return the walk after `step` more information, restricted to values between `low` and `high`.

        `following` is the information from that look to the next one. Panels are no wider than the square root of
        either step, over which the density and the next look's kernel are smooth.
        """
        import numpy as np

        fraction = self.fraction + step
        middle, reach = self.drift * fraction, _REACH * math.sqrt(fraction)
        low, high = max(low, middle - reach), min(high, middle + reach)
        if low >= high:
            return BoundaryWalk(fraction, self.drift, np.zeros(1), np.zeros(1))
        panels = math.ceil((high - low) / math.sqrt(min(step, following)))
        points, weights = np.polynomial.legendre.leggauss(_NODES)
        width = (high - low) / panels
        nodes = (low + width * (np.arange(panels)[:, None] + (points + 1) / 2)).ravel()
        distance = (nodes[:, None] - self.nodes - self.drift * step) / math.sqrt(step)
        density = np.sum(self.mass * np.exp(-0.5 * distance**2), axis=1) / math.sqrt(2 * math.pi * step)
        return BoundaryWalk(fraction, self.drift, nodes, density * np.tile(weights, panels) * width / 2)


def _check(information: Sequence[float]) -> None:
    steps = [b - a for a, b in zip((0.0, *information), information, strict=False)]
    if not information or min(steps) <= 0 or any(fraction >= 1 for fraction in information[:-1]):
        raise ValueError(f"information must ascend from above 0, and reach 1 at the last look only: {information}")


Decision = Literal["PASS", "FAIL", "GO ON"]
# Fewer items at a look decide nothing that a good checkpoint could pass, and the normal approximation is poor.
LEAST_ITEMS = 50


@dataclass(frozen=True, slots=True)
class Look(Record):
    """One look at an evaluation: the number of `items` so far, the bounds at this look, and the decision.

    `information` is the share of the planned items. `lower` and `upper` are one-sided bounds of the change at
    `bound_confidence` each, in the units of `Accuracy.difference`. GO ON at the last look means that the evaluation
    ended undecided.
    """

    items: int
    information: float
    bound_confidence: float
    lower: float
    upper: float
    decision: Decision


def plan_looks(items: int, looks: int) -> tuple[int, ...]:
    """Return the number of items seen up to each look, in equal steps of at least `LEAST_ITEMS` items.

    There are fewer than `looks` if the items are too few for that. Raises `ValueError` for less than one item or look.

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
    """Return the looks up to the first that decides, or to the last one.

    `margin` is in the units of the difference (`accuracy.margin_in_units`), `confidence` that of all looks together.
    Items of looks after a decision are ignored. Raises `MeasurementError` if a look brought no item, or if a look
    follows the one that completed the planned items.
    """
    numbers = sorted(set(pairs.looks))
    if numbers != list(range(len(numbers))):
        raise MeasurementError(f"{pairs.task}: looks {numbers} are not 0, 1, ...: one of them brought no items")
    item_counts = list(accumulate(pairs.looks.count(number) for number in numbers))
    information = [items / pairs.planned for items in item_counts]
    try:
        levels = boundary(information, confidence)
    except ValueError as error:
        raise MeasurementError(f"{pairs.task}: {error}") from error
    looks: list[Look] = []
    for number, items, share, level in zip(numbers, item_counts, information, levels, strict=True):
        lower, upper = change(until(pairs, number)).bounds(level)
        decision: Decision = "PASS" if lower > -margin else "FAIL" if upper < -margin else "GO ON"
        looks.append(Look(items, share, level, lower, upper, decision))
        if decision != "GO ON":
            break
    return tuple(looks)


def until(pairs: Pairs, look: int) -> Pairs:
    """Return the pairs that were asked up to and including a look, a 0-based number."""
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
    """Return the factor by which a plan of equal looks needs more items than one fixed test of the same power.

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
