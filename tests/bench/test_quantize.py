"""The benchmark runs from end to end; what it measures is nobody's promise, and goals are counted rightly."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.quantize.formats.checkpoint import open_checkpoint
from tests.bench import figures, plots
from tests.bench.contenders import CASES, CONTENDERS, how
from tests.bench.model import SHAPES, write_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_end_to_end(tmp_path: Path, warm_python: Path) -> None:
    """Its process, and those that it measures, have imported the libraries already."""
    options = ["--shape", "tiny", "--rounds", "1", "--contenders", "cp,quantmint", "--only", "mxfp4,fp8_kv", "--double"]
    places = ["--folder", str(tmp_path), "--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.svg")]
    ended = subprocess.run(
        [warm_python, "-m", "tests.bench.quantize", *options, *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for words in ("cp -r", "quantmint", "written, s", "durable, s", "twice the layers", "predicted as by"):
        assert words in ended.stdout
    result = json.loads((tmp_path / "bench.json").read_text())
    assert list(result["cases"]) == ["mxfp4", "fp8_kv"]
    ours = result["cases"]["fp8_kv"]["quantmint"]
    assert set(ours["phases"]) == {"plan", "calibrate", "write"}
    assert ours["written"]["median"] <= ours["returned"]["median"] <= ours["durable"]["median"]
    assert result["doubled"]["mxfp4"]["peak_rss"] > 0
    assert "<svg" in (tmp_path / "bench.svg").read_text()
    assert not list(tmp_path.glob("quantmint-bench-*")), "the models are removed"


def test_a_contender_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench.quantize import main

    with pytest.raises(SystemExit) as ended:
        main(["--contenders", "cp,quantmnit"])
    assert ended.value.code == 2
    assert "found 'quantmnit', expected some of cp, quantmint" in capsys.readouterr().err


def test_every_case_has_somebody_to_be_compared_with() -> None:
    for case in CASES:
        assert [contender for contender in CONTENDERS if how(contender, case)][:3] == list(CONTENDERS)[:3]


def test_the_model_is_the_same_each_time_and_comes_in_as_many_files(tmp_path: Path) -> None:
    sizes = [write_model(tmp_path / name, SHAPES["tiny"], 2, 4, vocabulary=512) for name in ("a", "b")]
    one, other = (open_checkpoint(tmp_path / name) for name in ("a", "b"))
    assert sizes == [one.nbytes, other.nbytes]
    assert len(one.shards) == 4
    for shard in one.shards:
        assert (one.folder / shard).read_bytes() == (other.folder / shard).read_bytes()


def row(seconds: float, memory: float | None = 500e6) -> dict[str, Any]:
    spread = {"median": seconds, "min": seconds, "max": seconds}
    times = dict.fromkeys(("written", "returned", "durable", "cpu", "import", "warm_up"), spread)
    return {
        "name": "x",
        **times,
        "peak_rss": memory,
        "mapped": 1e6,
        "phases": {"write": seconds},
        "threads": {"read": seconds},
    }


def result(rows: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    machine = {"cores": 2, "processor": "p", "memory_gb": 1, "torch": "t", "accelerator": None, "load_before": 0}
    made = {
        "machine": machine,
        "device": "cpu",
        "shape": "2gb",
        "model_gb": 2.0,
        "shards": 4,
        "rounds": 3,
        "samples": 1,
        "length": 1,
        "cases": {"ptpc_fp8": rows},
        "doubled": {},
        "predicted": {},
        "same_bytes": {},
    } | changes
    return made | {"goals": figures.judge(made)}


def test_goals_reached_and_missed() -> None:
    found = result({"cp": row(1.0, None), "quantmint": row(1.5), "llm-compressor": row(9.0)})
    assert {goal["figure"]: (goal["value"], goal["reached"]) for goal in found["goals"]} == {
        "times_faster": (6.0, False),
        "times_cp": (1.5, True),
        "peak_rss_mb": (500.0, True),
    }
    words = figures.table(found)
    assert "goal 8x faster than llm-compressor: 6.0x, missed" in words
    assert "goal 2 x cp: 1.50 x, reached" in words


def test_memory_of_twice_the_layers() -> None:
    doubled = {"ptpc_fp8": {"written": 3.0, "peak_rss": 600e6}}
    found = result({"quantmint": row(1.5)}, doubled=doubled)
    assert {goal["figure"]: goal["reached"] for goal in found["goals"]} == {"peak_rss_mb": True, "rss_doubled": False}
    assert "twice the layers: 600 MB resident" in figures.table(found)


@pytest.mark.parametrize("changes", [{"shape": "tiny"}, {"device": "cuda:0"}])
def test_goals_are_for_the_machine_and_model_they_name(changes: dict[str, str]) -> None:
    assert result({"quantmint": row(1.5)}, **changes)["goals"] == []


def test_who_did_not_run_says_why_and_is_compared_with_nobody() -> None:
    absent = {"name": "llm-compressor: x", "why_not": "absent: not installed here"}
    found = result({"quantmint": row(1.5), "llm-compressor": absent})
    assert "times_faster" not in {goal["figure"] for goal in found["goals"]}
    assert "absent: not installed here" in figures.table(found)


def test_prediction_beside_measurement() -> None:
    predicted = {"ptpc_fp8": {"written": 1.2, "durable": 1.5, "memory": 550e6}}
    words = figures.table(result({"quantmint": row(1.5)}, predicted=predicted))
    assert "written 1.20 s (-20%), durable 1.50 s (+0%), resident 550 MB (+10%)" in words


def test_medians_of_rounds() -> None:
    once = {"written": 1.0, "returned": 1.0, "durable": 1.0, "cpu": 1.0, "import": 1.0, "warm_up": 1.0}
    runs = [
        once
        | {
            "written": seconds,
            "peak_rss": memory,
            "mapped": 1,
            "peak_device": None,
            "phases": {"a": seconds},
            "threads": {},
        }
        for seconds, memory in ((1.0, 5), (9.0, 7), (2.0, 6))
    ]
    found = figures.summary(runs)
    assert found["written"] == {"median": 2.0, "min": 1.0, "max": 9.0}
    assert (found["peak_rss"], found["peak_device"]) == (7, None)
    assert found["phases"] == {"a": 2.0}


@pytest.mark.parametrize("name", ["bench.svg", "bench.png"])
def test_the_plot_is_the_same_each_time(tmp_path: Path, name: str) -> None:
    found = result({"cp": row(1.0, None), "quantmint": row(1.5), "quark": {"name": "quark", "why_not": "absent"}})
    for folder in ("a", "b"):
        plots.quantizing(found, tmp_path / folder / name)
    one, other = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
    assert one == other
    assert len(one) > 1000
