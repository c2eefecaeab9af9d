"""The page in a real browser: readable in both themes and on a phone, silent on the network and the console."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.gate import Policy
from eval.measurements import Measurements, Structure
from eval.report import page
from eval.report.model import Report
from eval.verdict import Verdict
from tests.pages import contrast, luminance, media

MakeReport = Callable[[Measurements, Policy], Report]


@pytest.fixture
def report(measurements: Measurements, policy: Policy, make_report: MakeReport) -> Report:
    return make_report(measurements, policy)


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 375])
def test_page_opens_silently_in_chromium(browser: Any, report: Report, tmp_path: Path, theme: str, width: int) -> None:
    url = page.write(tmp_path, report).as_uri()
    media(browser, theme, width)
    browser.get_log("performance")
    browser.get(url)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {u for u in asked if not u.startswith("data:")} == {url}
    # The verdict is on the first screen; nothing runs off the side; no id appears twice.
    stamp = browser.find_element("css selector", ".stamp")
    assert stamp.text == "PASS"
    assert stamp.is_displayed()
    assert stamp.location["y"] + stamp.size["height"] < 900
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    doubled = "return [...document.querySelectorAll('[id]')].map(e => e.id).filter((x, i, a) => a.indexOf(x) != i)"
    assert browser.execute_script(doubled) == []
    shown = browser.find_elements("css selector", "svg.plot")
    assert sum(svg.is_displayed() for svg in shown) == len(shown) // 2 == 5
    # Text in plots follows the theme and stays legible.
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == (theme == "dark")
    labels = [t for svg in shown if svg.is_displayed() for t in svg.find_elements("css selector", "text")]
    assert labels
    assert all(contrast(label.value_of_css_property("fill"), paper) >= 4.5 for label in labels)
    assert all(contrast(e.value_of_css_property("color"), paper) >= 4.5
               for e in browser.find_elements("css selector", ".word, .say, .stamp, .over"))  # fmt: skip
    heights = browser.execute_script(
        "return [...document.querySelectorAll('svg.plot text')]"
        ".map(t => t.getBoundingClientRect().height).filter(h => h)"
    )
    assert min(heights) >= 10


@pytest.mark.browser
def test_details_open_without_script(browser: Any, report: Report, tmp_path: Path) -> None:
    browser.get(page.write(tmp_path, report).as_uri())
    recipe = next(d for d in browser.find_elements("css selector", "details") if "Recipe" in d.text)
    assert not recipe.find_element("tag name", "pre").is_displayed()
    recipe.find_element("tag name", "summary").click()
    assert "<script>alert(1)</script>" in recipe.find_element("tag name", "pre").text


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def test_page_holds_no_script_and_points_nowhere(report: Report) -> None:
    parser = _Tags()
    parser.feed(page.render(report))
    assert "svg" in parser.tags
    assert "script" not in parser.tags
    assert all(reference.startswith(("#", "data:")) for reference in parser.references)


def test_the_same_report_gives_the_same_bytes(report: Report) -> None:
    assert page.render(report) == page.render(report)


def test_json_beside_the_page_is_what_was_rendered(report: Report, tmp_path: Path) -> None:
    path = page.write(tmp_path, report)
    again: Report = json.loads((tmp_path / "report.json").read_text())
    assert page.render(again) == path.read_text()


def test_reasons_are_in_words_worst_first(measurements: Measurements, policy: Policy, make_report: MakeReport) -> None:
    broken = dataclasses.replace(
        measurements, structure=Structure(Verdict.FAIL, ("2 tensors hold NaN",)), faults=("The bench broke",)
    )
    text = page.render(make_report(broken, policy))
    assert '<p class="stamp" role="status">INVALID</p>' in text
    assert text.index("The bench broke.") < text.index("2 tensors hold NaN.") < text.index("checks passed")


def test_page_without_accuracy_throughput_or_layers(measurements: Measurements, make_report: MakeReport) -> None:
    bare = dataclasses.replace(measurements, samples={}, cells={})
    report = make_report(bare, Policy(margins={}))
    report["layers"] = []
    text = page.render(report)
    assert 'id="size"' in text
    assert not any(f'id="{name}"' in text for name in ("accuracy", "speed", "layers"))
