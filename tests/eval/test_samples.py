"""Pairing: what is not the same question on both sides is refused, with what differs and how often."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from quantmint.eval import samples
from quantmint.eval.errors import MeasurementError
from quantmint.eval.samples import Sample, SampleSet

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
        (dataclasses.replace(BASE, settings={"temperature": 0.7}), "asked with temperature None of the baseline, 0.7"),
        (dataclasses.replace(BASE, kind="perplexity"), "cannot be paired"),
        (dataclasses.replace(BASE, planned=12), "10 items in 1 looks, the candidate 12 in 1"),
        (edit(weight=2.0), "the number of words differs in 1 of 10 items"),
        (edit(cluster="p"), "the passage differs in 1 of 10 items"),
    ],
)
def test_faults(other: SampleSet, words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        samples.pair(BASE, other)
    assert words in str(caught.value)


def test_json_round_trip_and_its_faults() -> None:
    data = json.loads(json.dumps(BASE.to_json()))
    assert SampleSet.from_json(data) == BASE
    data["samples"]["score"].pop()
    with pytest.raises(MeasurementError, match=r"not a (SampleSet|mapping of columns)"):
        SampleSet.from_json(data)


def test_columns_that_say_nothing_are_left_out_and_read_back() -> None:
    assert not {"weight", "cluster", "look"} & BASE.to_json()["samples"].keys()
    full = dataclasses.replace(edit(weight=3.0, cluster="p", look=1), kind="perplexity", looks=2, settings={"seed": 1})
    assert SampleSet.from_json(json.loads(json.dumps(full.to_json()))) == full


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["samples"].update(score=["1.0"] * 10),
        lambda data: data["samples"].update(score=[True] * 10),
        lambda data: data["samples"].update(score=[float("nan")] * 10),
        lambda data: data["samples"].update(look=[1] * 10),
        lambda data: data["samples"].update(extra=[1] * 10),
        lambda data: data["samples"].pop("doc_hash"),
        lambda data: data.update(kind="else"),
        lambda data: data.update(planned=9),
        lambda data: data.update(kind="perplexity", samples={**data["samples"], "weight": [0.0] * 10}),
        lambda data: data.update(samples=[]),
        lambda data: data.pop("metric"),
    ],
)
def test_what_is_no_sample_set(change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(json.dumps(BASE.to_json()))
    change(data)
    with pytest.raises(MeasurementError, match=r"not a (SampleSet|mapping of columns)"):
        SampleSet.from_json(data)


def in_looks(last: int) -> SampleSet:
    """The base in five looks of two items, asked up to a look."""
    rows = tuple(dataclasses.replace(sample, look=number // 2) for number, sample in enumerate(BASE.samples))
    asked = tuple(sample for sample in rows if sample.look <= last)
    return dataclasses.replace(BASE, samples=asked, planned=10, looks=5)


def test_a_candidate_that_stopped_early_is_compared_on_its_looks() -> None:
    pairs = samples.pair(in_looks(4), in_looks(1))
    assert pairs.looks == (0, 0, 1, 1)
    assert (len(pairs.candidate), pairs.planned) == (4, 10)


def test_a_look_that_is_not_whole_is_not_compared() -> None:
    part = in_looks(2)
    with pytest.raises(MeasurementError, match="1 of 6 items are missing from the candidate, first facts#0"):
        samples.pair(in_looks(4), dataclasses.replace(part, samples=part.samples[1:]))
    with pytest.raises(MeasurementError, match="2 of 6 items are missing from the baseline, first facts#4"):
        samples.pair(in_looks(1), part)
    moved = tuple(dataclasses.replace(sample, look=0) for sample in part.samples)
    with pytest.raises(MeasurementError, match="missing from the baseline"):
        samples.pair(in_looks(4), dataclasses.replace(part, samples=moved))


def test_items_of_a_passage_are_a_cluster_and_others_their_own() -> None:
    both = tuple(dataclasses.replace(s, cluster="p" if s.doc_id < 3 else "") for s in BASE.samples)
    clustered = dataclasses.replace(BASE, samples=both)
    pairs = samples.pair(clustered, clustered)
    assert pairs.clusters[:3] == ("p", "p", "p")
    assert len(set(pairs.clusters)) == 8


def test_a_control_is_paired_with_the_items_that_it_has() -> None:
    again = dataclasses.replace(BASE, samples=BASE.samples[2:5], planned=3)
    pairs = samples.pair(in_looks(4).on(again), again)
    assert (len(pairs.baseline), pairs.planned, set(pairs.looks)) == (3, 3, {0})


def test_the_mean_of_a_perplexity_is_by_word() -> None:
    rows = (
        dataclasses.replace(BASE.samples[0], score=-10.0, weight=5.0),
        dataclasses.replace(BASE.samples[1], score=-20.0, weight=15.0),
    )
    texts = dataclasses.replace(BASE, samples=rows, kind="perplexity", planned=2)
    assert texts.mean == pytest.approx(math.exp(30 / 20))
    assert BASE.mean == 0.5
    with pytest.raises(MeasurementError, match="no items"):
        _ = dataclasses.replace(BASE, samples=()).mean


def test_pairs_of_unequal_columns() -> None:
    with pytest.raises(MeasurementError, match="2 items, but 1 weights"):
        samples.Pairs("facts", "acc", (0.0, 1.0), (1.0, 1.0), weights=(1.0,))
    plain = samples.Pairs("facts", "acc", (0.0, 1.0), (1.0, 1.0))
    assert (plain.weights, len(set(plain.clusters)), plain.looks, plain.planned) == ((1.0, 1.0), 2, (0, 0), 2)
