"""The bench stage with a real vLLM: one launch a side, prompts of one's own, latency goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.planning import plan_stages
from pipeline.progress import PlainReporter
from pipeline.runner import run_plan
from pipeline.session import open_setting
from pipeline.stages.bench import BenchStage, read_launches
from pipeline.stages.calibrate import CalibrateStage
from pipeline.stages.quantize import QuantizeStage
from pipeline.stages.source import SourceStage
from pipeline.store.tree import Store

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = """\
name: lines
extends: tiny-ptpc-fp8kv
target: {workload: lines.yaml}
gate: {throughput: {min_ratio: null, launches: 1}}
"""
WORKLOAD = """\
name: lines
description: Questions of our own, whose answers end by themselves.
profile: latency
goodput: {ttft: 600000, e2el: 600000}
cells:
  - name: questions
    dataset: {jsonl: questions.jsonl, chat_template: false}
    input_len: 64
    output_len: 24
    concurrency: 4
    rate: 50
    num_prompts: 24
    warmups: 2
"""


def test_a_workload_of_ones_own(vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.yaml").write_text(WORKLOAD)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "lines.yaml").write_text(RECIPE)
    rows = [{"prompt": f"the number after {n} is"} for n in range(24)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    setting = open_setting("recipe/lines.yaml", store=Store(tmp_path / "store"), vllm=str(vllm))
    plan = plan_stages((SourceStage(), CalibrateStage(), QuantizeStage(), BenchStage()), setting)
    entry = run_plan(plan, setting, PlainReporter()).entry("bench")
    assert entry is not None

    before, after = read_launches(entry.path)
    assert (before.side, after.side) == ("baseline", "candidate")
    assert (after.kv_cache_dtype or "").startswith("fp8")
    assert before.kv_cache_dtype != after.kv_cache_dtype
    assert (before.faults, after.faults) == ((), ())
    for launch in (before, after):
        result = launch.cells["questions"]
        assert result.completed == 24
        assert (result.concurrency, result.request_rate) == (4, 50.0)
        assert result.goodput == result.requests_per_second  # nobody waits ten minutes
        assert launch.kv_tokens is not None
    saved = json.loads((entry.path / "launches" / "00-baseline" / "questions.json").read_text())
    assert saved["total_output_tokens"] <= 24 * 24
    assert entry.record.result["faults"] == []
