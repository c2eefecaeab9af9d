"""What a gate can tell, before anything is measured: how small a loss, after how many looks, how small a gain in speed.

>>> round(detectable_shift(4), 1)    # standard deviations between launches
2.4
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from eval.gate.report import Policy
from eval.power import outcome
from eval.records import Record
from eval.statistics.ranks import fewest_launches, rank_sums
from eval.statistics.sequential import plan_looks
from eval.suites import Suite, SuiteTask

_DRAWS = 20_000
"""Pairs of series; the power that they give is off by a third of a per cent."""


@dataclass(frozen=True, slots=True)
class TaskReach:
    """One task: `margin` is None where it is shown only, `detectable` the least margin that its items can test.

    `looks` are the items that were asked at each look, `expected` how many of them a lossless candidate is asked on
    average, because clear cases stop early (None of a perplexity, and of a task that is shown only). `passes` is the
    chance that such a candidate passes (None where it is shown only).
    """

    items: int
    margin: float | None
    detectable: float
    looks: tuple[int, ...]
    expected: int | None
    passes: float | None


@dataclass(frozen=True, slots=True)
class SpeedReach:
    """The promise of speed: with `launches` a side, `fewest` of which any test needs.

    A change of `detectable_spreads` standard deviations between launches is significant with the policy's power; None
    where so few launches never are.
    """

    min_ratio: float
    launches: int
    fewest: int
    detectable_spreads: float | None


@dataclass(frozen=True, slots=True)
class Reach(Record):
    """All that a gate can tell; `speed` is None where nothing is promised.

    `passes` is the chance that a lossless candidate passes all tasks that decide, as if they flipped independently;
    `false_fails` that one which loses as much as each margin allows, and no more, fails any of them, at most.
    """

    passes: float
    false_fails: float
    tasks: dict[str, TaskReach]
    speed: SpeedReach | None


def reach(suite: Suite, policy: Policy, looks: int) -> Reach:
    """What a policy can tell on a suite whose items are asked in so many looks."""
    speed = None
    if policy.min_ratio is not None:
        fewest = fewest_launches(policy.throughput_confidence)
        enough = policy.launches >= fewest
        spreads = detectable_shift(policy.launches, policy.throughput_confidence, policy.power) if enough else None
        speed = SpeedReach(policy.min_ratio, policy.launches, fewest, spreads)
    tasks = {task.task: _task(task, policy, looks) for task in suite.tasks}
    chances = [task.passes for task in tasks.values() if task.passes is not None]
    return Reach(math.prod(chances), 1 - policy.confidence ** len(chances), tasks, speed)


def detectable_shift(launches: int, confidence: float = 0.95, power: float = 0.8) -> float:
    """Smallest change of speed that the exact rank test sees with probability `power`, in standard deviations.

    Launches are drawn from a normal distribution, the same draws for every change, with a seed of their own: the answer
    is a property of the test, not of a run. `ValueError` where so few launches can show nothing.
    """
    import numpy as np
    from scipy.optimize import brentq

    if launches < fewest_launches(confidence):
        raise ValueError(f"{launches} launches a side show nothing at {confidence:.0%} confidence")
    critical = _critical_pairs(launches, 1 - confidence)
    rng = np.random.RandomState(0)
    baseline, candidate = rng.standard_normal((2, _DRAWS, launches))
    apart = candidate[:, :, None] - baseline[:, None, :]

    def missing(shift: float) -> float:
        return float(((apart > -shift).sum(axis=(1, 2)) >= critical).mean()) - power

    return float(brentq(missing, 0.0, 20.0, xtol=1e-3))


def _critical_pairs(launches: int, alpha: float) -> int:
    """The least number of pairs (candidate above baseline) that is significant: Mann and Whitney's U, counted exactly.

    It is the sum of the candidate's ranks less the least that this can be (Ann. Math. Statist. 18, 50-60, 1947).
    """
    ways = rank_sums(range(2 * launches), launches)
    sums = sorted(ways, reverse=True)
    limit = alpha * math.comb(2 * launches, launches) * (1 + 1e-9)
    tails = zip(sums, accumulate(ways[total] for total in sums), strict=True)
    return next(total for total, tail in tails if tail > limit) + 1 - sums[-1]


def _task(task: SuiteTask, policy: Policy, looks: int) -> TaskReach:
    margin = policy.margins.get(task.task)
    expected = None
    if margin is not None and task.expected_spread is None:
        found = outcome(task.items, looks, margin, task.expected_flip_rate, confidence=policy.confidence)
        expected = round(found.items)
    return TaskReach(
        items=task.items,
        margin=margin,
        detectable=task.detectable(policy.confidence, policy.power, looks if margin is not None else 1),
        looks=plan_looks(task.items, looks) if margin is not None else (task.items,),
        expected=expected,
        passes=None if margin is None else task.passes(margin, policy.confidence, looks),
    )
