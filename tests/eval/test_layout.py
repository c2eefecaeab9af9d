"""The layout that serves beside a single accelerator: when the gate takes them for the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quantmint.eval import record
from quantmint.eval.gate import Policy, judge
from quantmint.eval.kl import Divergences, TextDivergence
from quantmint.eval.layout import LayoutMeasurement, LayoutPolicy
from quantmint.eval.measurements import Measurements
from quantmint.eval.verdict import Verdict


def totals(mean: float, spread: float = 0.1, count: int = 20) -> Divergences:
    """Texts of 50 positions whose means lie about ``mean``."""
    values = [50 * mean * (1 + spread * (-1) ** number) for number in range(count)]
    return Divergences(False, tuple(TextDivergence(f"text {n}", 50, value) for n, value in enumerate(values)))


def measured(reading: float, answers: float, floor: float = 0.0, spread: float = 0.1) -> LayoutMeasurement:
    sides = (totals(reading, spread), totals(floor), totals(answers, spread), totals(floor))
    return LayoutMeasurement("TP 8", *sides)


def of_other_lengths() -> LayoutMeasurement:
    """Texts whose floor was measured at a tenth of the positions, and a text that the floor does not have."""
    whole = measured(0.04, 0.04, floor=0.03)
    short = [TextDivergence(text.text, 5, (text.total or 0) / 10) for text in whole.reading_floor.texts]
    further = (*whole.reading.texts, TextDivergence("further", 50, 2.0))
    return dataclasses.replace(
        whole, reading=Divergences(False, further), reading_floor=Divergences(False, tuple(short))
    )


SILENT = Divergences(False, (TextDivergence("text 0", 50, None), *totals(0.001).texts[1:]))


@pytest.mark.parametrize(
    ("layout", "verdict", "reason"),
    [
        (measured(0.001, 0.002), Verdict.PASS, "TP 8 beside TP 1 of the same weights: reading 0.001 nats apart"),
        (measured(0.4, 0.001), Verdict.FAIL, "reading 0.4 nats apart"),
        (measured(0.001, 0.2), Verdict.FAIL, "greedy answers 0.2 nats apart"),
        (measured(0.019, 0.001, spread=2.0), Verdict.INCONCLUSIVE, "beyond the floor of 0, at most 0.02"),
        (measured(0.04, 0.04, floor=0.03), Verdict.PASS, "0.01 (0.0096 to 0.0104) beyond the floor of 0.03"),
        (measured(0.049, 0.049, floor=0.03), Verdict.PASS, "beyond the floor of 0.03"),
        (measured(0.051, 0.03, floor=0.03), Verdict.FAIL, "0.021 (0.0202 to 0.0218) beyond the floor of 0.03"),
        (measured(0.05, 0.03, floor=0.03), Verdict.INCONCLUSIVE, "beyond the floor of 0.03"),
        (of_other_lengths(), Verdict.PASS, "reading 0.04 nats apart, 0.01"),
        (dataclasses.replace(measured(0.0, 0.0), reading_floor=SILENT), Verdict.INCONCLUSIVE, "no finite answer"),
        (dataclasses.replace(measured(0.0, 0.0), answers=SILENT), Verdict.FAIL, "no finite answer to 1 of the texts"),
        (None, Verdict.INVALID, "The layout decides, but was not compared."),
    ],
    ids=[
        "same",
        "reading",
        "answers",
        "between",
        "floor",
        "within the floor and the promise",
        "beyond the floor",
        "at the limit",
        "answers of other lengths",
        "NaN of the floor",
        "NaN",
        "unmeasured",
    ],
)
def test_both_figures_are_held_against_the_floor(
    measurements: Measurements, policy: Policy, layout: LayoutMeasurement | None, verdict: Verdict, reason: str
) -> None:
    promised = dataclasses.replace(policy, layout=LayoutPolicy(0.02))
    report = judge(dataclasses.replace(measurements, layout=layout), promised)
    assert report.verdict is verdict
    assert reason in " ".join(finding.reason for finding in report.findings)


def test_the_record_judges_again(measurements: Measurements, policy: Policy, tmp_path: Path) -> None:
    promised = dataclasses.replace(policy, layout=LayoutPolicy(0.02))
    changed = dataclasses.replace(measurements, layout=measured(0.4, 0.001))
    report = judge(changed, promised)
    path = record.write(tmp_path, changed, report)
    assert record.read(path) == (changed, report)
    assert record.rejudge(path) == report
    assert "layout" not in judge(measurements, policy).to_json()
