from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantmint.eval import workloads
from quantmint.eval.record import rejudge
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.serving.environment import VllmEnvironment, find_vllm
from quantmint.pipeline.serving.model.facts import model_facts
from quantmint.pipeline.serving.planning.planner import plan_serving
from quantmint.pipeline.serving.planning.request import ServingRequest
from quantmint.pipeline.serving.planning.target import parse_target, profile
from quantmint.pipeline.serving.running.launchers import LocalLauncher
from quantmint.pipeline.serving.running.load_client import LoadClient
from quantmint.pipeline.serving.running.server import RunningServer
from quantmint.pipeline.stages.bench import read_launches
from tests.e2e.project import RECIPE, Finished
from tests.serving.served.answers import PROMPTS
from tests.serving.served.cases import PUBLISHED

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]
FP8_CACHE = PUBLISHED.kv_cache == "fp8"


def test_a_run_that_was_killed_leaves_no_process_and_is_completed_by_the_same_command(finished: Finished) -> None:
    assert finished.survivors == ()
    assert finished.exit_code == 0, finished.stderr
    assert finished.result["verdict"] == "PASS", finished.result
    cached = {stage["stage"] for stage in finished.result["stages"] if stage["cached"]}
    assert {
        "source",
        *(["calibrate"] if FP8_CACHE else []),
        "quantize",
        "inspect",
        "serve-baseline",
        "canary-baseline",
    } <= cached
    assert {"serve-candidate", "canary-candidate"} <= cached
    assert "evaluate-baseline" not in cached


def test_what_was_committed_before_the_kill_was_not_made_again(finished: Finished) -> None:
    store = finished.project.store
    assert finished.entries_before
    for name, mtime in finished.entries_before.items():
        assert (store / name / "record.json").stat().st_mtime_ns == mtime, name


def test_a_task_that_was_finished_before_the_kill_was_not_asked_again(finished: Finished) -> None:
    second = finished.stderr[finished.stderr.index("evaluate-baseline: started") :]
    second = second[: second.index("evaluate-baseline: done")]
    assert "tiny_facts: 2,000 items in 4 looks" in finished.first_log
    assert "tiny_facts: 2,000 of 2,000 answers were known from earlier runs" in second
    assert "tiny_arithmetic: 400 items" in second
    assert "tiny_arithmetic: 400 of 400 answers were known" not in second


def test_the_next_run_finds_everything_in_the_store(finished: Finished) -> None:
    again = finished.project.run("run", RECIPE, "--json")
    assert again.returncode == 0, again.stderr
    assert all(stage["cached"] for stage in json.loads(again.stdout)["stages"])
    text = finished.project.run("run", RECIPE).stdout
    assert f"published/{RECIPE}" in text
    assert "report.html" in text


def test_the_published_folder_is_complete_and_can_be_judged_again(finished: Finished) -> None:
    published = finished.project.published
    for name in (
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
        "quantmint.json",
        "quantmint/provenance.intoto.json",
        "quantmint/sbom.cdx.json",
        "quantmint/report.html",
        "quantmint/recipe.yaml",
    ):
        assert (published / name).is_file(), name
    report = rejudge(published / "quantmint" / "gate.json")
    assert report.verdict is Verdict.PASS
    (facts,) = [result for result in report.accuracy if result.task == "tiny_facts"]
    assert (facts.items, facts.planned) == (report.looks["tiny_facts"][-1].items, 2000)
    assert report.runtime.startswith("vllm ")
    judged = finished.project.run("gate", str(published), "--json")
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout)["verdict"] == "PASS"
    inspected = finished.project.run("inspect", str(published), "--json")
    assert inspected.returncode == 0, inspected.stdout
    assert bool(json.loads(inspected.stdout)["kv_scales"]) == FP8_CACHE
    verified = finished.project.run("release", "verify", str(published), "--unsigned", "--json")
    assert verified.returncode == 0, verified.stdout


def test_speed_is_measured_where_it_is_asked_for_and_says_what_it_ran_on(finished: Finished) -> None:
    """The embedded recipe promises none. Each side is launched anew; all that was measured before it is cached."""
    project = finished.project
    assert not list(project.store.glob("bench/*"))
    (project.home / "speed.yaml").write_text(f"name: speed\nextends: {RECIPE}\ngate: {{throughput: {{launches: 1}}}}\n")
    done = project.run("run", "speed.yaml", "--until", "bench", "--json")
    assert done.returncode == 0, done.stderr
    assert [stage["stage"] for stage in json.loads(done.stdout)["stages"] if not stage["cached"]] == ["bench"]
    (entry,) = project.store.glob("bench/*/launches.json")
    before, after = read_launches(entry.parent)
    assert (before.side, after.side) == ("baseline", "candidate")
    assert (after.kv_cache_dtype or "").startswith("fp8") == FP8_CACHE
    assert (before.kv_cache_dtype != after.kv_cache_dtype) == FP8_CACHE
    assert (before.faults, after.faults) == ((), ())
    assert None not in (before.kv_tokens, after.kv_tokens, before.client_cpu, after.client_cpu)


# The last tests ask one server, which is there from the first of them to the end of this file.


@pytest.fixture(scope="module")
def server(
    finished: Finished, warm_vllm: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """What was published, as vLLM serves it; `test_published` starts one as users do."""
    published = finished.project.published.resolve()
    plan = plan_serving(
        ServingRequest(
            published,
            model_facts(published),
            target=parse_target("cpu"),
            profile=profile("latency", concurrency=PROMPTS, max_model_len=512),
            vllm_version=warm_vllm.version,
            purpose="measure",
            kv_cache_dtype=PUBLISHED.kv_cache,
            cpu_threads=2,
        )
    )
    log = tmp_path_factory.mktemp("served") / "published.log"
    with LocalLauncher(warm_vllm.executable).launch(plan, log, startup_timeout=600) as launched:
        yield launched


def test_the_published_checkpoint_serves_by_itself(server: RunningServer, warm_vllm: VllmEnvironment) -> None:
    """What it answers is what its bytes mean: `test_published`."""
    scan = server.scan_log()
    cache = dict(re.findall(r'(num_gpu_blocks|block_size)="(\d+)"', server.get("/metrics")))
    assert scan.invalid == ()
    assert (scan.kv_cache_dtype or "").startswith("fp8") == FP8_CACHE
    assert server.version().split("+")[0] == scan.vllm_version == warm_vllm.version.split("+")[0]
    assert scan.kv_tokens is not None
    assert int(cache["num_gpu_blocks"]) * int(cache["block_size"]) == pytest.approx(scan.kv_tokens, rel=0.01)


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


def test_a_workload_of_ones_own(finished: Finished, server: RunningServer, vllm: Path, tmp_path: Path) -> None:
    """Prompts of one's own, a rate and latency goals; the client is as users have it."""
    (tmp_path / "lines.yaml").write_text(WORKLOAD)
    rows = [{"prompt": f"the number after {n} is"} for n in range(24)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cell,) = workloads.load(str(tmp_path / "lines.yaml")).cells
    model = finished.project.published.resolve()
    result = LoadClient(find_vllm(vllm), server, model).measure(cell, folder=tmp_path, log=tmp_path / "client.log")
    assert result.completed == 24
    assert (result.concurrency, result.request_rate) == (4, 50.0)
    assert result.goodput == result.requests_per_second  # nobody waits ten minutes
    assert json.loads((tmp_path / f"{cell.name}.json").read_text())["total_output_tokens"] <= 24 * 24
