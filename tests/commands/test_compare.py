"""`quantmint compare`: whatever a checkpoint is named by, what is printed, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval.report.numbers import TIMES, signed
from tests.checkpoints import GOOD, SMALL, run

Quantmint = Callable[..., Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two recipes in a store, and the first one published."""
    folder = tmp_path_factory.mktemp("made")
    run(folder / "store", "good", GOOD)
    run(folder / "store", "small", SMALL)
    run(folder / "store", "small", None, error="killed")
    GOOD.write(folder / "published" / "good" / "quantmint")
    return folder


def test_published_store_entry_file_and_recipe_are_one_and_the_same(quantmint: Quantmint, made: Path) -> None:
    store = made / "store"
    (entry,) = [path.parent for path in store.glob("report/*/report.json") if GOOD.name in path.read_text()]
    for name in (made / "published" / "good", entry, entry / "report.json", "good"):
        told = quantmint("compare", name, "small", "--store", store, "--json").json
        (group,) = told["groups"]
        assert [c["verdict"] for c in group["contenders"].values()] == ["PASS", "FAIL"]
        # The gate's record was found beside each, or through the entry that the report was made from.
        assert len(group["direct"][0]["results"]) == 3, name
        assert group["notes"] == []


def test_reports_of_another_store_bring_their_records(quantmint: Quantmint, made: Path) -> None:
    """Two runs of one recipe are told apart by their weights and the times of their reports."""
    reports = sorted(path.parent for path in (made / "store").glob("report/*/report.json"))[:2]
    told = quantmint("compare", *reports, "--store", "elsewhere", "--json").json
    assert told["groups"][0]["direct"]
    shown = quantmint("compare", reports[0], reports[0], "--store", "elsewhere").out
    contender = told["groups"][0]["contenders"]["A"]
    assert contender["artefact"][:8] in shown
    assert contender["created"][:10] in shown


def test_a_lone_report_has_no_record(quantmint: Quantmint, made: Path, tmp_path: Path) -> None:
    shutil.copyfile(made / "published" / "good" / "quantmint" / "report.json", tmp_path / "lone.json")
    told = quantmint("compare", tmp_path / "lone.json", "small", "--store", made / "store", "--json").json
    assert told["groups"][0]["direct"] == []
    assert "its gate.json is not at hand" in told["groups"][0]["notes"][0]


def test_the_terminal_shows_the_figures_and_the_page_is_written(quantmint: Quantmint, made: Path) -> None:
    ended = quantmint("compare", "good", "small", "--store", made / "store", "--output", "both.html")
    assert (ended.code, ended.err) == (0, "")
    for words in (
        "A*",
        "B*",
        "llama8b-mxfp4",
        "FAIL",
        f"0.31{TIMES}",
        signed(-3.5),
        "B vs A",
        "worse",
        "page  both.html",
    ):
        assert words in ended.out, words
    lines = ended.out.splitlines()
    tables = [number for number, line in enumerate(lines) if line.startswith(" ───")]
    assert len(tables) >= 4, lines
    assert all(len(lines[number]) <= 80 for number in tables), "no figure is cut off on a terminal of 80 columns"
    assert "2 checkpoints side by side" in Path("both.html").read_text()
    assert [path.name for path in Path().glob("*both.html*")] == ["both.html"]


def test_markup_of_a_report_is_not_ours(quantmint: Quantmint, made: Path, tmp_path: Path) -> None:
    report = json.loads((made / "published" / "good" / "quantmint" / "report.json").read_text())
    report["name"] = "[red]x[/nope]\x1b[2J"
    (tmp_path / "r.json").write_text(json.dumps(report))
    ended = quantmint("compare", tmp_path / "r.json", "small", "--store", made / "store")
    assert ended.code == 0
    assert "[red]x[/nope]\N{REPLACEMENT CHARACTER}[2J" in ended.out
    assert "\x1b" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["good"], "found one checkpoint, good, expected at least two"),
        ([], "Missing argument"),
        (["good", "smal"], 'no report of such a recipe in STORE (did you mean "small"?)'),
        (["good", "none/such"], "none/such: there is no such file or folder"),
        (["good", "empty"], "empty: found neither quantmint/report.json nor report.json"),
        (["good", "x.txt"], "x.txt: found neither quantmint/report.json nor report.json"),
        (["good", "cut.yaml"], "cut: there is no such file or folder, and no report of such a recipe in STORE"),
        (["good", "torn.json"], "torn.json: not a report of this version: name: Field required"),
        (["good", "cut"], "cut: there is no such file or folder, and no report of such a recipe in STORE"),
        (["good", "small", "--output", "none/x.html"], "--output: none/x.html cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    quantmint: Quantmint, made: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    store = tmp_path / "store"
    shutil.copytree(made / "store", store)
    run(store, "cut", None, until="inspect")
    Path("empty").mkdir()
    Path("x.txt").write_text("")
    Path("cut.yaml").write_text("extends: tiny-ptpc\nname: cut\n")
    Path("torn.json").write_text("{}")
    ended = quantmint("compare", *arguments, "--store", store)
    assert ended.code == 2
    assert words.replace("STORE", str(store)) in ended.err
