"""The index in a real browser: silent, in both themes and on a phone, filtered without a script, its links alive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.runs.site import build
from quantmint.pipeline.store.tree import Store
from tests.checkpoints import GOOD, SMALL, run
from tests.pages import visit

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    root = folder / "store"
    for month in range(1, 12):
        moved = replace(GOOD, lost={"facts": 8 + month % 3, "sums": 5}, nats=None)
        run(root, "llama8b-ptpc-kv", moved, f"2026-{month:02d}-01T10:00:00Z")
    run(root, "llama8b-mxfp4", replace(SMALL, scheme=HOSTILE), "2026-02-02T10:00:00Z")
    run(root, "deepseek", None, "2026-02-03T10:00:00Z", error=f"vLLM said {HOSTILE}")
    build(folder / "site", Store(root))
    return folder / "site" / "index.html"


@pytest.mark.browser
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 375)])
def test_index_opens_silently(browser: Any, site: Path, theme: str, width: int) -> None:
    visit(browser, site.as_uri(), theme, width)
    older = browser.find_element("css selector", "details")
    assert older.text == "3 older runs"
    older.find_element("tag name", "summary").click()
    assert "2026-01-01" in older.text


@pytest.mark.browser
def test_the_filter_needs_no_script(browser: Any, site: Path) -> None:
    visit(browser, site.as_uri(), "light", 1100)

    def shown() -> list[str]:
        rows = browser.find_elements("css selector", "#newest tbody tr")
        return [row.get_attribute("data-status") for row in rows if row.is_displayed()]

    assert shown() == ["PASS", "BROKEN", "FAIL"]
    for label in browser.find_elements("css selector", ".filter label"):
        label.click()
        status = label.text.rpartition(" ")[0].upper()
        assert shown() == (["PASS", "BROKEN", "FAIL"] if status == "ALL" else [status])


@pytest.mark.browser
def test_every_link_leads_to_a_file_or_a_place_on_the_page(browser: Any, site: Path) -> None:
    visit(browser, site.as_uri(), "light", 1100)
    links = [link.get_attribute("href") for link in browser.find_elements("tag name", "a")]
    assert len(links) > 20
    for link in dict.fromkeys(links):
        assert link.startswith("file://"), link
        browser.get(link)
        assert browser.get_log("browser") == []
        if "#" in link:
            anchor = link.partition("#")[2]
            assert browser.find_element("id", anchor).is_displayed()
        else:
            assert "ERR_" not in browser.page_source


def test_what_runs_and_reports_say_is_escaped(site: Path) -> None:
    text = site.read_text()
    assert HOSTILE not in text
    assert text.count("&lt;img src=x onerror=alert(1)&gt;") >= 2
    assert "<script" not in text
