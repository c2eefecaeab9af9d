"""Pairing: what is not the same question on both sides is refused, with what differs and how often."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eval import harness_log, samples
from eval.errors import MeasurementError
from eval.samples import Sample, SampleSet

BASE = SampleSet(
    "facts", "acc", tuple(Sample("facts", i, "none", f"d{i}", f"p{i}", f"t{i}", float(i % 2)) for i in range(10))
)


def edit(**changes: object) -> SampleSet:
    """The base with its fourth sample changed."""
    rows = list(BASE.samples)
    rows[3] = dataclasses.replace(rows[3], **changes)
    return dataclasses.replace(BASE, samples=tuple(rows))


def test_order_does_not_matter() -> None:
    shuffled = dataclasses.replace(BASE, samples=BASE.samples[::-1])
    pairs = samples.pair(BASE, shuffled)
    assert pairs.baseline == pairs.candidate == (0.0, 1.0) * 5


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (edit(prompt_hash="x"), "the prompt differs in 1 of 10 items, first facts#3; both sides must see the same"),
        (edit(doc_hash="x"), "the document differs in 1 of 10 items"),
        (edit(target_hash="x"), "the target differs in 1 of 10 items"),
        (edit(doc_id=4), "1 items appear more than once in the candidate"),
        (edit(doc_id=99), "1 of 11 items are missing from the candidate, first facts#3"),
        (dataclasses.replace(BASE, samples=BASE.samples[:7]), "3 of 10 items are missing from the candidate"),
        (dataclasses.replace(BASE, metric="acc_norm"), "cannot be paired"),
    ],
)
def test_faults(other: SampleSet, words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        samples.pair(BASE, other)
    assert words in str(caught.value)


def test_items_missing_from_the_baseline_are_named_so() -> None:
    with pytest.raises(MeasurementError, match="2 of 10 items are missing from the baseline"):
        samples.pair(dataclasses.replace(BASE, samples=BASE.samples[2:]), BASE)


def test_nothing_is_not_a_measurement() -> None:
    empty = dataclasses.replace(BASE, samples=())
    with pytest.raises(MeasurementError, match="no items"):
        samples.pair(empty, empty)


def test_json_round_trip_and_its_faults() -> None:
    data = json.loads(json.dumps(BASE.to_json()))
    assert SampleSet.from_json(data) == BASE
    data["samples"]["score"].pop()
    with pytest.raises(MeasurementError, match="not a sample set"):
        SampleSet.from_json(data)


ROW = {
    "doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": 1.0,
    "doc_hash": "a" * 64, "prompt_hash": "b" * 64, "target_hash": "c" * 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row | {"acc": float("nan")}, "acc is nan"),
        (lambda row: {k: v for k, v in row.items() if k != "acc"}, "no metric 'acc'"),
        (lambda row: row | {"filter": "strict-match"}, "no sample with filter 'none'; the file has ['strict-match']"),
        (lambda row: {k: v for k, v in row.items() if k != "doc_hash"}, "not a sample of lm-eval"),
    ],
)
def test_broken_logs(tmp_path: Path, change: Callable[[dict[str, object]], dict[str, object]], words: str) -> None:
    path = tmp_path / "samples_facts_1.jsonl"
    path.write_text(json.dumps(change(dict(ROW))) + "\n")
    with pytest.raises(MeasurementError) as caught:
        harness_log.read_log(path, "facts", "acc", "none")
    assert words in str(caught.value)
