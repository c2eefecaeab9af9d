"""Long texts of the embedded model through every stage: a sound checkpoint, and one with another RoPE base.

The reference runtime answers. The base is in config.json alone, so that inspection sees a sound checkpoint, and short
texts hardly tell.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.eval.record import read
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.commands.cli import main
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.store.tree import Store
from tests.e2e.remade import Remade, plan_with
from tests.e2e.test_gate_cases import BASE, PTPC

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FACTOR = 0.3
ENDS = (128, 256, 511)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("long") / "store")


def run(name: str, store: Store, home: Path) -> RunOutcome:
    evaluation = {**BASE["evaluation"], "limit": 400, "long": {"texts": 16, "needles": 1}}
    # The embedded model was trained on short texts, and finds no needle: that part is shown only.
    limits = {"likelihood": 0.12, "retrieval": None, "max_kl": 1.5}
    gate = {**BASE["gate"], "accuracy": {"margin": 0.04, "margins": {"tiny_arithmetic": None}}, "long": limits}
    recipe: dict[str, Any] = {"name": name, **BASE, "evaluation": evaluation, "gate": gate, "quantization": PTPC}
    (home / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    setting = replace(open_setting(str(home / f"{name}.yaml"), store=store, device="cpu", to_run=True), home=home)
    return run_plan(build_plan(setting), setting, PlainReporter())


def judged(outcome: RunOutcome) -> Any:
    entry = outcome.entry("gate")
    assert entry is not None
    return read(entry.path / "gate.json")[1]


def test_a_sound_checkpoint_passes(
    store: Store, tmp_path: Path, warm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(warm_python))
    outcome = run("sound", store, tmp_path)
    report = judged(outcome)
    assert outcome.verdict is Verdict.PASS, report.reasons
    assert [bucket.end for bucket in report.long.buckets] == list(ENDS)
    assert [report.verdict_of("long", f"positions to {end}") for end in ENDS] == [Verdict.PASS] * 3
    assert all(result.clusters is None for result in report.accuracy if result.kind == "perplexity")  # a sample a text
    evidence = tmp_path / "published" / "sound" / "quantmint"
    assert "Long texts" in (evidence / "report.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["release", "verify", str(evidence.parent), "--unsigned"])
    assert ended.value.code == 0
    assert json.loads((evidence / "report.json").read_text())["gate"]["long"]["likeliest"] == 20


def test_another_rope_base_passes_the_canary_and_fails_on_long_texts(
    store: Store, tmp_path: Path, warm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_base(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"]["rope_theta"] *= FACTOR
        path.write_text(json.dumps(config))

    monkeypatch.setattr(sys, "executable", str(warm_python))
    plan_with(Remade("base", other_base), monkeypatch)
    report = judged(run("base", store, tmp_path))
    assert report.verdict is Verdict.FAIL
    assert report.verdict_of("canary") is Verdict.PASS
    # Beyond the lengths that the embedded model was trained on, texts differ too much to tell.
    assert report.verdict_of("accuracy", f"long_likelihood_to_{ENDS[0]}") is Verdict.FAIL, report.reasons
    kl = [bucket.kl for bucket in report.long.buckets]
    assert kl[0] < kl[-1]
