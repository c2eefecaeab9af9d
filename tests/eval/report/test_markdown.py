"""The section of a model card: tables that parse, figures with their intervals, nothing that a text could break."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from quantmint.eval.gate import GateReport
from quantmint.eval.report import markdown, page
from quantmint.eval.report.summary import notes
from tests.eval.report import made


def tables(text: str) -> list[list[list[str]]]:
    """Every table as its rows of cells, as a renderer reads them."""
    found: list[list[list[str]]] = []
    inside = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        inside = token.type != "table_close" and (inside or token.type == "table_open")
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and inside:
            found[-1][-1].append("".join(child.content for child in token.children or ()))
    return found


def test_the_target_stands_beside_where_it_was_measured() -> None:
    assert "The recipe is for" not in markdown.render(made.good()), "it was measured there"
    report = made.good()
    elsewhere = GateReport.from_json({**report["gate"], "hardware": "mi355x", "throughput": []})
    found = notes(report, elsewhere)
    assert f"The recipe is for mi300x; everything here was measured on {elsewhere.device}." in found


def test_a_size_that_falls_short_of_a_guide_says_why() -> None:
    """9.08 GB of 16.1 GB are 1.77 times less, and the guide has 2."""
    [found] = [
        note for note in notes(made.good(), GateReport.from_json(made.good()["gate"])) if "a guide has it" in note
    ]
    assert found.startswith("The weights are 1.77 times smaller, and not 2 times as a guide has it: ")
    assert "are as large as before: " in found
    assert found in markdown.render(made.good()).replace("\\", "")


def test_accuracy_and_throughput_have_intervals_and_counts() -> None:
    text = markdown.render(made.good())
    accuracy, throughput, size = tables(text)
    assert [row[0] for row in accuracy[1:]] == [
        "gsm8k (exact_match)", "mmlu (acc)", "ifeval (prompt_level_strict_acc)", "wikitext (word_perplexity)",
    ]  # fmt: skip
    assert accuracy[1][5:] == ["660 of 1,319", "PASS at \N{MINUS SIGN}2.00\xa0pt"]
    assert accuracy[1][3] == "\N{MINUS SIGN}0.15\xa0pt (\N{MINUS SIGN}1.33\xa0to\xa0+1.08)"
    assert accuracy[3][6] == "shown only"
    assert all(len(row) == len(accuracy[0]) for row in accuracy)
    assert [row[-1] for row in throughput[1:]] == ["4 + 4"] * 3
    assert size[-1] == ["all", "16.1 GB", "9.08 GB"]
    assert "On AMD Instinct MI300X with vLLM 0.32.0." in text
    assert "**PASS**: The candidate keeps every promise of its recipe." in text


@pytest.mark.parametrize("variant", made.VARIANTS)
def test_every_variant_is_whole(variant: str) -> None:
    text = markdown.render(made.VARIANTS[variant]())
    assert text.startswith("## Evaluation\n\n**")
    assert "### How it was made" in text
    for table in tables(text):
        assert {len(row) for row in table} == {len(table[0])}
    assert "None" not in text
    assert "nan" not in text.split()


def test_what_was_not_measured_is_said() -> None:
    assert "Throughput was not measured: nothing is promised of it." in markdown.render(made.by_reference())
    stopped = markdown.render(made.stopped())
    assert "### Accuracy" not in stopped
    assert "- FAIL: No finite log probability" in stopped
    assert "promises its throughput on mi300x" in markdown.render(made.elsewhere())


def test_texts_stay_texts() -> None:
    report = made.report(made.measurements(), made.policy(), scheme="a|b <img src=x> [x](y) `c`\n# d")
    report["recipe"] = "text: |\n  ```\n  # not a heading\n"
    text = markdown.render(report)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert "<img" not in html
    assert "<a " not in html
    assert "not a heading</h1>" not in html
    assert html.count("<h1>") == 0


@pytest.mark.slow
def test_a_block_to_paste_keeps_its_lines() -> None:
    """The page promised a block after a FAIL, and none followed."""
    report = made.good()
    report["notes"] = ["Paste this into the recipe.", "quantization:\n  scheme: auto\n  bits: 5.0"]
    assert "- Paste this into the recipe.\n" in markdown.render(report)
    assert "```\nquantization:\n  scheme: auto\n  bits: 5.0\n```" in markdown.render(report)
    assert "<pre>quantization:\n  scheme: auto\n  bits: 5.0</pre>" in page.render(report)
