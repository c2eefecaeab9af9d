"""A cell with prompts of one's own, a rate and latency goals, as a real vLLM answers it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import workloads
from pipeline.measuring.cell import result_file, run_cell
from pipeline.serving.environment import find_vllm
from pipeline.serving.launchers.local import LocalLauncher
from pipeline.serving.model.facts import model_facts
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.profiles import profile
from pipeline.serving.planning.target import parse_target
from tests.served.cases import MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

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


def test_a_workload_of_ones_own(vllm: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.yaml").write_text(WORKLOAD)
    rows = [{"prompt": f"the number after {n} is"} for n in range(24)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cell,) = workloads.load(str(tmp_path / "lines.yaml")).cells
    environment = find_vllm(vllm)
    plan = plan_serving(
        MODEL,
        model_facts(MODEL),
        target=parse_target("cpu"),
        profile=profile("latency", concurrency=4, max_model_len=512),
        vllm_version=environment.version,
        purpose="measure",
        cpu_threads=2,
    )
    with LocalLauncher(vllm).launch(plan, tmp_path / "server.log", startup_timeout=600) as server:
        result = run_cell(environment, cell, server, model=MODEL, folder=tmp_path, log=tmp_path / "client.log")
    assert result.completed == 24
    assert (result.concurrency, result.request_rate) == (4, 50.0)
    assert result.goodput == result.requests_per_second  # nobody waits ten minutes
    assert json.loads(result_file(tmp_path, cell).read_text())["total_output_tokens"] <= 24 * 24
