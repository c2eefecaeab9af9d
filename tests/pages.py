"""What a page holds, and how it looks in the browser of the tests: its theme and width, whether it can be read."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Tags(HTMLParser):
    """The tags of a page, and where it points."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]


def media(browser: Any, theme: str, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def luminance(css: str) -> float:
    """Relative luminance (WCAG 2) of `rgb(r, g, b)` or `rgba(r, g, b, a)`."""
    channels = [float(c) / 255 for c in css[css.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def visit(browser: Any, url: str, theme: str, width: int) -> None:
    """Open a page, which must be silent on the console and the network, fit the width and follow the theme."""
    media(browser, theme, width)
    browser.get_log("performance")
    browser.get(url)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert {u for u in asked if not u.startswith("data:")} == {url}
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    doubled = "return [...document.querySelectorAll('[id]')].map(e => e.id).filter((x, i, a) => a.indexOf(x) != i)"
    assert browser.execute_script(doubled) == []
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == (theme == "dark")
    texts = "return [...document.querySelectorAll('svg.plot text')].filter(t => t.getBoundingClientRect().height)"
    for label in browser.execute_script(texts):
        fill = label.value_of_css_property("fill")
        # What stands in a filled mark has the paper's colour.
        assert contrast(fill, paper) >= 4.5 or fill == paper, label.text
