"""How often the gate errs where half of the baseline's launches are an earlier series', in simulated series.

::

    python -m tests.bench.reused_launches --runs 40000    # two minutes; a table of docs/notes/gate-simulations.md

The machine may be faster or slower than it was when the reused launches were made. The truth is a candidate that is
exactly as fast as promised, where either verdict is an error, and one that is three per cent faster.
`tests/eval/test_reused_launches.py` holds the rule here, which judges whole arrays, against the gate's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import numpy as np
from scipy.special import stdtrit

from quantmint.eval.gate.validity import AGREEMENT_ALPHA
from quantmint.eval.measurements import order, reuse_order
from tests.bench.gate import LAUNCHES, PROMISE, Array, Noise, significant, speed

SHIFTS = (-0.1, -0.05, -0.03, -0.02, -0.01, 0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
"""By how much the machine is faster (as a logarithm) than when the reused launches were made."""
_DRIFT = 0.05 / 7  # of a launch, as a logarithm: 5 % over a series of four a side


def drifting(sign: int) -> Noise:
    """Return launches that drift by 5 % over eight, up or down, and lie 1 % apart."""
    return lambda rng, shape: rng.normal(0, 0.01, shape) + sign * _DRIFT * np.arange(shape[1])


NOISES: dict[str, tuple[Noise, float]] = {
    **{name: (noise, 1.0) for name, noise in LAUNCHES.items() if not name.startswith(("a drift", "the candidate"))},
    "one launch in ten 10 % fast": (
        lambda rng, shape: rng.normal(0, 0.005, shape) + 0.1 * (rng.random(shape) < 0.1),
        1.0,
    ),
    "a drift of 5 % down, and 1 %": (drifting(-1), 1.0),
    "a drift of 5 % up, and 1 %": (drifting(1), 1.0),
    "the candidate's twice as far apart, 1 %": (LAUNCHES["normal, 1 %"], 2.0),
}
"""What launches differ by, in the order made, and how many times as far the candidate's lie apart."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Throughputs of many series, shape (runs, launches): of the start of the order, and of both ends after it."""

    reused: Array
    fresh: Array
    candidate: Array
    fresh_anew: Array
    candidate_anew: Array


def drawn(
    noise: tuple[Noise, float],
    rng: np.random.Generator,
    runs: int,
    launches: int,
    fresh: int,
    ratio: float,
    shift: float,
) -> Drawn:
    """Draw series with so many `fresh` launches of the baseline in a machine that is `shift` faster than before."""
    if fresh == launches - launches // 2:
        start, agreed, disagreed = reuse_order(launches)
    else:  # as that has it, with fewer of the baseline's
        half = launches // 2
        start = (*["candidate"] * half, *["baseline"] * fresh)  # type: ignore[assignment]
        agreed = ("candidate",) * (launches - half)
        disagreed = (*["baseline"] * (launches - fresh), *agreed)  # type: ignore[assignment]

    def series(sides: Sequence[str], factor: float, moved: float) -> tuple[Array, Array]:
        candidate = np.array([side == "candidate" for side in sides])
        apart = noise[0](rng, (runs, len(sides))) * np.where(candidate, noise[1], 1.0)
        return np.exp(moved + apart) * np.where(candidate, factor, 1.0), candidate

    before, candidate = series(order(launches), ratio, 0.0)
    anew, candidate_anew = series((*start, *disagreed), ratio, shift)
    end = series((*start, *agreed), ratio, shift)[0][:, len(start) :]
    first = candidate_anew[: len(start)]
    return Drawn(
        reused=before[:, ~candidate][:, fresh - launches :],
        fresh=anew[:, : len(start)][:, ~first],
        candidate=np.concatenate([anew[:, : len(start)][:, first], end], axis=1),
        fresh_anew=anew[:, ~candidate_anew],
        candidate_anew=anew[:, candidate_anew],
    )


def squares(values: Array) -> Array:
    """Return the sums of squares about the mean of each run."""
    return np.asarray(((values - values.mean(axis=1, keepdims=True)) ** 2).sum(axis=1))


def agree(series: Drawn, cells: int = 1) -> Array:
    """Return whether the reused launches agree with the fresh ones in one of so many cells, run by run."""
    reused, fresh = np.log(series.reused), np.log(series.fresh)
    sizes = reused.shape[1], fresh.shape[1]
    freedom = sum(sizes) - 2
    error = np.sqrt((squares(reused) + squares(fresh)) / freedom * (1 / sizes[0] + 1 / sizes[1]))
    limit = stdtrit(freedom, 1 - AGREEMENT_ALPHA / cells / 2)
    return np.asarray(np.abs(fresh.mean(axis=1) - reused.mean(axis=1)) <= limit * error)


def by_both_tests(series: Drawn, sign: int) -> Array:
    """Return whether Welch's test of the fresh launches shows more (`sign` 1) or less (-1) than promised."""
    reused, fresh, candidate = np.log(series.reused), np.log(series.fresh), np.log(series.candidate / PROMISE)
    freedom, own_freedom = reused.shape[1] + fresh.shape[1] - 2, candidate.shape[1] - 1
    first = squares(candidate) / own_freedom / candidate.shape[1]
    second = (squares(reused) + squares(fresh)) / freedom / fresh.shape[1]
    welch = (first + second) ** 2 / (first**2 / own_freedom + second**2 / freedom)
    distance = sign * (candidate.mean(axis=1) - fresh.mean(axis=1))
    return np.asarray(distance > stdtrit(welch, 0.95) * np.sqrt(first + second))


def verdicts(series: Drawn, *, both_tests: bool = True, cells: int = 1) -> tuple[Array, Array, Array]:
    """Return whether each run passes, whether it fails, and whether the reused launches were made anew.

    The error of the agreement is shared by `cells`, of which the others agree.
    """
    baseline = np.concatenate([series.reused, series.fresh], axis=1)
    passed = significant(series.candidate, PROMISE * baseline)
    failed = significant(PROMISE * baseline, series.candidate)
    if both_tests:
        passed, failed = passed & by_both_tests(series, 1), failed & by_both_tests(series, -1)
    anew = ~agree(series, cells)
    return (
        np.where(anew, significant(series.candidate_anew, PROMISE * series.fresh_anew), passed),
        np.where(anew, significant(PROMISE * series.fresh_anew, series.candidate_anew), failed),
        anew,
    )


def rows(runs: int, sides: Sequence[int] = (4, 5, 6, 7), cells: int = 1) -> Iterator[list[str]]:
    """Yield a row for each noise and number of launches: worst rates over all shifts, and power without a shift."""
    for name, noise in NOISES.items():
        for launches in sides:
            half = launches - launches // 2
            rng = np.random.default_rng(launches)
            worst = np.zeros(4)
            for shift in SHIFTS:
                there = drawn(noise, rng, runs, launches, half, PROMISE, shift)
                passed, failed, _ = verdicts(there, cells=cells)
                rates = passed.mean(), failed.mean(), verdicts(there, both_tests=False, cells=cells)[0].mean(), 0.0
                if launches == 4:
                    one_fresh = drawn(noise, rng, runs, launches, 1, PROMISE, shift)
                    rates = (*rates[:3], verdicts(one_fresh, cells=cells)[0].mean())
                worst = np.maximum(worst, rates)
            better = drawn(noise, rng, runs, launches, half, 1.03 * PROMISE, 0.0)
            shown, _, anew = verdicts(better, cells=cells)
            alone = speed(better.fresh_anew, better.candidate_anew)[0]
            shares = [*worst[:3], shown.mean(), alone]
            one = f"{100 * worst[3]:.1f}" if launches == 4 else ""
            made = 1 + launches + half + (launches - half) * anew.mean()
            figures = [f"{100 * share:.1f}" for share in shares]
            yield [name, str(launches), *figures[:3], one, *figures[3:], f"{made:.1f}"]


@click.command()
@click.option("--runs", default=40_000, show_default=True, help="Simulated series of each design.")
@click.option("--cells", default=1, show_default=True, help="Cells of the workload, which share the A/A check's error.")
def main(runs: int, cells: int) -> None:
    """Print the table, in per cent."""
    click.echo(
        "\n| reused launches, promised 1.1 x | a side | false PASS | false FAIL | false PASS, rank test alone "
        "| one fresh launch | 1.133: PASS | all fresh | launches, mean |"
    )
    click.echo("|---|" + "--:|" * 8)
    for row in rows(runs, cells=cells):
        click.echo("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
