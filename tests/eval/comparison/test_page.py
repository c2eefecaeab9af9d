"""The page of a comparison in a real browser: readable in both themes and on a phone, silent, escaped."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmint.eval.comparison.model import Comparison, read, side_by_side
from quantmint.eval.comparison.page import render
from quantmint.eval.report.plots import apart
from tests.checkpoints import GOOD, SMALL, WORSE
from tests.pages import visit

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("checkpoints")
    elsewhere = replace(
        WORSE, name="llama8b-on-h100", hardware="h100", device="NVIDIA H100 80GB HBM3", scheme=HOSTILE, nats=None
    )
    other = replace(GOOD, name="qwen", model="Qwen/Qwen3-8B", speeds={}, nats=None)
    made = (GOOD, SMALL, WORSE, elsewhere, other)
    return side_by_side([read(c.write(folder / c.name), folder / c.name / "gate.json") for c in made])


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 375)])
def test_page_opens_silently(browser: Any, comparison: Comparison, tmp_path: Path, theme: str, width: int) -> None:
    path = tmp_path / "compare.html"
    path.write_text(render(comparison))
    visit(browser, path.as_uri(), theme, width)
    warning = browser.find_element("css selector", ".warning")
    assert "2 different baselines" in warning.text
    assert warning.location["y"] < 900
    plots = browser.find_elements("css selector", "svg.plot")
    # Of the first baseline: size, two places, scores, perplexity; of the second: size, scores.
    assert sum(svg.is_displayed() for svg in plots) == len(plots) // 2 == 7
    hidden = (
        "return [...document.querySelectorAll('td')].filter(t => t.textContent.trim() && !t.offsetHeight)"
        ".map(t => t.textContent)"
    )
    assert browser.execute_script(hidden) == []
    reasons = browser.find_element("css selector", "details")
    assert not reasons.find_element("tag name", "li").is_displayed()
    reasons.find_element("tag name", "summary").click()
    assert reasons.find_element("tag name", "li").is_displayed()


def test_what_reports_say_is_escaped(comparison: Comparison) -> None:
    text = render(comparison)
    assert HOSTILE not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script" not in text


def test_missing_tasks_and_places_are_shown_as_such(comparison: Comparison) -> None:
    text = render(comparison)
    assert text.count("not asked") == 1  # prose, of the one on the H100
    assert "h100 (NVIDIA H100 80GB HBM3) by vllm" in text
    assert "not measured" in text  # the throughput of the other model


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    name = r"$\frac{<b>&$"
    odd = replace(GOOD, lost={}, gained={}, nats=None)
    found = read(odd.write(tmp_path), None)
    (facts,) = (r for r in GOOD.judged().accuracy if r.task == "facts")
    gate = replace(
        found.gate, accuracy=(replace(facts, task=name),), policy=replace(found.gate.policy, margins={name: 1})
    )
    text = render(side_by_side([replace(found, gate=gate)] * 2))
    assert "<b>&" not in text
    assert text.count(r"$\frac{&lt;b&gt;&amp;$") >= 4  # in the tables, and as it is in the plot of either width


PLACE = st.tuples(st.floats(0, 400), st.floats(0, 300))


def test_what_lies_apart_stays_where_it_is() -> None:
    places = [(0.0, 0.0), (40.0, 0.0), (0.0, 20.0)]
    assert apart(places, 19) == places


def test_equal_figures_stand_beside_each_other() -> None:
    first, second, third = apart([(10.0, 5.0)] * 3, 19)
    assert first == (10.0, 5.0)
    assert [round(x) for x, _ in (second, third)] == [29, 48]


@given(st.lists(PLACE, max_size=8))
def test_no_mark_covers_another(places: list[tuple[float, float]]) -> None:
    shown = apart(places, 19)
    assert [y for _, y in shown] == [y for _, y in places]
    assert all(math.dist(one, other) >= 19 - 1e-6 for one, other in combinations(shown, 2))
