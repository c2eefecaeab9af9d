"""Changes in the units that people read, with worse and better where they belong."""

from __future__ import annotations

import math

import pytest

from eval.accuracy import compare, margin_in_units
from eval.comparison import words
from eval.report.numbers import signed
from eval.samples import pair
from tests.checkpoints import answers, perplexity


def test_a_score_is_in_points_and_a_perplexity_in_per_cent_of_itself() -> None:
    assert words.change("binary", -0.015) == -1.5
    assert words.change("perplexity", math.log(10.0) - math.log(10.2)) == pytest.approx(2.0)


@pytest.mark.parametrize(("kind", "margin", "shown"), [("graded", 0.01, -1.0), ("perplexity", 0.02, 2.0)])
def test_a_margin_stands_where_its_loss_would(kind: str, margin: float, shown: float) -> None:
    assert words.margin(kind, margin) == pytest.approx(shown)
    assert words.change(kind, -margin_in_units(kind, margin)) == words.margin(kind, margin)


def test_results_are_told_with_their_units_and_the_lower_end_first() -> None:
    worse = compare(pair(*perplexity("prose", 0.05)))
    assert words.difference(worse).startswith("+5.")
    assert words.difference(worse).endswith(" %")
    low, high = words.interval(worse.kind, worse.interval_low, worse.interval_high).split(" … ")
    assert float(low) < 100 * (worse.candidate / worse.baseline - 1) < float(high)
    lost = compare(pair(answers("t", [1.0] * 200), answers("t", [0.0] + [1.0] * 199)))
    assert words.difference(lost) == f"{signed(-0.5)} pt"
    assert (words.score("binary", 0.995), words.score("perplexity", 14.6951)) == ("99.50 %", "14.695")
