from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eval import workloads
from eval.record import rejudge
from eval.verdict import Verdict
from pipeline.base.errors import InspectionError
from pipeline.base.progress import PlainReporter
from pipeline.serving.environment import VllmEnvironment, find_vllm
from pipeline.serving.model.facts import model_facts
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.target import parse_target, profile
from pipeline.serving.running.launchers import LocalLauncher
from pipeline.serving.running.load import run_cell
from pipeline.serving.running.server import Server
from pipeline.stages.bench import read_launches
from pipeline.stages.planning import build_plan
from pipeline.stages.quantize import CHECKPOINT, QuantizeStage
from pipeline.stages.runner import run_plan
from pipeline.stages.session import open_setting
from pipeline.stages.stage import Job, Output, Planned, Setting
from pipeline.store.tree import Store
from tests.e2e.project import RECIPE, Finished, Project
from tests.e2e.remade import Remade, four_times_too_large, plan_with
from tests.serving.served.answers import PROMPTS, ask
from tests.serving.served.cases import PUBLISHED
from tests.serving.served.compare import judge, remembered
from tests.serving.served.reference import Reference

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
    assert "tiny_facts" not in second
    assert "tiny_arithmetic" in second


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
    verified = finished.project.run("verify", str(published), "--unsigned", "--json")
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


def test_a_harmed_checkpoint_is_stopped_by_inspect(finished: Finished, tmp_path: Path) -> None:
    setting = _setting(finished.project, tmp_path)
    plan = _replaced(build_plan(setting), setting, quantize=HarmedQuantize())
    with pytest.raises(InspectionError, match="error too large"):
        run_plan(plan, setting, PlainReporter())
    assert not (tmp_path / "published").exists()


def test_a_model_that_was_harmed_before_it_was_quantized_is_stopped_by_the_canary(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inspection sees a faithful copy of a bad model; only the answers can tell, and a minute of them does."""
    plan_with(Remade("harmed", four_times_too_large), monkeypatch)
    setting = _setting(finished.project, tmp_path)
    outcome = run_plan(build_plan(setting), setting, PlainReporter())
    assert (outcome.verdict, outcome.stopped, outcome.exit_code) == (Verdict.FAIL, "canary-candidate", 1)
    assert outcome.entry("report") is not None
    assert outcome.entry("publish") is None
    assert not (tmp_path / "published").exists()
    cached = {step.planned.key for step in outcome.steps if step.cached}
    assert {"serve-baseline", "canary-baseline"} <= cached, "the baseline is shared"


# The last tests ask one server, which is there from the first of them to the end of this file.


@pytest.fixture(scope="module")
def server(
    finished: Finished, warm_vllm: VllmEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """What was published, as vLLM serves it; `test_published` starts one as users do."""
    published = finished.project.published.resolve()
    plan = plan_serving(
        published,
        model_facts(published),
        target=parse_target("cpu"),
        profile=profile("latency", concurrency=PROMPTS, max_model_len=512),
        vllm_version=warm_vllm.version,
        purpose="measure",
        kv_cache_dtype=PUBLISHED.kv_cache,
        cpu_threads=2,
    )
    log = tmp_path_factory.mktemp("served") / "published.log"
    with LocalLauncher(warm_vllm.executable).launch(plan, log, startup_timeout=600) as launched:
        yield launched


def test_the_published_checkpoint_serves_by_itself_and_its_kv_scales_are_the_ones_used(
    finished: Finished, server: Server
) -> None:
    """Its answers are nearer to its own scales than to scales of 1.0, to K's and V's exchanged, and to no FP8 cache."""
    answers = ask(server)
    found = judge(PUBLISHED, answers, remembered(Reference(finished.project.published.resolve()), answers))
    assert found.objections == ()
    if FP8_CACHE:
        assert {"KV scales of 1.0", "KV scales exchanged", "the cache in 16 bit"} <= found.others.keys()
    scan = server.scan_log()
    assert scan.invalid == ()
    assert (scan.kv_cache_dtype or "").startswith("fp8") == FP8_CACHE


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


def test_a_workload_of_ones_own(finished: Finished, server: Server, vllm: Path, tmp_path: Path) -> None:
    """Prompts of one's own, a rate and latency goals; the client is as users have it."""
    (tmp_path / "lines.yaml").write_text(WORKLOAD)
    rows = [{"prompt": f"the number after {n} is"} for n in range(24)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cell,) = workloads.load(str(tmp_path / "lines.yaml")).cells
    model = finished.project.published.resolve()
    result = run_cell(find_vllm(vllm), cell, server, model=model, folder=tmp_path, log=tmp_path / "client.log")
    assert result.completed == 24
    assert (result.concurrency, result.request_rate) == (4, 50.0)
    assert result.goodput == result.requests_per_second  # nobody waits ten minutes
    assert json.loads((tmp_path / f"{cell.name}.json").read_text())["total_output_tokens"] <= 24 * 24


# What the tests above are made of.


@dataclass(frozen=True, slots=True)
class HarmedQuantize(QuantizeStage):
    """Multiplies one layer's weight scales by 4 after they were written."""

    version: int = -1

    def run(self, job: Job) -> Output:
        output = QuantizeStage.run(self, job)
        path = job.path / CHECKPOINT / "model.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if ".layers.1." in name and name.endswith("weight_scale")]:
            tensors[name] = tensors[name] * 4
        save_file(tensors, path, metadata={"format": "pt"})
        return replace(output, known={}, result={**output.result, "bytes": path.stat().st_size})


def _setting(project: Project, home: Path) -> Setting:
    setting = open_setting(RECIPE, store=Store(project.store), vllm=str(project.vllm), to_run=True)
    return replace(setting, home=home)


def _replaced(plan: Sequence[Planned], setting: Setting, **stages: Any) -> tuple[Planned, ...]:
    """The plan with other stages under the same keys, fingerprinted anew."""
    return _fingerprinted([stages.get(planned.key, planned.stage) for planned in plan], setting)


def _fingerprinted(stages: Sequence[Any], setting: Setting) -> tuple[Planned, ...]:
    from pipeline.stages.planning import plan_stages

    return plan_stages(stages, setting)
