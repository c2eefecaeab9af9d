"""Forecast what a gate can show: how small a loss, after how many looks, and how small a gain in speed.

>>> round(detectable_shift(4), 1)    # standard deviations between launches
2.4
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from quantmint.eval.gate.report import Policy
from quantmint.eval.gate.throughput import ends_early
from quantmint.eval.measurements import reusable
from quantmint.eval.power import outcome
from quantmint.eval.records import Record
from quantmint.eval.statistics.ranks import MOST_LOOKS, critical_pairs, fewest_launches, look_boundaries
from quantmint.eval.statistics.sequential import plan_looks
from quantmint.eval.suites import Suite, SuiteTask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NOISE = 0.01
"""Relative: how far launches of a steady state lie apart, where none were seen."""
_MOST = 20
"""Launches a side that a recipe may ask for."""
_DRAWS = 20_000
"""Pairs of series; the power that they give is off by a third of a per cent."""


@dataclass(frozen=True, slots=True)
class TaskReach:
    """The forecast for one task. `margin` is its accepted loss (None: shown only).

    `detectable` is the least margin that its `items` can test. `looks` are the numbers of items asked up to each look.
    `expected` is the number of items that a lossless candidate is asked on average, because clear cases stop early, and
    `passes` the chance that it passes; both are None for a task that is shown only, and `expected` also for a
    perplexity.
    """

    items: int
    margin: float | None
    detectable: float
    looks: tuple[int, ...]
    expected: int | None
    passes: float | None


@dataclass(frozen=True, slots=True)
class SpeedReach:
    """The forecast for a promise of speed, with `launches` a side; any test needs at least `fewest`.

    A change of `detectable_spreads` standard deviations between launches is significant with the policy's power (None:
    so few launches never are). With the relative standard deviation `noise`, measured or assumed, the promise of
    `min_ratio` is proved for a checkpoint that is really `least` times as fast as the baseline. A checkpoint with the
    ratio `seen` in the last measurement needs `needed` launches a side (None: nothing was seen, or no possible number
    proves the promise).
    """

    min_ratio: float
    launches: int
    fewest: int
    detectable_spreads: float | None
    noise: float = NOISE
    least: float | None = None
    seen: float | None = None
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Reach(Record):
    """The forecast of a gate's outcomes; `speed` is None if the recipe promises none.

    `passes` is the chance that a lossless candidate passes all tasks that decide, as if their flips were independent.
    `false_fails` is the greatest chance that a candidate that loses exactly the margin of each task fails one of them.
    """

    passes: float
    false_fails: float
    tasks: dict[str, TaskReach]
    speed: SpeedReach | None


def reach(
    suite: Suite,
    policy: Policy,
    looks: int,
    *,
    noise: float | None = None,
    seen: float | None = None,
    reused: int = 0,
    at_once: Collection[str] = (),
) -> Reach:
    """Return the forecast for a suite whose items are judged at up to `looks` looks, under a policy.

    `noise` is the relative standard deviation of throughput between launches (None: the assumed `NOISE`), `seen` the
    ratio of the last measurement (None: none yet), `reused` the number of the baseline's launches taken from an earlier
    series. Tasks in `at_once` are judged at one look.
    """
    speed = None
    if policy.min_ratio is not None:
        speed = _speed(policy.min_ratio, policy, NOISE if noise is None else noise, seen, reused)
    tasks = {task.task: _task(task, policy, 1 if task.task in at_once else looks) for task in suite.tasks}
    chances = [task.passes for task in tasks.values() if task.passes is not None]
    return Reach(math.prod(chances), 1 - policy.confidence ** len(chances), tasks, speed)


def _speed(promise: float, policy: Policy, noise: float, seen: float | None, reused: int) -> SpeedReach:
    fewest = fewest_launches(policy.throughput_confidence)
    early = ends_early(policy)

    def spreads(launches: int) -> float:
        confidence, power = policy.throughput_confidence, policy.power
        return detectable_shift(launches, confidence, power, reused=reused and reusable(launches), early=early)

    def least(launches: int) -> float:
        return promise * math.exp(noise * spreads(launches))

    most = MOST_LOOKS if early else _MOST
    enough = policy.launches >= fewest
    needed = None
    if seen is not None and fewest <= most and seen > least(most):
        needed = next(launches for launches in range(fewest, most + 1) if seen > least(launches))
    return SpeedReach(
        promise,
        policy.launches,
        fewest,
        spreads(policy.launches) if enough else None,
        noise,
        least(policy.launches) if enough else None,
        seen,
        needed,
    )


@lru_cache(maxsize=128)
def detectable_shift(
    launches: int, confidence: float = 0.95, power: float = 0.8, *, reused: int = 0, early: bool = False
) -> float:
    """Return the smallest change of speed that is proved with probability `power`.

    Its unit is the standard deviation between launches. The test is the exact rank test of `launches` a side at
    `confidence`. With `reused` of the baseline's launches, which are taken to lie where the fresh ones lie, Welch's
    test of the fresh ones must hold as well; with `early` the test is that of all looks of a series that may end early.

    The launches are drawn from a normal distribution with a fixed seed, the same draws for every change, so the answer
    is a property of the test and not of a run. Raises `ValueError` for so few launches that none can be significant.
    """
    import numpy as np
    from scipy.optimize import brentq

    if launches < fewest_launches(confidence):
        raise ValueError(f"{launches} launches a side show nothing at {confidence:.0%} confidence")
    rng = np.random.RandomState(0)
    baseline, candidate = rng.standard_normal((2, _DRAWS, launches))
    if early:
        boundaries = look_boundaries(launches, 1 - confidence)
    else:
        boundaries = {launches: critical_pairs(launches, launches, 1 - confidence) or 0}
    apart = candidate[:, :, None] - baseline[:, None, :]
    welch = _welch_margin(baseline, candidate, reused, confidence) if reused else np.full(_DRAWS, np.inf)

    def missing(shift: float) -> float:
        shown = np.zeros(_DRAWS, dtype=bool)
        for look, least in boundaries.items():
            shown |= (apart[:, :look, :look] > -shift).sum(axis=(1, 2)) >= least
        return float((shown & (welch > -shift)).mean()) - power

    return float(brentq(missing, 0.0, 20.0, xtol=1e-3))


def _welch_margin(
    baseline: NDArray[np.float64], candidate: NDArray[np.float64], reused: int, confidence: float
) -> NDArray[np.float64]:
    """Return by how much Welch's lower bound of each pair of drawn series lies above 0, shape (draws,).

    `baseline` and `candidate` have shape (draws, launches); the bound is that of `statistics.means.day_difference`.
    """
    import numpy as np
    from scipy.special import stdtrit

    def squares(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(((values - values.mean(axis=1, keepdims=True)) ** 2).sum(axis=1))

    fresh, launches = baseline[:, reused:], candidate.shape[1]
    freedom, own_freedom = launches - 2, launches - 1
    first = squares(candidate) / own_freedom / launches
    second = (squares(fresh) + squares(baseline[:, :reused])) / freedom / fresh.shape[1]
    welch = (first + second) ** 2 / (first**2 / own_freedom + second**2 / freedom)
    reach = stdtrit(welch, confidence) * np.sqrt(first + second)
    return np.asarray(candidate.mean(axis=1) - fresh.mean(axis=1) - reach)


def _task(task: SuiteTask, policy: Policy, looks: int) -> TaskReach:
    margin = policy.margins.get(task.task)
    expected = None
    if margin is not None and task.expected_spread is None:
        expectation = outcome(task.items, looks, margin, task.expected_flip_rate, confidence=policy.confidence)
        expected = round(expectation.items)
    return TaskReach(
        items=task.items,
        margin=margin,
        detectable=task.detectable(policy.confidence, policy.power, looks if margin is not None else 1),
        looks=plan_looks(task.items, looks) if margin is not None else (task.items,),
        expected=expected,
        passes=None if margin is None else task.passes(margin, policy.confidence, looks),
    )
