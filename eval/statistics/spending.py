"""When a trial may stop early: alpha spending of O'Brien-Fleming type, by recursive numerical integration.

Looking at the data several times, each time with a 5 % test, errs more often than 5 % in all. Lan and DeMets
(Biometrika 70, 659-663, 1983) spend the error over the looks: after a share t of the information, an error of
2 - 2 * Phi(z_{alpha/2} / sqrt(t)) may have been spent (their alpha*_1, which mimics O'Brien and Fleming's boundary):
almost nothing early, nearly all at the end. The boundary of a look is whatever spends what is due at it. The
distribution of a statistic that has not crossed yet follows by integrating from look to look (Armitage, McPherson and
Rowe, JRSS A 132, 235-244, 1969; Jennison and Turnbull, "Group Sequential Methods", chapter 19).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

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
    """Error that may have been spent after a fraction of the information; all of it, alpha, from 1 on."""
    if fraction >= 1:
        return alpha
    return 2 * _NORMAL.cdf(-_NORMAL.inv_cdf(1 - alpha / 2) / math.sqrt(fraction))


def boundary(information: Sequence[float], confidence: float) -> tuple[float, ...]:
    """One-sided nominal confidence of each look, Phi(z_k), such that all looks together err at 1 - confidence.

    `information` holds the fractions of the planned items that the looks have seen, ascending, above 0; only the last
    may exceed 1 (more items than planned: what is left is spent). A single look at 1 gets `confidence` itself.

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
    walk = Walk.start()
    before = 0.0
    for number, fraction in enumerate(information):
        due = max(spent(fraction, alpha) - before, _LEAST)
        before += due
        step = fraction - walk.fraction
        if not levels:
            z = _NORMAL.inv_cdf(1 - due)
        else:
            z = float(brentq(lambda z: walk.above(step, z * math.sqrt(fraction)) - due, -_REACH, _REACH, xtol=1e-12))  # noqa: B023
        levels.append(confidence if fraction >= 1 and not levels else _NORMAL.cdf(z))
        following = information[number + 1] - fraction if number + 1 < len(information) else step
        walk = walk.step(step, -_REACH * math.sqrt(fraction), z * math.sqrt(fraction), following)
    return tuple(levels)


def crossing(information: Sequence[float], confidence: float, drift: float) -> tuple[tuple[float, float], ...]:
    """Chance of crossing the upper and the lower boundary first, at each look.

    `drift` is the expectation of the statistic Z at full information, in standard deviations: 0 on the margin, the
    distance to the margin over the standard error elsewhere. Both boundaries are those of `boundary`, mirrored.
    """
    levels = boundary(information, confidence)
    chances: list[tuple[float, float]] = []
    walk = Walk.start(drift)
    for number, (fraction, level) in enumerate(zip(information, levels, strict=True)):
        step = fraction - walk.fraction
        limit = _NORMAL.inv_cdf(level) * math.sqrt(fraction)
        chances.append((walk.above(step, limit), walk.below(step, -limit)))
        following = information[number + 1] - fraction if number + 1 < len(information) else step
        walk = walk.step(step, -limit, limit, following)
    return tuple(chances)


@dataclass(frozen=True, slots=True)
class Walk:
    """A Brownian motion with drift that has not left its bounds so far: X(t) is normal(drift * t, t) without bounds.

    `mass` is the probability at the `nodes` of a quadrature rule, shape (nodes,) each.
    """

    fraction: float
    drift: float
    nodes: NDArray[np.float64]
    mass: NDArray[np.float64]

    @classmethod
    def start(cls, drift: float = 0.0) -> Walk:
        """Before any item: at 0 with certainty."""
        import numpy as np

        return cls(0.0, drift, np.zeros(1), np.ones(1))

    def above(self, step: float, limit: float) -> float:
        """Probability of being above `limit` after `step` more information."""
        import numpy as np
        from scipy.special import ndtr

        return float(np.sum(self.mass * ndtr((self.nodes + self.drift * step - limit) / math.sqrt(step))))

    def below(self, step: float, limit: float) -> float:
        """Probability of being below `limit` after `step` more information."""
        import numpy as np
        from scipy.special import ndtr

        return float(np.sum(self.mass * ndtr((limit - self.nodes - self.drift * step) / math.sqrt(step))))

    def step(self, step: float, low: float, high: float, following: float) -> Walk:
        """The walk after `step` more information, where it lies between `low` and `high`.

        The density is smooth over sqrt(step), the next look's kernel over sqrt(following): panels are no wider.
        """
        import numpy as np

        fraction = self.fraction + step
        middle, reach = self.drift * fraction, _REACH * math.sqrt(fraction)
        low, high = max(low, middle - reach), min(high, middle + reach)
        if low >= high:
            return Walk(fraction, self.drift, np.zeros(1), np.zeros(1))
        panels = math.ceil((high - low) / math.sqrt(min(step, following)))
        points, weights = np.polynomial.legendre.leggauss(_NODES)
        width = (high - low) / panels
        nodes = (low + width * (np.arange(panels)[:, None] + (points + 1) / 2)).ravel()
        distance = (nodes[:, None] - self.nodes - self.drift * step) / math.sqrt(step)
        density = np.sum(self.mass * np.exp(-0.5 * distance**2), axis=1) / math.sqrt(2 * math.pi * step)
        return Walk(fraction, self.drift, nodes, density * np.tile(weights, panels) * width / 2)


def _check(information: Sequence[float]) -> None:
    steps = [b - a for a, b in zip((0.0, *information), information, strict=False)]
    if not information or min(steps) <= 0 or any(fraction >= 1 for fraction in information[:-1]):
        raise ValueError(f"information must ascend from above 0, and reach 1 at the last look only: {information}")
