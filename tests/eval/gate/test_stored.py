"""Records of real evaluations, kept as files: the same verdict and the same bytes on every machine.

`tests/assets/gate/make.py` says what they are and makes them again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.eval import record
from quantmint.eval.gate import GateReport, changes, judge
from quantmint.eval.verdict import Verdict

FOLDER = Path(__file__).parents[2] / "assets" / "gate"
ROOT = Path(__file__).parents[3]

CASES = {
    "pass": (Verdict.PASS, "accuracy", "Decided after 1,500 of 2,000 items, which saves 500."),
    "fail": (Verdict.FAIL, "accuracy", "-8.20 points on tiny_facts (500 items)"),
    "stopped": (Verdict.FAIL, "canary", "Agreement below 75.0% by its whole interval, KL above 0.3 nats"),
}

# What another process says of every record, as the bytes that a file of it would have.
_JUDGE = (
    "import json, sys; from pathlib import Path; from quantmint.eval import record;"
    "print(json.dumps([record.rejudge(Path(path)).to_json() for path in sys.argv[1:]], indent=1))"
)


def recorded(case: str) -> dict[str, Any]:
    data = json.loads((FOLDER / f"{case}.json").read_text(encoding="utf-8"))
    return {name: value for name, value in data.items() if name not in ("schema", "measurements")}


def test_every_case_is_there() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


def test_what_earlier_versions_wrote_beside_a_task_is_left_out() -> None:
    earlier = recorded("fail")
    for task in earlier["accuracy"]:
        task |= {"bootstrap_low": -0.1, "bootstrap_high": 0.1}
    assert GateReport.from_json(earlier) == GateReport.from_json(recorded("fail"))


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_follows_from_the_numbers(case: str) -> None:
    verdict, kind, words = CASES[case]
    path = FOLDER / f"{case}.json"
    report = record.rejudge(path)
    assert report.verdict is verdict
    assert any(words in f.reason for f in report.findings if (f.kind, f.verdict) == (kind, verdict))
    assert changes(record.read(path)[1], report) == ()
    assert json.dumps(report.to_json(), indent=1) == json.dumps(recorded(case), indent=1)
    assert GateReport.from_json(recorded(case)) == report
    stored = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    written = record.read(path)[0].to_json() | {name: stored[name] for name in ("samples", "control")}
    assert json.dumps(written, indent=1) == json.dumps(stored, indent=1)


def test_an_evaluation_that_ended_after_its_first_look_is_undecided() -> None:
    measurements, recorded = record.read(FOLDER / "pass.json")
    baseline, candidate = measurements.samples["tiny_arithmetic"]
    first = tuple(sample for sample in candidate.samples if sample.look == 0)
    cut = {"tiny_arithmetic": (baseline, replace(candidate, samples=first))}
    (finding,) = (f for f in judge(replace(measurements, samples=cut), recorded.policy).findings
                  if (f.kind, f.subject) == ("accuracy", "tiny_arithmetic"))  # fmt: skip
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "300 of the planned ones were not asked." in finding.reason


@pytest.mark.slow
def test_a_processor_with_fewer_instructions_says_the_same() -> None:
    """NumPy's logarithms and sums without any of the vector instructions that it found here, on one thread and two."""
    import numpy as np

    features: dict[str, bool] = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
    dispatched: list[str] = np._core._multiarray_umath.__cpu_dispatch__  # type: ignore[attr-defined]
    plain = " ".join(name for name in dispatched if features.get(name))
    expected = json.dumps([recorded(case) for case in CASES], indent=1)
    paths = [str(FOLDER / f"{case}.json") for case in CASES]
    for disabled, threads in ((plain, "1"), ("", "2")):
        env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", _JUDGE, *paths], env=env, capture_output=True, text=True, check=True
        )
        assert ended.stdout.rstrip("\n") == expected
