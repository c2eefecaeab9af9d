"""How often the endpoints beside the suite err, in simulated evaluations whose truth is known.

::

    python -m tests.bench.endpoints --runs 20000    # a minute on one core; a table of docs/notes/gate-simulations.md

Each is judged with the margins and sizes that a recipe has by default: a candidate that loses exactly the margin, where
either verdict is an error; one that lost nothing, where FAIL is a false alarm and PASS the power; and one that loses
twice the margin, where FAIL is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import click
import numpy as np

from quantmint.eval.long_context import BucketDivergence, LongDivergence, report
from quantmint.eval.long_context import judge as judge_kl
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.recipe.endpoints import (
    LongContext,
    LongContextGate,
    Reasoning,
    ReasoningGate,
    ToolCalls,
    ToolCallsGate,
)
from tests.bench.gate import SHAPES, Array, Design, correlated, documents, graded, passages, shares, skewed
from tests.eval.statistics.designs import evaluations

LIMIT = 0.05
"""Limit of the KL, in nats; half of it is what a sound candidate has here."""
Rates = tuple[float, float]
"""Shares of PASS and of FAIL."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """A task of an endpoint under a design: `judge(rng, runs, loss)` gives the shares of PASS and of FAIL."""

    task: str
    design: str
    margin: float
    judge: Callable[[np.random.Generator, int, float], Rates]

    def rates(self, runs: int, seed: int) -> tuple[Rates, Rates, Rates]:
        """Rates of a candidate that loses the margin, nothing, and twice the margin."""
        rng = np.random.default_rng(seed)
        first, second, third = (self.judge(rng, runs, loss) for loss in (self.margin, 0.0, 2 * self.margin))
        return first, second, third


def _calls(items: int, margin: float, flips: float) -> Callable[[np.random.Generator, int, float], Rates]:
    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        rates = {"gain_rate": flips / 2, "drop": loss, "runs": runs}
        return evaluations(rng, items=items, looks=4, margin=margin, **rates)  # type: ignore[arg-type]

    return judge


def tool_calls() -> Iterator[Simulation]:
    """Right and valid calls of 600 requests in four looks; flips as expected, none, and many."""
    for task in ToolCalls().tasks(ToolCallsGate(), None):
        assert task.margin is not None
        for flips in (0.0, task.expected_flip_rate, 0.1):
            yield Simulation(task.task, f"{flips:.0%} flip", task.margin, _calls(task.items, task.margin, flips))


def _likelihood(
    texts: int, margin: float, shape: Callable[[np.random.Generator, tuple[int, int]], Array]
) -> Callable[[np.random.Generator, int, float], Rates]:
    nats = math.log1p(margin)

    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        drawn = documents(shape, texts, 0.0)(rng, runs, math.log1p(loss))
        return shares(Design("", texts, 1, nats, documents(shape, texts, 0.0)), skewed, drawn)

    return judge


def _needles(
    texts: int, needles: int, margin: float, within: float, gain: float
) -> Callable[[np.random.Generator, int, float], Rates]:
    sizes = np.full(texts, float(needles))
    draw = passages(sizes, within, gain)

    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        return shares(Design("", texts, 1, margin, draw, sizes), correlated, draw(rng, runs, loss))

    return judge


def _divergence(texts: int, spread: float) -> Callable[[np.random.Generator, int, float], Rates]:
    """KL of texts, whose true mean is the limit and as much more as it loses: PASS is a bound below, FAIL one above."""

    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        passed = failed = 0
        for values in rng.lognormal(-(spread**2) / 2, spread, (runs, texts)) * (loss or 0.5 * LIMIT):
            bucket = LongDivergence(20, (BucketDivergence(0, 1, tuple(256 * values), (256,) * texts),), 1)
            verdict, _ = judge_kl(report(bucket, None, 0.95).buckets[0], LIMIT)
            passed, failed = passed + (verdict is Verdict.PASS), failed + (verdict is Verdict.FAIL)
        return passed / runs, failed / runs

    return judge


_TOGETHER = ((0.25, 0.04, "a quarter of a text's"), (0.5, 0.02, "half of a text's"), (1.0, 0.0, "a text's"))


def long_texts() -> Iterator[Simulation]:
    """Likelihood of a bucket, needles, and KL, of 48 texts with eight needles."""
    section = LongContext()
    likelihood, *_, retrieval = section.tasks(LongContextGate(), 8192)
    assert likelihood.margin is not None
    assert retrieval.margin is not None
    for name in ("normal", "heavy tails (t, 5 degrees)", "exponential losses"):
        judge = _likelihood(section.texts, likelihood.margin, SHAPES[name])
        yield Simulation("long_likelihood, a bucket", f"{name}, 2% between texts", likelihood.margin, judge)
    for within, gain, design in _TOGETHER:
        judge = _needles(section.texts, section.needles_of(8192), retrieval.margin, within, gain)
        yield Simulation(retrieval.task, f"{design} flip", retrieval.margin, judge)
    for spread in (0.3, 1.0):
        yield Simulation("KL of a bucket", f"lognormal between texts, sigma {spread:g}", LIMIT, _divergence(48, spread))


def _sampled(
    items: int, answers: int, margin: float, right: tuple[float, float]
) -> Callable[[np.random.Generator, int, float], Rates]:
    """Shares of `answers` answers by item, whose chances spread by a beta distribution; each loses an equal share."""

    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        mean = right[0] / sum(right)

        def draw(rng: np.random.Generator, runs: int, drop: float) -> tuple[Array, ...]:
            chance = rng.beta(*right, (runs, items))
            before = rng.binomial(answers, chance)
            return ((rng.binomial(answers, chance * (1 - drop / mean)) - before) / answers,)

        design = Design("", items, 4, margin, draw)
        rates = [shares(design, graded, draw(rng, min(_BATCH, runs), loss)) for _ in range(max(1, runs // _BATCH))]
        passed, failed = np.mean(rates, axis=0)
        return float(passed), float(failed)

    return judge


_BATCH = 250
"""Evaluations at a time: the interval of graded scores takes memory for each change of each."""


def sampled_answers() -> Iterator[Simulation]:
    """avg@4 of 600 problems, and answers that are complete; chances of an item by a beta distribution."""
    section, right = (
        Reasoning(),
        {"half are easy": (0.5, 0.3), "all alike, 0.7": (70.0, 30.0), "most are easy": (3.0, 0.5)},
    )
    score, complete, _ = section.tasks(ReasoningGate(), None)
    for task, designs in ((score, right), (complete, {"2% are cut": (9.8, 0.2), "20% are cut": (2.0, 0.5)})):
        assert task.margin is not None
        for name, chances in designs.items():
            yield Simulation(
                task.task, name, task.margin, _sampled(section.items, section.answers, task.margin, chances)
            )


def simulations() -> Iterator[Simulation]:
    """All tasks of all endpoints."""
    yield from tool_calls()
    yield from long_texts()
    yield from sampled_answers()


def table(heading: str, rows: Iterable[Simulation], runs: int) -> None:
    """Print the rates of each simulation in per cent, as a table whose first column is headed ``heading``."""
    click.echo(
        f"\n| {heading} | design | margin | loses the margin: PASS | FAIL | lossless: PASS | FAIL | twice: FAIL |"
    )
    click.echo("|---|---|" + "--:|" * 6)
    for seed, simulation in enumerate(rows):
        margin, lossless, twice = simulation.rates(runs, seed)
        cells = [f"{100 * simulation.margin:.2f}", *(f"{100 * r:.2f}" for r in (*margin, *lossless, twice[1]))]
        click.echo(f"| {simulation.task} | {simulation.design} | " + " | ".join(cells) + " |")


@click.command()
@click.option("--runs", default=20_000, show_default=True, help="Simulated evaluations of each design.")
def main(runs: int) -> None:
    """Print a table of the rates, in per cent."""
    table("endpoint", simulations(), runs)


if __name__ == "__main__":
    main()
