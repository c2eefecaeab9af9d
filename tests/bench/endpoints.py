"""How often the endpoints beside the suite err, in simulated evaluations whose truth is known.

::

    python -m tests.bench.endpoints --runs 20000    # a minute on one core; a table of docs/notes/gate-simulations.md

Each is judged with the margins and sizes that a recipe has by default: a candidate that loses exactly the margin, where
either verdict is an error; one that lost nothing, where FAIL is a false alarm and PASS the power; and one that loses
twice the margin, where FAIL is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import numpy as np

from quantmint.pipeline.recipe.endpoints import ToolCalls, ToolCallsGate
from tests.eval.statistics.designs import evaluations

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


def simulations() -> Iterator[Simulation]:
    """All tasks of all endpoints."""
    yield from tool_calls()


@click.command()
@click.option("--runs", default=20_000, show_default=True, help="Simulated evaluations of each design.")
def main(runs: int) -> None:
    """Print a table of the rates, in per cent."""
    click.echo("\n| endpoint | design | margin | loses the margin: PASS | FAIL | lossless: PASS | FAIL | twice: FAIL |")
    click.echo("|---|---|" + "--:|" * 6)
    for seed, simulation in enumerate(simulations()):
        margin, lossless, twice = simulation.rates(runs, seed)
        cells = [f"{100 * simulation.margin:.2f}", *(f"{100 * r:.2f}" for r in (*margin, *lossless, twice[1]))]
        click.echo(f"| {simulation.task} | {simulation.design} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
