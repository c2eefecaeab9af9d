"""Rows as lm-eval logs them, read as scores and as answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval.errors import MeasurementError
from quantmint.eval.harness import Asked, answer, compressed, read_asked, read_rows, write_asked
from quantmint.eval.samples import Sample
from quantmint.eval.suites import SuiteTask

FACTS = SuiteTask("facts", "acc", 12, 0.03)
TEXTS = SuiteTask("texts", "word_perplexity", 2, 0.03, expected_spread=0.02)
ROW: dict[str, Any] = {
    "doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": 1.0, "target": 1,
    "doc_hash": "a" * 64, "prompt_hash": "b" * 64, "target_hash": "c" * 64,
    "arguments": [("Q", " red"), ("Q", " blue")], "resps": [[(-3.0, False)], [(-2.0, True)]],
    "filtered_resps": [(-3.0, False), (-2.0, True)],
}  # fmt: skip


def test_a_row() -> None:
    (sample,) = read_rows([ROW, {**ROW, "filter": "other"}], "facts", FACTS, ["passage"])
    assert sample == Sample("facts", 0, "none", "a" * 16, "b" * 16, "c" * 16, 1.0, cluster="passage")


def test_a_perplexity_weighs_its_words() -> None:
    row = {**ROW, "word_perplexity": (-20.0, 8)}
    (sample,) = read_rows([row], "texts", TEXTS, [""])
    assert (sample.score, sample.weight) == (-20.0, 8.0)
    with pytest.raises(MeasurementError, match="texts#0: a document of 0 words"):
        read_rows([{**row, "word_perplexity": (-20.0, 0)}], "texts", TEXTS, [""])
    with pytest.raises(MeasurementError, match="word_perplexity is nan"):
        read_rows([{**row, "word_perplexity": (math.nan, 3)}], "texts", TEXTS, [""])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row | {"acc": float("nan")}, "facts#0: acc is nan"),
        (lambda row: {k: v for k, v in row.items() if k != "acc"}, "no metric 'acc'; the row has ['acc']"),
        (lambda row: row | {"filter": "strict-match"}, "no sample with filter 'none'; there are ['strict-match']"),
        (lambda row: {k: v for k, v in row.items() if k != "doc_hash"}, "not a sample of lm-eval"),
        (lambda row: row | {"acc": (-1.0, 3)}, "not a sample of lm-eval"),
    ],
)
def test_broken_rows(change: Callable[[dict[str, object]], dict[str, object]], words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        read_rows([change(dict(ROW))], "facts", FACTS, [""])
    assert words in str(caught.value)


def test_the_likeliest_choice_is_the_answer() -> None:
    shown = answer(ROW, "facts", FACTS, ["red", "blue"])
    assert shown == {
        "task": "facts", "doc_id": 0, "filter": "none", "prompt": "Q", "target": "blue", "response": "blue",
        "choices": ["red", "blue"], "loglikelihoods": [-3.0, -2.0],
    }  # fmt: skip
    normed = SuiteTask("facts", "acc_norm", 12, 0.03)
    assert answer(ROW, "facts", normed, ["red and green", "blue"])["response"] == "red and green"
    broken = {**ROW, "filtered_resps": [(math.nan, False), (-2.0, True)]}
    with pytest.raises(MeasurementError, match="facts#0: a log likelihood is nan"):
        answer(broken, "facts", FACTS, ["red", "blue"])


def test_generated_text_and_what_the_filter_took_from_it() -> None:
    row = ROW | {"arguments": [("x" * 3000 + "?", {})], "resps": [["It is 7."]], "filtered_resps": ["7"], "target": "7"}
    shown = answer(row, "sums", FACTS, None)
    assert (shown["target"], shown["response"], shown["extracted"]) == ("7", "It is 7.", "7")
    assert (len(shown["prompt"]), shown["prompt"][-1]) == (2000, "?")


def test_several_targets() -> None:
    assert answer({**ROW, "target": [0, 1]}, "facts", FACTS, ["red", "blue"])["target"] == "red | blue"


def test_a_batch_round_trip(tmp_path: Path) -> None:
    batch = Asked({"seed": 1}, read_rows([ROW], "facts", FACTS, [""]), (answer(ROW, "facts", FACTS, ["red", "blue"]),))
    path = tmp_path / "0.jsonl.gz"
    write_asked(path, batch)
    assert read_asked(path) == batch
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(MeasurementError, match="not a batch of answers"):
        read_asked(path)


def test_equal_lines_are_equal_bytes() -> None:
    assert compressed([{"a": "é"}]) == compressed([{"a": "é"}])
    assert b"jsonl" not in compressed([{"a": 1}])
