"""How often KL, the layout and acceptance err as promises, in simulated evaluations whose truth is known.

::

    python -m tests.bench.promises --runs 4000    # four minutes on one core; a table of docs/notes/gate-simulations.md

The endpoints' own `measure`, `compare` and `judge` read what is drawn: texts of the default suite's canary, whose
positions are clustered by text and have heavy tails. A candidate at the limit (either verdict is an error), a sound one
(FAIL is a false alarm, PASS the power), and one that is twice as far (FAIL is right).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import click
import numpy as np
from scipy.optimize import brentq
from scipy.special import betaincinv

from quantmint.eval.acceptance import AcceptancePairs, AcceptancePolicy, PromptDrafts
from quantmint.eval.acceptance import compare as compare_drafts
from quantmint.eval.acceptance import judge as judge_drafts
from quantmint.eval.kl import Divergences, KlPolicy, TextDivergence, measure, sampled_divergence
from quantmint.eval.kl import judge as judge_kl
from quantmint.eval.layout import LayoutMeasurement, LayoutPolicy
from quantmint.eval.layout import compare as compare_layouts
from quantmint.eval.layout import judge as judge_layouts
from quantmint.eval.verdict import Verdict
from tests.bench.endpoints import Rates, Simulation, table
from tests.bench.gate import Array

TEXTS, PLACES, ANSWER = 57, 64, 32
"""Texts of the default suite's canary, compared positions of each, and tokens of a greedy answer."""
LIMIT, APART, LOSS = 0.05, 0.02, 0.02
"""Nats of `gate.kl.max` and `gate.layout.max`, and the relative loss of `gate.acceptance.margin`."""
SOUND_KL, SOUND_LAYOUT = 0.5, 0.1
"""Shares of these limits that a sound candidate and a sound layout have."""
LISTED, DRAFT, CONTINUED = 20, 3, 64
_BATCH = 250
_NAMES = [f"text {number}" for number in range(TEXTS)]
Means = Callable[[np.random.Generator, tuple[int, int]], Array]
"""Draws the mean divergences of texts, shape (runs, texts), whose true mean is 1."""
LogitNoise = Callable[[np.random.Generator, int], Array]
"""Draws by how much the logits of so many tokens differ, shape (tokens,)."""


def _shares(verdicts: Iterable[Verdict]) -> Rates:
    seen = list(verdicts)
    return seen.count(Verdict.PASS) / len(seen), seen.count(Verdict.FAIL) / len(seen)


def _divergences(means: Array, positions: int = PLACES) -> Divergences:
    rows = zip(_NAMES, (positions * means).tolist(), strict=True)
    return Divergences(True, tuple(TextDivergence(name, positions, total) for name, total in rows))


# KL over the full vocabulary.


def lognormal(between: float, within: float = 0.0) -> Means:
    """Texts that are `between` apart, the deviation of the logarithm, and their positions `within`."""

    def drawn(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
        texts = rng.lognormal(-(between**2) / 2, between, shape)
        if within:
            texts *= rng.lognormal(-(within**2) / 2, within, (*shape, PLACES)).mean(axis=2)
        return texts

    return drawn


def broken(share: float, times: float) -> Means:
    """A share of the texts is so many times as far away as the others."""
    ordinary = 1 / (1 + share * (times - 1))

    def drawn(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
        return ordinary * np.where(rng.random(shape) < share, times, 1.0) * rng.lognormal(-0.045, 0.3, shape)

    return drawn


TEXT_MEANS: dict[str, Means] = {
    "lognormal between texts, sigma 0.3": lognormal(0.3),
    "lognormal between texts, sigma 1": lognormal(1.0),
    "lognormal between texts, sigma 1.5": lognormal(1.5),
    "lognormal between texts, sigma 0.5, and positions, sigma 2": lognormal(0.5, 2.0),
    "gamma between texts, shape 0.25": lambda rng, shape: 4 * rng.gamma(0.25, 1.0, shape),
    "a tenth of the texts ten times as far": broken(0.1, 10),
}


def _exact(means: Means) -> Callable[[np.random.Generator, int, float], Rates]:
    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        drawn = (means(rng, (1, TEXTS))[0] * (loss or SOUND_KL * LIMIT) for _ in range(runs))
        return _shares(judge_kl(measure(_divergences(texts)), KlPolicy(LIMIT))[0] for texts in drawn)

    return judge


# KL from the likeliest tokens and a drawn one.


@dataclass(frozen=True, slots=True)
class Bank:
    """Positions of two models over a vocabulary, in levels of how far they are apart.

    `values` and `cumulated`, shape (positions, tokens), are what each drawn token amounts to and the baseline's
    probabilities of the tokens so far; `exact` are the divergences in nats, shape (positions,).
    """

    values: Array
    cumulated: Array
    exact: Array
    levels: int

    def means(self, rng: np.random.Generator, runs: int) -> Array:
        """Draw the texts' means, shape (runs, texts): a level of each text, and a position and a token of it."""
        level = rng.integers(self.levels, size=(runs, TEXTS, 1))
        each = len(self.exact) // self.levels
        position = level * each + rng.integers(each, size=(runs, TEXTS, PLACES))
        below = self.cumulated + np.arange(len(self.exact))[:, None]
        token = np.searchsorted(below.ravel(), (position + rng.random(position.shape)).ravel(), side="right")
        last = position.ravel() * below.shape[1] + below.shape[1] - 1
        drawn: Array = self.values.ravel()[np.minimum(token, last)].reshape(position.shape).mean(axis=2)
        return drawn


@cache
def bank(noise: LogitNoise, levels: int = 12, each: int = 40) -> Bank:
    """Positions of Zipf's law whose logits differ by `noise`, from a quarter to four times as much by level."""
    rng, tokens = np.random.default_rng(1), 1000
    values, probabilities, exact = [], [], []
    for number in range(levels * each):
        scale = 0.3 * 4.0 ** (2 * (number // each) / (levels - 1) - 1)
        logits = -rng.uniform(0.8, 2.0) * np.log(np.arange(1, tokens + 1)) + rng.normal(0, 0.5, tokens)
        sides = [logits, logits + scale * noise(rng, tokens)]
        first, second = (side - np.log(np.exp(side).sum()) for side in sides)
        listed = [(np.argsort(-side)[:LISTED].tolist(), np.sort(-side)[:LISTED] * -1) for side in (first, second)]
        shared = np.intersect1d(listed[0][0], listed[1][0])
        inside = sampled_divergence(*listed, (int(shared[0]), 0.0, 0.0))
        outside = sampled_divergence(*listed, (-1, 0.0, 0.0))
        amounts = np.where(np.isin(np.arange(tokens), shared), inside, outside + first - second)
        values.append(amounts)
        probabilities.append(np.exp(first))
        exact.append(float(np.exp(first) @ (first - second)))
    return Bank(np.array(values), np.cumsum(probabilities, axis=1), np.array(exact), levels)


NOISE: dict[str, LogitNoise] = {
    "normal": lambda rng, tokens: rng.normal(size=tokens),
    "heavy tails (t, 3 degrees)": lambda rng, tokens: rng.standard_t(3, tokens).clip(-12, 12),
    "one token in twenty is lost": lambda rng, tokens: (
        rng.normal(0, 0.3, tokens) - 6 * (rng.random(tokens) < 0.05) * (np.arange(tokens) > LISTED)
    ),
}


def _sampled(noise: LogitNoise) -> Callable[[np.random.Generator, int, float], Rates]:
    """The limit is placed at the true divergence, at twice that (sound) and at half of it."""

    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        positions = bank(noise)
        limit = KlPolicy(float(positions.exact.mean()) * LIMIT / (loss or SOUND_KL * LIMIT))
        batches = (positions.means(rng, min(_BATCH, runs)) for _ in range(max(1, runs // _BATCH)))
        return _shares(judge_kl(measure(_divergences(texts)), limit)[0] for drawn in batches for texts in drawn)

    return judge


# The layout that serves.


@dataclass(frozen=True, slots=True)
class Layouts:
    """`floor` nats of the single accelerator's own, texts `between` apart, and what the drawn tokens add (`noise`).

    `shared`: a text's floor is wide on both sides alike. `both`: answers lose as much as reading does.
    """

    floor: float
    between: float
    noise: float = 0.0
    shared: bool = False
    both: bool = False

    def draw(self, rng: np.random.Generator, loss: float) -> LayoutMeasurement:
        """Reading that loses `loss` nats beyond the floor, and answers, most of which are equal."""
        spread = -(self.between**2) / 2, self.between, TEXTS
        first, second = rng.lognormal(*spread), rng.lognormal(*spread)
        read = self.floor * (second if self.shared else first) + loss * rng.lognormal(*spread)
        noisy = [row + self.noise * rng.normal(size=TEXTS) for row in (read, self.floor * second)]
        unequal = [rng.exponential(1 / 0.3, TEXTS) * (rng.random(TEXTS) < 0.3) for _ in range(3)]
        lost = loss if self.both else SOUND_LAYOUT * APART
        answers = [self.floor * unequal[0] + lost * unequal[1], self.floor * unequal[2]]
        return LayoutMeasurement("TP 8", *map(_divergences, noisy), *(_divergences(means, ANSWER) for means in answers))


LAYOUTS = {
    "no floor, lognormal between texts, sigma 1": Layouts(0.0, 1.0),
    "a floor of 0.002, sigma 0.5, noise of 0.005": Layouts(0.002, 0.5, 0.005),
    "a floor of 0.02, sigma 1": Layouts(0.02, 1.0),
    "a floor of 0.02, sigma 1, of the same texts": Layouts(0.02, 1.0, shared=True),
    "a floor of 0.02, sigma 0.5, noise of 0.03": Layouts(0.02, 0.5, 0.03),
    "a floor of 0.002, sigma 0.5, reading and answers": Layouts(0.002, 0.5, both=True),
}


def _layouts(design: Layouts) -> Callable[[np.random.Generator, int, float], Rates]:
    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        drawn = (design.draw(rng, loss or SOUND_LAYOUT * APART) for _ in range(runs))
        return _shares(judge_layouts(compare_layouts(one), LayoutPolicy(APART))[0] for one in drawn)

    return judge


# Speculative decoding.


@dataclass(frozen=True, slots=True)
class Drafts:
    """Prompts whose chance that a proposed token is accepted spreads by a beta distribution.

    A `hit` share of the prompts loses a share of that chance; the `same` share of the others has equal answers.
    """

    chances: tuple[float, float]
    hit: float = 1.0
    same: float = 0.0

    def weakened(self, loss: float) -> float:
        """The factor on the chance of a prompt that is hit with which the true ratio of lengths is 1 - `loss`."""
        chance = betaincinv(*self.chances, (np.arange(2000) + 0.5) / 2000)
        before = expected(chance)

        def beyond(factor: float) -> float:
            drafts, tokens = (
                (1 - self.hit) * old.mean() + self.hit * new.mean()
                for old, new in zip(before, expected(factor * chance), strict=True)
            )
            return float(tokens / drafts / (before[1].mean() / before[0].mean()) - (1 - loss))

        return float(brentq(beyond, 0.0, 1.0)) if loss else 1.0

    def draw(self, rng: np.random.Generator, runs: int, factor: float) -> Iterator[AcceptancePairs]:
        """Drafts of both sides of each run."""
        chance = rng.beta(*self.chances, (runs, TEXTS))
        hit = rng.random(chance.shape) < self.hit
        before, after = continued(rng, chance), continued(rng, np.where(hit, factor * chance, chance))
        equal = ~hit & (rng.random(chance.shape) < self.same)
        after = tuple(np.where(equal, *both) for both in zip(before, after, strict=True))  # type: ignore[assignment]
        for run in range(runs):
            sides = (
                tuple(PromptDrafts(name, d, DRAFT * d, a) for name, d, a in zip(_NAMES, *rows, strict=True))
                for rows in ([part[run].tolist() for part in side] for side in (before, after))
            )
            yield AcceptancePairs("draft", DRAFT, *sides)


def expected(chance: Array) -> tuple[Array, Array]:
    """Expected drafts and tokens of an answer, for each chance that a proposed token is accepted."""
    accepted = [chance**n * ((1 - chance) if n < DRAFT else 1.0) for n in range(DRAFT + 1)]
    drafts, tokens = ([np.zeros_like(chance)] * (CONTINUED + DRAFT + 1) for _ in range(2))
    for start in reversed(range(CONTINUED)):
        drafts[start] = 1 + sum(share * drafts[start + 1 + n] for n, share in enumerate(accepted))
        tokens[start] = sum(share * (1 + n + tokens[start + 1 + n]) for n, share in enumerate(accepted))
    return drafts[0], tokens[0]


def continued(rng: np.random.Generator, chance: Array) -> tuple[Array, Array]:
    """Drafts and accepted tokens of an answer for each chance, of the shape of `chance`."""
    drafts, accepted = np.zeros(chance.shape, dtype=int), np.zeros(chance.shape, dtype=int)
    logarithm = np.log(np.clip(chance, 1e-12, 1 - 1e-12))
    while (asking := drafts + accepted < CONTINUED).any():
        length = np.minimum(np.log(1 - rng.random(chance.shape)) // logarithm, DRAFT).astype(int)
        drafts, accepted = drafts + asking, accepted + asking * length
    return drafts, accepted


DRAFTS = {
    "a predictor, 70 % (beta 14, 6)": Drafts((14.0, 6.0)),
    "n-grams, all or nothing (beta 0.5, 0.5)": Drafts((0.5, 0.5)),
    "n-grams, few repeat (beta 0.3, 1)": Drafts((0.3, 1.0)),
    "a tenth of the prompts loses, most others are equal": Drafts((14.0, 6.0), hit=0.1, same=0.8),
}


def _drafts(design: Drafts) -> Callable[[np.random.Generator, int, float], Rates]:
    def judge(rng: np.random.Generator, runs: int, loss: float) -> Rates:
        factor = design.weakened(loss)
        drawn = (pairs for _ in range(max(1, runs // _BATCH)) for pairs in design.draw(rng, min(_BATCH, runs), factor))
        return _shares(judge_drafts(compare_drafts(pairs), AcceptancePolicy(LOSS))[0] for pairs in drawn)

    return judge


def simulations() -> Iterator[Simulation]:
    """All designs of the three promises."""
    for name, means in TEXT_MEANS.items():
        yield Simulation("KL, exact", name, LIMIT, _exact(means))
    for name, noise in NOISE.items():
        yield Simulation("KL, a drawn token", f"logits: {name}", LIMIT, _sampled(noise))
    for name, layouts in LAYOUTS.items():
        yield Simulation("layout", name, APART, _layouts(layouts))
    for name, drafts in DRAFTS.items():
        yield Simulation("acceptance", name, LOSS, _drafts(drafts))


@click.command()
@click.option("--runs", default=4000, show_default=True, help="Simulated evaluations of each design.")
def main(runs: int) -> None:
    """Print a table of the rates, in per cent."""
    table("promise", simulations(), runs)


if __name__ == "__main__":
    main()
