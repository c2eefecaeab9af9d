"""The model of more nodes is arithmetic: its limits are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import plots
from tests.bench.scaling import share_of_cores, unlike_values
from tests.bench.scaling_model import Parts, modelled

IDEAL = Parts(
    gigabytes=2.0,
    files=16,
    samples=64,
    cores=2,
    start=0.0,
    plan=0.0,
    task=0.0,
    file=1.0,
    commit=0.0,
    load=0.0,
    sample=0.5,
    join=0.0,
    written_gigabytes=1.0,
    disk=1e9,
)


def speedups(parts: Parts, what: str = "quantize") -> list[float]:
    rows = [row for row in modelled(parts)["rows"] if row["model"] == "measured here"]
    return [rows[0][what] / row[what] for row in rows]


def test_nothing_but_files_scales_one_for_one() -> None:
    assert speedups(IDEAL) == [1, 2, 4, 8]
    assert speedups(IDEAL, "calibrate") == [1, 2, 4, 8]


def test_files_are_given_out_whole() -> None:
    assert speedups(replace(IDEAL, files=9)) == [1, 9 / 5, 3, 9 / 2]


def test_what_one_process_does_stays() -> None:
    assert speedups(replace(IDEAL, start=16.0)) == [1, 32 / 24, 32 / 20, 32 / 18]
    assert speedups(replace(IDEAL, commit=1.0))[-1] == pytest.approx(1.0)
    assert speedups(replace(IDEAL, load=1e9), "calibrate")[-1] == pytest.approx(1.0)


def test_one_disk_for_all_is_a_floor() -> None:
    assert speedups(replace(IDEAL, disk=1 / 16), "quantize_one_disk") == [1, 1, 1, 1]


def test_a_range_that_differs_is_named_with_both_values() -> None:
    expected = {"input a": 1.0, "input b": 2.0, "key a": [1.0, 2.0]}
    assert unlike_values(expected, dict(expected)) == {}
    found = {"input a": 1.0, "key a": [1.0, 2.5], "value a": 3.0}
    assert unlike_values(expected, found) == {
        "input b": [2.0, None],
        "key a": [[1.0, 2.0], [1.0, 2.5]],
        "value a": [None, 3.0],
    }


def test_cores_are_dealt_out() -> None:
    every = share_of_cores(1, None)[0]
    assert len(share_of_cores(2, 1)) == 2
    assert {core for node in share_of_cores(len(every), 1) for core in node} == set(every)


def test_the_picture_says_what_is_modelled(tmp_path: Path) -> None:
    result = {
        "machine": {"cores": 2},
        "disturbed": False,
        "runs": {"one process": {"quantize": 4.0}, "2 nodes": {"quantize": 3.0}},
        "modelled": modelled(IDEAL),
    }
    plots.scaling(result, tmp_path / "scaling.svg")
    drawn = (tmp_path / "scaling.svg").read_text()
    assert "modelled from measured parts" in drawn
    assert "measured: 2 cores of one machine" in drawn
