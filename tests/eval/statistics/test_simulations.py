"""Error rates and power of the whole rule, over all its looks, on simulated evaluations with known truths."""

from __future__ import annotations

import numpy as np
import pytest

from quantmint.eval import power
from quantmint.eval.samples import Pairs
from quantmint.eval.statistics.sequential import decide, plan_looks
from tests.bench.endpoints import Simulation
from tests.bench.gate import KINDS, LAUNCHES, PROMISE, Design, launched, partly, shares, speed, speed_before
from tests.bench.promises import NOISE, LogitNoise, bank, continued, expected, simulations
from tests.eval.statistics.designs import asked, decisions, evaluations, tolerated

pytestmark = pytest.mark.slow
RUNS = 40_000
# 198 GPQA-diamond, 541 IFEval, 1319 GSM8K, 14042 MMLU.
SIZES = (198, 541, 1319, 2000, 14042)


@pytest.mark.parametrize("looks", [1, 4, 10])
@pytest.mark.parametrize("items", SIZES)
def test_at_a_drop_of_the_margin_neither_side_errs_above_five_percent(items: int, looks: int) -> None:
    """Margins from half a point to six; from no gains, so that a handful of losses is all that flips, to many."""
    rng = np.random.default_rng(items + looks)
    highest = np.zeros(2)
    for margin in (0.005, 0.01, 0.02, 0.06):
        for gain_rate in (0.0, 0.0005, 0.005, 0.05):
            rates = evaluations(
                rng, items=items, looks=looks, margin=margin, drop=margin, gain_rate=gain_rate, runs=RUNS
            )
            assert max(rates) <= 0.05 + tolerated(0.05, RUNS), (margin, gain_rate)
            highest = np.maximum(highest, rates)
    # The rule uses the error that it may make; a boundary that is too careful would cost good checkpoints their PASS.
    assert highest.min() >= 0.03


@pytest.mark.parametrize("looks", [1, 4])
@pytest.mark.parametrize("items", SIZES)
def test_a_lossless_candidate_passes_with_the_promised_power(items: int, looks: int) -> None:
    rng = np.random.default_rng(items * looks)
    for flip_rate in (1.0 / items, 0.01, 0.04, 0.12):
        for promised in (0.8, 0.9):
            margin = power.detectable_margin(items, flip_rate, power=promised, looks=looks)
            passed, failed = evaluations(
                rng, items=items, looks=looks, margin=margin, drop=0.0, gain_rate=flip_rate / 2, runs=RUNS
            )
            assert passed >= promised - tolerated(promised, RUNS), (flip_rate, promised)
            assert failed <= 0.001
            if items * flip_rate < 1.2:  # one flip is the worst of all rates, and reckoned with as if it were more
                continue
            # Promised, and not by asking for far more than needed: rare flips come in whole numbers.
            assert passed <= promised + 1.0 / np.sqrt(2 * np.pi * items * flip_rate) + 0.02, (flip_rate, promised)


def test_items_asked_on_average_are_what_is_expected() -> None:
    rng = np.random.default_rng(6)
    items, margin, runs = 2000, 0.02, 300
    for drop in (0.0, 2 * margin):
        expected = power.outcome(items, 4, margin, flip_rate=0.06, difference=-drop).items
        used = []
        for _ in range(runs):
            baseline, candidate = answers(rng, items, gain_rate=(0.06 - drop) / 2, drop=drop)
            used.append(decide(asked(baseline, candidate, looks=4), margin, 0.95)[-1].items)
        # Three standard errors of the mean, and what a normal's steps differ from whole flips by.
        assert np.mean(used) == pytest.approx(expected, abs=3 * np.std(used) / runs**0.5 + 0.01 * items)
        assert np.mean(used) < 0.8 * items


def test_many_at_once_are_decided_as_one_by_one() -> None:
    rng = np.random.default_rng(7)
    runs = 1500
    design = {"items": 400, "looks": 4, "margin": 0.03, "drop": 0.02, "gain_rate": 0.02}
    at_once = evaluations(rng, **design, runs=40_000)  # type: ignore[arg-type]
    one_by_one = decisions([asked(*answers(rng, 400, gain_rate=0.02, drop=0.02), looks=4) for _ in range(runs)], 0.03)
    for fast, slow in zip(at_once, one_by_one, strict=True):
        assert slow == pytest.approx(fast, abs=tolerated(max(fast, 0.01), runs))


def answers(rng: np.random.Generator, items: int, *, gain_rate: float, drop: float) -> tuple[np.ndarray, np.ndarray]:
    kind = rng.choice([1, -1, 0], size=items, p=[gain_rate, gain_rate + drop, 1 - 2 * gain_rate - drop])
    baseline = np.where(kind == 0, rng.random(items) < 0.7, kind < 0).astype(float)
    return baseline, baseline + kind


def documents(rng: np.random.Generator, count: int, looks: int, change: float, passage: int = 1) -> Pairs:
    """Documents of very different lengths; each has its own change in nats per word about the true one.

    The change is larger in longer documents' favour for nobody: it is independent of the length, so the true change of
    the weighted mean is `change`. Documents of one passage share half of its deviation.
    """
    words = np.ceil(rng.lognormal(7.0, 0.9, count))
    clusters = np.arange(count) // passage
    shared = rng.normal(0.0, 0.02, clusters.max() + 1)[clusters] * (passage > 1)
    own = change + shared + rng.standard_t(5, count) * 0.02
    baseline = -words * rng.normal(2.0, 0.2, count)
    candidate = baseline + words * own
    return asked(baseline, candidate, looks=looks, clusters=clusters, weights=words, kind="perplexity")


@pytest.mark.parametrize(("count", "looks", "passage"), [(62, 1, 1), (300, 4, 1), (400, 4, 2)])
def test_perplexity_keeps_the_error_rates(count: int, looks: int, passage: int) -> None:
    """62 documents are wikitext's. Lengths spread over two orders of magnitude, changes have heavy tails."""
    rng = np.random.default_rng(count)
    runs, margin = 1500, 0.0198
    rates = decisions([documents(rng, count, looks, -margin, passage) for _ in range(runs)], margin)
    assert max(rates) <= 0.05 + tolerated(0.05, runs)
    # A design at its detectable margin: 5/3 is the variance of t with 5 degrees, the lengths' spread costs the rest.
    deviation = np.sqrt((0.02**2 * 5 / 3 + 0.02**2 * (passage > 1)) * np.exp(0.9**2) * (1 + (passage > 1) * 0.5))
    reachable = power.detectable_mean(count, float(deviation), looks=len(plan_looks(count // passage, looks)))
    passed, _ = decisions([documents(rng, count, looks, 0.0, passage) for _ in range(400)], reachable)
    assert passed >= 0.8 - tolerated(0.8, 400)


@pytest.mark.parametrize("looks", [1, 4])
def test_graded_scores_of_a_lossless_candidate_pass(looks: int) -> None:
    """Scores such as F1: most items unchanged, a few moved by anything up to half a point."""
    moved = partly(lambda rng, shape: rng.uniform(0, 0.5, shape), 0.25, 0.05)
    design = Design("F1", 600, looks, 0.02, moved(600))
    drawn = design.draw(np.random.default_rng(9), 1500, 0.0)
    assert shares(design, KINDS["graded scores"][2], drawn)[0] > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_no_design_of_the_simulations_errs_above_five_percent(kind: str) -> None:
    """`make gate-simulations` prints the same with more runs, and beside it what the textbook's bounds err."""
    designs, textbook, rule = KINDS[kind]
    runs, worst, without = 1500, 0.0, 0.0
    for number, design in enumerate(designs()):
        drawn = design.draw(np.random.default_rng(number), runs, design.margin)
        rates = shares(design, rule, drawn)
        assert max(rates) <= 0.05 + tolerated(0.05, runs), (design.name, design.margin, design.looks)
        worst, without = max(worst, *rates), max(without, *shares(design, textbook, drawn))
    assert without > 0.15
    assert worst > 0.03


@pytest.mark.parametrize("launches", [4, 8])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_speed_that_is_exactly_promised_is_published_at_most_five_times_in_a_hundred(
    name: str, launches: int
) -> None:
    runs = 20_000
    drawn = launched(LAUNCHES[name], np.random.default_rng(launches), runs, launches, PROMISE)
    assert max(speed(*drawn)) <= 0.05 + tolerated(0.05, runs)
    assert speed_before(*drawn)[0] > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_whole_arrays_are_judged_as_one_by_one(kind: str) -> None:
    designs, _, rule = KINDS[kind]
    for design in list(designs())[::7]:
        drawn = design.draw(np.random.default_rng(3), 12, design.margin)
        pairs = [one_by_one(kind, design, [part[run] for part in drawn]) for run in range(12)]
        assert decisions(pairs, design.margin) == pytest.approx(shares(design, rule, drawn)), design.name


def _scores(change: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    baseline = np.maximum(-change, 0)
    return baseline, baseline + change


def one_by_one(kind: str, design: Design, drawn: list[np.ndarray]) -> Pairs:
    if kind == "perplexities":
        return asked(np.zeros(design.units), drawn[0], looks=design.looks, weights=drawn[1], kind="perplexity")
    if kind == "graded scores":
        return asked(*_scores(drawn[0]), looks=design.looks)
    assert design.sizes is not None
    sizes, drawn = design.sizes.astype(int), [part.astype(int) for part in drawn]
    change = np.concatenate(
        [np.repeat([1.0, -1.0, 0.0], [w, lo, n - w - lo]) for w, lo, n in zip(*drawn, sizes, strict=True)]
    )
    return asked(*_scores(change), looks=design.looks, clusters=np.repeat(np.arange(len(sizes)), sizes))


@pytest.mark.parametrize("simulation", list(simulations()), ids=lambda row: f"{row.task}: {row.design}")
def test_a_promise_at_its_limit_is_decided_wrongly_five_times_in_a_hundred_at_most(simulation: Simulation) -> None:
    """KL, the layout and acceptance; a sound one never fails, and one that is twice as far never passes."""
    runs = 1000
    rng = np.random.default_rng(7)
    assert max(simulation.judge(rng, runs, simulation.margin)) <= 0.05 + tolerated(0.05, runs)
    assert simulation.judge(rng, runs, 0.0)[1] <= 0.01
    assert simulation.judge(rng, runs, 2 * simulation.margin)[0] <= 0.01


@pytest.mark.parametrize("noise", NOISE.values(), ids=list(NOISE))
def test_what_drawn_tokens_amount_to_is_the_divergence_in_the_mean(noise: LogitNoise) -> None:
    """Over all tokens of a vocabulary, by the baseline's probabilities: no draw, so to the digit."""
    positions = bank(noise, levels=2, each=5)
    probabilities = np.diff(positions.cumulated, axis=1, prepend=0.0)
    assert (probabilities * positions.values).sum(axis=1) == pytest.approx(positions.exact, rel=1e-9)


def test_drafts_of_a_weakened_candidate_lose_what_they_should() -> None:
    """The expected drafts and tokens of an answer against ones that are drawn, step by step."""
    chance = np.full((4000, 20), 0.7)
    drafts, accepted = continued(np.random.default_rng(2), chance)
    assert np.array([drafts.mean(), (drafts + accepted).mean()]) == pytest.approx(
        [part[0] for part in expected(chance[0])], rel=2e-3
    )
