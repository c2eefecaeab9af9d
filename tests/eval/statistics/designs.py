"""Simulated evaluations, many at once, and one at a time as the gate sees them."""

from __future__ import annotations

import numpy as np
from scipy import stats

from quantmint.eval.samples import Kind, Pairs
from quantmint.eval.statistics.paired import LOWER_CORRECTION, UPPER_CORRECTION, score_deviation
from quantmint.eval.statistics.sequential import boundary, decide, plan_looks


def tolerated(rate: float, runs: int) -> float:
    """Three standard errors of a simulated rate: a right rule fails one test in 700, and the seed is fixed."""
    return float(3 * np.sqrt(rate * (1 - rate) / runs))


def evaluations(
    rng: np.random.Generator,
    *,
    items: int,
    looks: int,
    margin: float,
    drop: float,
    gain_rate: float,
    runs: int,
    levels: tuple[float, ...] | None = None,
) -> tuple[float, float]:
    """Shares of simulated evaluations of 0/1 scores that end in PASS and in FAIL at a true drop.

    A bound lies beyond -margin where the statistic at -margin lies beyond z, which `test_simulations` holds against
    `decide` itself. `levels` replaces the boundary.
    """
    seen = plan_looks(items, looks)
    limits = stats.norm.ppf(levels or boundary([count / items for count in seen], 0.95))
    gains, losses, running = np.zeros(runs), np.zeros(runs), np.ones(runs, dtype=bool)
    passed = failed = 0
    for before, count, z in zip((0, *seen), seen, limits, strict=False):
        rates = [gain_rate, gain_rate + drop, 1 - 2 * gain_rate - drop]
        won, lost, _ = rng.multinomial(count - before, rates, size=runs).T
        gains, losses = gains + won, losses + lost
        excess, deviation = gains - losses + count * margin, score_deviation(gains, losses, count, -margin)
        up = running & (excess - LOWER_CORRECTION > z * deviation)
        down = running & (excess + UPPER_CORRECTION < -z * deviation)
        passed, failed, running = passed + up.sum(), failed + down.sum(), running & ~up & ~down
    return passed / runs, failed / runs


def asked(
    baseline: np.ndarray,
    candidate: np.ndarray,
    *,
    looks: int = 1,
    clusters: np.ndarray | None = None,
    weights: np.ndarray | None = None,
    kind: Kind = "score",
) -> Pairs:
    """The pairs of an evaluation whose clusters (or items) are asked in equal looks."""
    numbers = np.arange(len(baseline)) if clusters is None else clusters
    seen = np.array(plan_looks(int(numbers.max()) + 1, looks))
    return Pairs(
        "t",
        "m",
        tuple(baseline.tolist()),
        tuple(candidate.tolist()),
        kind,
        () if weights is None else tuple(weights.tolist()),
        tuple(map(str, numbers)),
        tuple(np.searchsorted(seen, numbers, side="right").tolist()),
    )


def decisions(pairs: list[Pairs], margin: float) -> tuple[float, float]:
    """Shares of evaluations that `decide` ends in PASS and in FAIL."""
    ends = [decide(each, margin, 0.95)[-1].decision for each in pairs]
    return ends.count("PASS") / len(ends), ends.count("FAIL") / len(ends)
