"""How often the gate errs, and passes what lost nothing, in simulated evaluations whose truth is known.

::

    python -m tests.bench.gate --runs 10000    # minutes on one core; the tables of docs/notes/gate-simulations.md

Every design is judged at a true drop of exactly the margin, where either verdict is an error, by the rule that the gate
had before and by the one it has; and with no drop, where PASS is right. A bound lies beyond -margin where the statistic
at -margin lies beyond its quantile, so whole arrays are judged at once; `tests/eval/statistics/test_intervals.py` holds
that against `decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from quantmint.eval import records, suites
from quantmint.eval.measurements import order
from quantmint.eval.power import outcome
from quantmint.eval.statistics.paired import (
    LOWER_CORRECTION,
    UPPER_CORRECTION,
    design_effect,
    graded_deviation,
    ratio,
    score_deviation,
)
from quantmint.eval.statistics.ranks import critical_pairs, look_boundaries
from quantmint.eval.statistics.sequential import boundary, plan_looks

Array = NDArray[Any]
Sides = tuple[Array, Array]
"""Of each run, whether the lower bound is above -margin, and whether the upper is below it."""


@dataclass(frozen=True, slots=True)
class Design:
    """`draw(rng, runs, drop)` gives what is judged, each array of shape (runs, units), for a true mean change of -drop.

    Of graded scores the changes; of perplexities sums and words of documents; of passages gains and losses. `sizes` are
    the passages' items.
    """

    name: str
    units: int
    looks: int
    margin: float
    draw: Callable[[np.random.Generator, int, float], tuple[Array, ...]]
    sizes: Array | None = None


Rule = Callable[[Design, tuple[Array, ...], float], Sides]


def shares(design: Design, rule: Rule, drawn: tuple[Array, ...]) -> tuple[float, float]:
    """Shares of runs that end in PASS and in FAIL, over all looks."""
    seen = plan_looks(design.units, design.looks)
    sizes = np.ones(design.units) if design.sizes is None else design.sizes
    information = np.cumsum(sizes)[np.array(seen) - 1] / sizes.sum()
    running = np.ones(len(drawn[0]), dtype=bool)
    passed = failed = 0
    for count, level in zip(seen, boundary(information.tolist(), 0.95), strict=True):
        up, down = (np.zeros(len(running), dtype=bool) for _ in range(2))
        up[running], down[running] = rule(design, tuple(part[running, :count] for part in drawn), level)
        passed, failed, running = passed + up.sum(), failed + (down & ~up).sum(), running & ~up & ~down
    return passed / len(running), failed / len(running)


def _score(items: Any, total: Array, deviation: Array, z: Any) -> Sides:
    return total - LOWER_CORRECTION > z * deviation, total + UPPER_CORRECTION < -z * deviation


def student(design: Design, drawn: tuple[Array, ...], level: float) -> Sides:
    """The rule of before for graded scores and perplexities."""
    change, words = drawn if len(drawn) == 2 else (drawn[0], np.ones_like(drawn[0]))
    units, total = change.shape[1], words.sum(axis=1)
    value = change.sum(axis=1) / total
    error = np.sqrt(((change - value[:, None] * words) ** 2).sum(axis=1) * units / (units - 1)) / total
    half = stdtrit(units - 1, level) * (error if len(drawn) == 2 else np.maximum(error, 1 / units))
    return value - half > -design.margin, value + half < -design.margin


def graded(design: Design, drawn: tuple[Array, ...], level: float) -> Sides:
    """Tango's interval over the changes seen."""
    (change,) = drawn
    items = change.shape[1]
    deviation = np.sqrt(items) * graded_deviation(change, np.ones(items), np.full(len(change), -design.margin))
    return _score(items, change.sum(axis=1) + items * design.margin, deviation, ndtri(level))


def skewed(design: Design, drawn: tuple[Array, ...], level: float) -> Sides:
    """Student's t with the skewness."""
    found = [ratio(*documents) for documents in zip(*drawn, strict=True)]
    below, above = np.array([one.quantiles(level) for one in found]).T
    value, error = (np.array([getattr(one, name) for one in found]) for name in ("value", "standard_error"))
    return value - below * error > -design.margin, value + above * error < -design.margin


def residuals(design: Design, drawn: tuple[Array, ...], level: float) -> Sides:
    """The rule of before for passages: effective counts by the residuals of whole passages."""
    gains, losses = drawn
    assert design.sizes is not None
    sizes, passages = design.sizes[: gains.shape[1]], gains.shape[1]
    won, lost, items = gains.sum(axis=1), losses.sum(axis=1), sizes.sum()
    value = (won - lost) / items
    together = ((gains - losses - value[:, None] * sizes) ** 2).sum(axis=1) * passages / (passages - 1)
    single = (won + lost - items * value**2) * items / (items - 1)
    effect = np.where(won + lost == 0, items / passages, np.maximum(1, (together + 4) / (single + 2)))
    return _effective(design.margin, won, lost, items, effect, stdtrit(passages - 1, level))


def correlated(design: Design, drawn: tuple[Array, ...], level: float) -> Sides:
    """Effective counts by the correlation of two changes of a passage."""
    gains, losses = drawn
    assert design.sizes is not None
    sizes = design.sizes[: gains.shape[1]]
    won, lost, items = gains.sum(axis=1), losses.sum(axis=1), sizes.sum()
    value = ((won - lost) / items)[:, None]
    sums = gains - losses - value * sizes
    squares = gains + losses - 2 * value * (gains - losses) + value**2 * sizes
    found = [design_effect(*passages, sizes) for passages in zip(sums, squares, strict=True)]
    effect, freedom = (np.array([getattr(one, name) for one in found]) for name in ("factor", "freedom"))
    return _effective(design.margin, won, lost, items, effect, stdtrit(freedom, level))


def _effective(margin: float, won: Array, lost: Array, items: float, effect: Array, z: Any) -> Sides:
    won, lost, counted = won / effect, lost / effect, items / effect
    return _score(counted, won - lost + counted * margin, score_deviation(won, lost, counted, -margin), z)


# What a design draws: changes of graded scores.


def partly(low: Callable[[np.random.Generator, tuple[int, int]], Array], mean: float, gain: float = 0.0) -> Any:
    """Some items change by what `low` draws, of this mean: losses, and a share of gains."""

    def draw(items: int) -> Any:
        def drawn(rng: np.random.Generator, runs: int, drop: float) -> tuple[Array, ...]:
            kind, much = rng.random((runs, items)), low(rng, (runs, items))
            lost = gain + drop / mean
            return (np.where(kind < lost, -much, np.where(kind < lost + gain, much, 0.0)),)

        return drawn

    return draw


def jittered(items: int) -> Any:
    """A third of the items moves by up to a fifth of a point either way, and some are lost wholly."""

    def drawn(rng: np.random.Generator, runs: int, drop: float) -> tuple[Array, ...]:
        moved = rng.uniform(-0.2, 0.2, (runs, items)) * (rng.random((runs, items)) < 0.3)
        return (np.where(rng.random((runs, items)) < drop, -1.0, moved),)

    return drawn


GRADED = {
    "whole points, and one item of a half": partly(lambda rng, shape: np.ones(shape), 1.0),
    "whole points, gains of 2 %": partly(lambda rng, shape: np.ones(shape), 1.0, 0.02),
    "F1, losses of any size (beta 0.5, 0.5)": partly(lambda rng, shape: rng.beta(0.5, 0.5, shape), 0.5),
    "F1, most losses small (beta 0.3, 1)": partly(lambda rng, shape: rng.beta(0.3, 1.0, shape), 0.3 / 1.3),
    "F1, gains and losses of 5 % (uniform)": partly(lambda rng, shape: rng.random(shape), 0.5, 0.05),
    "halves and wholes": partly(lambda rng, shape: rng.choice([0.5, 1.0], size=shape), 0.75),
    "quarters, gains of 2 %": partly(
        lambda rng, shape: rng.choice([0.25, 0.5, 0.75, 1.0], p=[0.4, 0.3, 0.2, 0.1], size=shape), 0.5, 0.02
    ),
    "a third moves by up to 0.2, some are lost": jittered,
}

# Changes of documents in nats per word, of mean 0 and deviation 1.
SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails (t, 5 degrees)": lambda rng, shape: rng.standard_t(5, shape) / np.sqrt(5 / 3),
    "exponential losses": lambda rng, shape: 1 - rng.exponential(size=shape),
    "exponential gains": lambda rng, shape: rng.exponential(size=shape) - 1,
    "lognormal losses, sigma 1": lambda rng, shape: -(rng.lognormal(0, 1, shape) - np.e**0.5) / 2.1612,
    "lognormal losses, sigma 1.5": lambda rng, shape: -(rng.lognormal(0, 1.5, shape) - np.e**1.125) / 8.9737,
    "gamma losses, shape 0.25": lambda rng, shape: -2 * (rng.gamma(0.25, 1.0, shape) - 0.25),
    "a tenth loses ten deviations": lambda rng, shape: (
        rng.normal(0, 0.3, shape) - 10 * ((rng.random(shape) < 0.1) - 0.1)
    ),
}


def documents(shape: Callable[[np.random.Generator, tuple[int, int]], Array], count: int, spread: float) -> Any:
    """Documents whose lengths spread as wikitext's do at 0.7 (the deviation of their logarithm); 0: all alike."""

    def drawn(rng: np.random.Generator, runs: int, drop: float) -> tuple[Array, ...]:
        words = np.ceil(rng.lognormal(7.0, spread, (runs, count)))
        return (0.02 * shape(rng, (runs, count)) - drop) * words, words

    return drawn


def passages(sizes: Array, within: float, gain: float) -> Any:
    """A share of the passages is hit; of a passage that is hit, each question flips with probability `within`."""

    def drawn(rng: np.random.Generator, runs: int, drop: float) -> tuple[Array, ...]:
        kind = rng.random((runs, len(sizes)))
        flipped = rng.binomial(np.broadcast_to(sizes.astype(int), kind.shape), within).astype(float)
        # What has lost nothing flips as often, both ways alike.
        lost = gain + drop / within
        return np.where(kind < gain, flipped, 0.0), np.where((kind >= gain) & (kind < gain + lost), flipped, 0.0)

    return drawn


_ORDER = np.random.default_rng(3)
SIZES = {
    "60 of 10": np.full(60, 10.0),
    "250 of 4": np.full(250, 4.0),
    "200, sizes lognormal (sigma 1)": np.ceil(_ORDER.lognormal(1.2, 1.0, 200)),
    "80, sizes lognormal (sigma 1.3)": np.ceil(_ORDER.lognormal(1.8, 1.3, 80)),
    "8 of 50, 100 of 4": _ORDER.permutation([50.0] * 8 + [4.0] * 100),
    "4 of 100, 100 of 4": _ORDER.permutation([100.0] * 4 + [4.0] * 100),
    "3 of 200, 60 of 10": _ORDER.permutation([200.0] * 3 + [10.0] * 60),
    "2 of 250, 100 of 5": _ORDER.permutation([250.0] * 2 + [5.0] * 100),
}
# How much of a hit passage flips, share of passages that gain, margin.
HITS = ((1.0, 0.0, 0.03), (0.5, 0.02, 0.03), (0.2, 0.05, 0.03), (0.05, 0.2, 0.03), (0.2, 0.0, 0.01), (1.0, 0.01, 0.06))


def graded_designs() -> Iterator[Design]:
    """Of each kind, margins of three quarters of a point, two and five, in one look and in four."""
    for name, draw in GRADED.items():
        for items, looks in ((200, 1), (400, 4)):
            for margin in (0.0075, 0.02, 0.05):
                yield Design(name, items, looks, margin, draw(items))


def perplexity_designs(spreads: Sequence[float] = (0.0, 0.7)) -> Iterator[Design]:
    """62 documents are wikitext's. The margin is any: the truth lies on it."""
    for name, shape in SHAPES.items():
        for spread in spreads:
            for count, looks, margin in ((62, 1, 0.0085), (200, 4, 0.0048)):
                yield Design(name, count, looks, margin, documents(shape, count, spread))


def passage_designs() -> Iterator[Design]:
    """All sizes, all ways to be hit; in four looks where there are passages enough."""
    for name, sizes in SIZES.items():
        for within, gain, margin in HITS:
            looks = 4 if len(sizes) >= 200 else 1
            yield Design(name, len(sizes), looks, margin, passages(sizes, within, gain), sizes)


KINDS: dict[str, tuple[Callable[[], Iterator[Design]], Rule, Rule]] = {
    "graded scores": (graded_designs, student, graded),
    "perplexities": (perplexity_designs, student, skewed),
    "passages": (passage_designs, residuals, correlated),
}


# What launches differ by, in the order made: shape (runs, launches of both sides), the logarithm of a throughput.
Noise = Callable[[np.random.Generator, tuple[int, int]], Array]
LAUNCHES: dict[str, Noise] = {
    "normal, 1 %": lambda rng, shape: rng.normal(0, 0.01, shape),
    "normal, 5 %": lambda rng, shape: rng.normal(0, 0.05, shape),
    "heavy tails (t, 2 degrees), 1 %": lambda rng, shape: 0.01 * rng.standard_t(2, shape).clip(-30, 30),
    "some launches slow, by 1 % on average": lambda rng, shape: -rng.exponential(0.01, shape),
    "one launch in ten 10 % slow": lambda rng, shape: rng.normal(0, 0.005, shape) - 0.1 * (rng.random(shape) < 0.1),
    "a drift of 5 % over the series, and 1 %": lambda rng, shape: (
        rng.normal(0, 0.01, shape) - np.linspace(0, 0.05, shape[1])
    ),
    "the candidate's twice as far apart, 1 %": lambda rng, shape: (
        rng.normal(0, 0.01, shape) * np.where([side == "candidate" for side in order(shape[1] // 2)], 2, 1)
    ),
}
PROMISE = 1.1


def launched(noise: Noise, rng: np.random.Generator, runs: int, launches: int, ratio: float) -> tuple[Array, Array]:
    """Throughputs of a baseline and of a candidate that is really `ratio` times as fast."""
    apart = np.exp(noise(rng, (runs, 2 * launches)))
    candidate = np.array([side == "candidate" for side in order(launches)])
    return apart[:, ~candidate], ratio * apart[:, candidate]


def significant(higher: Array, lower: Array) -> Array:
    """Whether the exact rank test says so, run by run."""
    critical = critical_pairs(higher.shape[1], lower.shape[1], 0.05)
    pairs: Array = (higher[:, :, None] > lower[:, None, :]).sum(axis=(1, 2))
    return np.zeros(len(pairs), dtype=bool) if critical is None else pairs >= critical


def speed_before(baseline: Array, candidate: Array) -> tuple[float, float]:
    """Shares of PASS and FAIL by the median ratio, where the candidate was faster at all."""
    reached = np.median(candidate, axis=1) >= PROMISE * np.median(baseline, axis=1)
    passed = reached & significant(candidate, baseline)
    return float(passed.mean()), float((~reached & significant(PROMISE * baseline, candidate)).mean())


def speed(baseline: Array, candidate: Array) -> tuple[float, float]:
    """Shares of PASS and FAIL by the bounds."""
    passed = significant(candidate, PROMISE * baseline)
    return float(passed.mean()), float((significant(PROMISE * baseline, candidate) & ~passed).mean())


def speed_early(baseline: Array, candidate: Array) -> tuple[float, float, float]:
    """Shares of PASS and FAIL of launches that end as soon as they decide, and launches a side in the mean."""
    launches = baseline.shape[1]
    ends = np.full(len(baseline), launches)
    verdicts = np.zeros(len(baseline))
    for look, least in look_boundaries(launches, 0.05).items():
        above = candidate[:, :look, None] > PROMISE * baseline[:, None, :look]
        pairs = above.sum(axis=(1, 2))
        new = (verdicts == 0) & ((pairs >= least) | (look * look - pairs >= least))
        verdicts[new], ends[new] = np.where(pairs >= least, 1, -1)[new], look
    return float((verdicts == 1).mean()), float((verdicts == -1).mean()), float(ends.mean())


def early_table(runs: int) -> Iterator[list[str]]:
    """Rows of launches that end early, at the promise and with a candidate that is three per cent faster."""
    for name, noise in LAUNCHES.items():
        for launches in (5, 7):
            rng = np.random.default_rng(launches)
            passed, failed, _ = speed_early(*launched(noise, rng, runs, launches, PROMISE))
            better, _, ends = speed_early(*launched(noise, rng, runs, launches, 1.03 * PROMISE))
            yield [name, str(launches), *(f"{100 * rate:.1f}" for rate in (passed, failed, better)), f"{ends:.1f}"]


def speed_table(runs: int) -> Iterator[list[str]]:
    """Rows of what happens at the promise, and with a candidate that is three per cent faster than promised."""
    for name, noise in LAUNCHES.items():
        for launches in (3, 4, 8):
            rng = np.random.default_rng(launches)
            there = launched(noise, rng, runs, launches, PROMISE)
            better = launched(noise, rng, runs, launches, 1.03 * PROMISE)
            rates = [*zip(speed_before(*there), speed(*there), strict=True)]
            rates += [(speed_before(*better)[0], speed(*better)[0])]
            yield [name, str(launches), *(f"{100 * rate:.1f}" for both in rates for rate in both)]


@click.command()
@click.option("--runs", default=4000, show_default=True, help="Simulated evaluations of each design.")
def main(runs: int) -> None:
    """Print a table of the worst rates of each kind of design, in per cent."""
    for kind, (designs, before, now) in KINDS.items():
        rows: dict[str, list[list[float]]] = {}
        for number, design in enumerate(designs()):
            drawn = design.draw(np.random.default_rng(number), runs, design.margin)
            sound = design.draw(np.random.default_rng(number), runs // 2, 0.0)
            found = [100 * share for rule in (before, now) for share in shares(design, rule, drawn)]
            found += [100 * shares(design, rule, sound)[0] for rule in (before, now)]
            rows.setdefault(design.name, []).append(found)
        click.echo(f"\n| {kind} | false PASS, before | now | false FAIL, before | now | lossless PASS, before | now |")
        click.echo("|---|--:|--:|--:|--:|--:|--:|")
        for name, rates in rows.items():
            worst, mean = np.max(rates, axis=0), np.mean(rates, axis=0)
            cells = [worst[0], worst[2], worst[1], worst[3], mean[4], mean[5]]
            click.echo(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")
    click.echo(
        "\n| lossless, a suite's scored tasks | tasks | forecast PASS | simulated | items, forecast | simulated |"
    )
    click.echo("|---|--:|--:|--:|--:|--:|")
    for name in records.names(suites.FOLDER):
        scored = [task for task in suites.load(name).tasks if task.gated and task.expected_spread is None]
        forecasts = [outcome(task.items, 4, task.margin or 0.01, task.expected_flip_rate) for task in scored]
        seen = [evaluated(np.random.default_rng(n), task, runs) for n, task in enumerate(scored)]
        together = np.prod([one.passes for one in forecasts]), np.prod([passed for passed, _ in seen])
        items = sum(one.items for one in forecasts), sum(items for _, items in seen)
        click.echo(
            f"| {name} | {len(scored)} | {together[0]:.1%} | {together[1]:.1%} | {items[0]:,.0f} | {items[1]:,.0f} |"
        )
    click.echo("\n| throughput, promised 1.1 x | launches | 1.1: PASS, before | now | FAIL, before | now ", nl=False)
    click.echo("| 1.133: PASS, before | now |\n|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in speed_table(10 * runs):
        click.echo("| " + " | ".join(row) + " |")
    click.echo("\n| ends early, promised 1.1 x | at most | 1.1: PASS | FAIL | 1.133: PASS | launches a side, mean |")
    click.echo("|---|" + "--:|" * 5)
    for row in early_table(10 * runs):
        click.echo("| " + " | ".join(row) + " |")


def evaluated(rng: np.random.Generator, task: suites.SuiteTask, runs: int) -> tuple[float, float]:
    """Of a lossless candidate's evaluations of 0/1 scores in four looks: share that pass, items asked on average."""
    seen = plan_looks(task.items, 4)
    won, lost, running = np.zeros(runs), np.zeros(runs), np.ones(runs, dtype=bool)
    passed, asked, rate = 0, 0.0, task.expected_flip_rate
    for before, count, level in zip((0, *seen), seen, boundary([n / task.items for n in seen], 0.95), strict=False):
        more = rng.multinomial(count - before, [rate / 2, rate / 2, 1 - rate], size=runs)
        won, lost, asked = won + more[:, 0], lost + more[:, 1], asked + running.mean() * (count - before)
        margin = task.margin or 0.01
        up, down = _effective(margin, won, lost, count, np.ones(runs), ndtri(level))
        passed, running = passed + int((running & up).sum()), running & ~up & ~down
    return passed / runs, asked


if __name__ == "__main__":
    main()
