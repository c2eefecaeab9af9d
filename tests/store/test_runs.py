from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantmint.pipeline.store.gc import RunLog, list_runs

PLAN = [("source", "0" * 64), ("quantize", "1" * 64)]


def test_a_run_is_listed_from_its_start(tmp_path: Path) -> None:
    log = RunLog.start(tmp_path, "tiny/ptpc fp8", "2" * 64, PLAN)
    (run,) = list_runs(tmp_path)
    assert run == log.run
    assert run.plan == tuple(PLAN)
    assert run.finished is None
    assert run.path.parent == tmp_path / "runs"
    assert "-tiny-ptpc-fp8-" in run.id
    assert run.path.name == f"{run.id}.json"


def test_the_end_of_a_run_is_recorded(tmp_path: Path) -> None:
    run = RunLog.start(tmp_path, "tiny", "2" * 64, PLAN).finish("PASS", 0, facts={"report": "report.html"})
    assert list_runs(tmp_path) == [run]
    assert (run.verdict, run.exit_code, run.facts) == ("PASS", 0, {"report": "report.html"})
    assert run.finished is not None
    assert run.finished >= run.started
    assert [path.name for path in run.path.parent.iterdir()] == [run.path.name]


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    runs = [RunLog.start(tmp_path, name, "2" * 64, []).run for name in ("b", "a", "c")]
    assert list_runs(tmp_path) == runs[::-1]


@pytest.mark.parametrize("bad", [b"", b"{", b"[]", b"{}", b"\xff", b'{"schema": 2}', b'{"schema": 1, "plan": [1]}'])
def test_unreadable_files_are_skipped(tmp_path: Path, bad: bytes) -> None:
    run = RunLog.start(tmp_path, "tiny", "2" * 64, PLAN).run
    (run.path.parent / "0.json").write_bytes(bad)
    (run.path.parent / "1.json").write_text(json.dumps({**json.loads(run.path.read_bytes()), "recipe": 1}))
    (run.path.parent / "2.json").mkdir()
    assert list_runs(tmp_path) == [run]
