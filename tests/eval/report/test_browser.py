"""The page in a real browser: readable in both themes and on a phone, silent on the network and the console."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from quantmint.eval.report import page
from tests.eval.report import made
from tests.pages import contrast, luminance, media


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The address of a variant's page, which is written once."""
    folder = tmp_path_factory.mktemp("reports")
    return cache(lambda name: page.write(folder / name, made.VARIANTS[name]()).as_uri())


def requests(browser: Any) -> set[str]:
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    return {url for url in asked if not url.startswith("data:")}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("variant", "theme", "width"),
    [("good", "light", 360), ("good", "dark", 1100)]
    + [pytest.param(name, "dark", 360, marks=pytest.mark.slow) for name in made.VARIANTS]
    + [pytest.param("elsewhere", "light", 1100, marks=pytest.mark.slow)],
)
def test_page_opens_silently_in_chromium(
    browser: Any, urls: Callable[[str], str], theme: str, width: int, variant: str
) -> None:
    media(browser, theme, width)
    browser.get_log("performance")
    browser.get(urls(variant))
    assert browser.get_log("browser") == []
    assert requests(browser) == {urls(variant)}
    # The verdict is on the first screen; nothing runs off the side; no id appears twice.
    stamp = browser.find_element("css selector", ".stamp")
    assert stamp.is_displayed()
    assert stamp.location["y"] + stamp.size["height"] < 400
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    doubled = "return [...document.querySelectorAll('[id]')].map(e => e.id).filter((x, i, a) => a.indexOf(x) != i)"
    assert browser.execute_script(doubled) == []
    # On a phone a row of scores is a card: nothing of it lies behind a scroll.
    cards = "[...document.querySelectorAll('#accuracy table.cards')]"
    assert not any(browser.execute_script(f"return {cards}.map(t => t.scrollWidth > t.parentNode.clientWidth)"))
    # Each plot is there once, as large as it should be, with its drawing in it.
    shown = [svg for svg in browser.find_elements("css selector", "svg.plot") if svg.is_displayed()]
    assert len(shown) == len(browser.find_elements("css selector", "svg.plot")) / 2
    assert all(svg.rect["width"] > 300 and svg.rect["height"] > 60 for svg in shown)
    drawn = "return arguments[0].querySelectorAll('path, use').length"
    assert all(browser.execute_script(drawn, svg) >= 3 for svg in shown)
    # Text follows the theme and stays legible, in plots as elsewhere.
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == (theme == "dark")
    fills = "return [...new Set([...document.querySelectorAll('svg.plot text')].map(t => getComputedStyle(t).fill))]"
    colours = "return [...new Set([...document.querySelectorAll('p, small, .word, td, th, dt, dd, summary')].map(e => getComputedStyle(e).color))]"  # noqa: E501
    found = browser.execute_script(fills) + browser.execute_script(colours)
    assert found
    assert all(contrast(colour, paper) >= 4.5 for colour in found)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('svg.plot text')]"
        ".map(t => Math.max(t.getBoundingClientRect().height, t.getBoundingClientRect().width)).filter(h => h)"
    )
    assert min(heights) >= 6


@pytest.mark.browser
def test_all_plots_of_a_whole_run(browser: Any, urls: Callable[[str], str]) -> None:
    media(browser, "light", 1100)
    browser.get(urls("good"))
    shown = [svg for svg in browser.find_elements("css selector", "svg.plot") if svg.is_displayed()]
    labels = [svg.get_attribute("aria-label") for svg in shown]
    expected = ["change in accuracy", "change in perplexity", "Bounds at each look", "Flips", "output tokens/s against",
                "Change in throughput", "Latency in ms", "SQNR by layer", "KV cache scales", "Stages"]  # fmt: skip
    assert [label[: len(start)] for label, start in zip(labels, expected, strict=True)] == expected


@pytest.mark.browser
def test_text_of_a_plot_stays_inside_it(browser: Any, urls: Callable[[str], str]) -> None:
    """What is cut off at the edge of its drawing would be lost on paper, and run off the side on a phone."""
    outside = """
      return [...document.querySelectorAll('svg.plot')].filter(s => s.getBoundingClientRect().width).flatMap(s => {
        const box = s.getBoundingClientRect();
        return [...s.querySelectorAll('text')].filter(t => {
          const r = t.getBoundingClientRect();
          return r.left < box.left - 5 || r.right > box.right + 3 || r.top < box.top - 3 || r.bottom > box.bottom + 3;
        }).map(t => s.getAttribute('aria-label').slice(0, 30) + ': ' + t.textContent.trim());
      });"""
    for width in (1100, 360):
        media(browser, "light", width)
        browser.get(urls("good"))
        assert browser.execute_script(outside) == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1100, 360])
def test_flips_open_by_click_without_script(browser: Any, urls: Callable[[str], str], width: int) -> None:
    media(browser, "light", width)
    browser.get(urls("good"))
    task = browser.find_element("css selector", "#flips details.task")
    assert not task.find_element("css selector", ".flip").is_displayed()
    task.find_element("tag name", "summary").click()
    flip = task.find_element("css selector", ".flip.fail")
    assert not flip.find_element("tag name", "dl").is_displayed()
    flip.find_element("tag name", "summary").click()
    assert "A baker bakes" in flip.find_element("tag name", "dl").text
    assert "</pre><script>alert(1)</script> & <b>bold</b>" in flip.text  # shown, not run
    fold = browser.find_element("css selector", "#flips .fold")
    parents = "let e = arguments[0]; while ((e = e.parentElement.closest('details'))) e.open = true"
    browser.execute_script(parents, fold)
    whole = fold.find_element("css selector", "pre")
    assert not whole.is_displayed()
    fold.find_element("tag name", "summary").click()
    assert whole.is_displayed()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.get_log("browser") == []


@pytest.mark.slow
@pytest.mark.browser
def test_every_fold_opens_and_fits_a_phone(browser: Any, urls: Callable[[str], str]) -> None:
    for name in made.VARIANTS:
        media(browser, "dark", 360)
        browser.get(urls(name))
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360, name
        assert browser.get_log("browser") == []


@pytest.mark.browser
def test_paper_is_white_whatever_the_screen(browser: Any, urls: Callable[[str], str]) -> None:
    media(browser, "dark", 800)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.get(urls("good"))
    try:
        styles = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
        ink, paper = browser.execute_script(styles)
        assert luminance(paper) == 1
        assert contrast(ink, paper) > 10
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
