"""The benchmark runs from end to end; what it measures is nobody's promise, and goals are counted rightly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.quantize.formats.checkpoint import open_checkpoint
from tests.bench import figures, plots
from tests.bench.model import SHAPES, write_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench.quantize import main

    options = ["--shape", "tiny", "--rounds", "1", "--contenders", "cp,quantmint", "--only", "fp8_kv"]
    places = ["--folder", str(tmp_path), "--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]
    with pytest.raises(SystemExit) as ended:
        main([*options, *places])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    for words in ("cp -r", "quantmint quantize", "the disk alone takes"):
        assert words in printed.out
    copied, ours = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert (copied["contender"], ours["contender"]) == ("cp", "quantmint")
    assert {"start", "calibrate", "work"} <= ours["seconds"].keys()
    assert sum(ours["seconds"].values()) < ours["wall"]
    assert copied["made_gb"] > ours["made_gb"]
    assert copied["rss"] < 50e6 < ours["rss"], "a peak is the command's, not that of who started it"
    assert "<svg" in (tmp_path / "bench.svg").read_text()
    assert not list(tmp_path.glob("quantmint-bench-*")), "the models are removed"


def test_a_contender_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench.quantize import main

    with pytest.raises(SystemExit) as ended:
        main(["--contenders", "cp,quantmnit"])
    assert ended.value.code == 2
    assert (
        "found 'quantmnit', expected some of import-torch, import-transformers, cp, quantmint"
        in capsys.readouterr().err
    )


def test_the_model_is_the_same_each_time_and_comes_in_as_many_files(tmp_path: Path) -> None:
    sizes = [write_model(tmp_path / name, SHAPES["tiny"], 2, 4, vocabulary=512) for name in ("a", "b")]
    one, other = (open_checkpoint(tmp_path / name) for name in ("a", "b"))
    assert sizes == [one.nbytes, other.nbytes]
    assert len(one.shards) == 4
    for shard in one.shards:
        assert (one.folder / shard).read_bytes() == (other.folder / shard).read_bytes()


def run(contender: str, wall: float, case: str = "ptpc_fp8", **changes: Any) -> dict[str, Any]:
    made = {"case": case, "contender": contender, "title": contender, "wall": wall, "cpu": wall, "rss": 500e6}
    return made | {"seconds": {}, "later": 0.5, "made_gb": 1.0} | changes


def result(*runs: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    machine = {"cores": 2, "processor": "p", "memory_gb": 1, "torch": "t", "accelerator": None, "load_before": 0}
    disk = [{"gb": 1.0, "seconds": 0.5, "direct": True}]
    model = {"device": "cpu", "shape": "2gb", "model_gb": 2.0, "shards": 4, "samples": 1, "length": 1}
    return {"machine": machine, **model, "disk": disk, "runs": list(runs), "beside": []} | changes


OURS = run("quantmint", 4.0, seconds={"start": 1.0, "work": 1.5, "flush": 1.0})
COPY = run("cp", 1.0, case="")


def test_goals_reached_and_missed() -> None:
    found = result(COPY, OURS, run("llm-compressor", 18.0))
    assert {goal["figure"]: (goal["value"], goal["reached"]) for goal in figures.judge(found)} == {
        "times_faster": (4.5, False),
        "times_after_start": (3.0, False),
        "rss_mb": (500.0, True),
    }
    words = figures.table(found)
    assert "goal 5 x as fast as llm-compressor: 4.5 x, missed" in words
    assert "goal 2 x cp after the start: 3.00 x, missed" in words
    assert "the disk alone takes 2.00 GB/s (past the page cache, 4 threads, fsync): ptpc_fp8 0.5 s" in words


def test_a_model_not_seen_before_has_its_own_verdict() -> None:
    found = result(OURS, run("quantmint-first", 9.0), run("llm-compressor", 27.0))
    assert "goal 1.1 x quantmint: 2.25 x, missed, of the same, of a model not seen before" in figures.table(found)
    verdicts = [
        (goal["contender"], goal["reached"]) for goal in figures.judge(found) if goal["figure"] == "times_faster"
    ]
    assert verdicts == [("quantmint", True), ("quantmint-first", False)]


@pytest.mark.parametrize("changes", [{"shape": "tiny"}, {"device": "cuda:0"}])
def test_goals_are_for_the_machine_and_model_they_name(changes: dict[str, str]) -> None:
    assert figures.judge(result(OURS, **changes)) == []


def test_who_did_not_run_says_why_and_is_compared_with_nobody() -> None:
    absent = {"case": "ptpc_fp8", "contender": "llm-compressor", "title": "x", "why_not": "absent: not installed here"}
    found = result(OURS, absent)
    assert "times_faster" not in {goal["figure"] for goal in figures.judge(found)}
    assert "absent: not installed here" in figures.table(found)


def test_medians_of_rounds() -> None:
    runs = [
        run("quantmint", wall, rss=memory, seconds={"start": 0.5, "work": wall - 0.75})
        for wall, memory in ((1.0, 5), (9.0, 7), (2.0, 6))
    ]
    row = figures.rows(result(*runs))["ptpc_fp8"]["quantmint"]
    assert (row["wall"], row["wall_min"], row["wall_max"], row["rss"]) == (2.0, 1.0, 9.0, 7)
    assert row["parts"] == {"start": 0.5, "work": 1.25, "end": 0.25}


def test_commands_beside_each_other_are_held_against_as_many_in_sequence() -> None:
    crowd = {"case": "mxfp4", "count": 8, "alone": 2.0, "wall": 12.0, "each": [10.0, 12.0], "cpu": 1.0, "rss": 1e9}
    assert "mxfp4: 8 of ours beside each other: 12.00 s, 0.75 x" in figures.table(result(OURS, beside=[crowd]))


@pytest.mark.parametrize("name", ["bench.svg", "bench.png"])
def test_the_plot_is_the_same_each_time(tmp_path: Path, name: str) -> None:
    absent = {"case": "ptpc_fp8", "contender": "quark", "title": "quark", "why_not": "absent"}
    found = result(COPY, OURS, absent)
    for folder in ("a", "b"):
        plots.quantizing(found, tmp_path / folder / name)
    one, other = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
    assert one == other
    assert len(one) > 1000
