"""Several checkpoints, judged one after the other until one passes: what that does to the risk of a false PASS."""

from __future__ import annotations

import numpy as np

from quantmint.eval.samples import Pairs
from quantmint.eval.statistics.sequential import decide

ITEMS, MARGIN, TRIES, RUNS = 400, 0.05, 4, 400


def false_passes(confidence: float) -> float:
    """Share of searches that pass a checkpoint which loses exactly the margin; all are at it, on one baseline."""
    draw = np.random.default_rng(18)
    passed = 0
    for _ in range(RUNS):
        baseline = draw.random(ITEMS) < 0.8
        for _ in range(TRIES):
            worse, better = draw.random(ITEMS) < (MARGIN + 0.02) / 0.8, draw.random(ITEMS) < 0.02 / 0.2
            candidate = np.where(baseline, ~worse, better)
            pairs = Pairs("t", "m", tuple(baseline.astype(float)), tuple(candidate.astype(float)))
            if decide(pairs, MARGIN, confidence)[-1].decision == "PASS":
                passed += 1
                break
    return passed / RUNS


def test_an_equal_share_of_the_error_for_each_try_keeps_the_risk_of_the_whole_search() -> None:
    error = 3 * (0.05 * 0.95 / RUNS) ** 0.5
    assert false_passes(1 - 0.05 / TRIES) <= 0.05 + error
    # Without, every try would have the whole error for itself.
    assert false_passes(0.95) > 0.1
