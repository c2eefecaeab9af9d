from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eval.record import rejudge
from eval.verdict import Verdict
from pipeline.errors import InspectionError
from pipeline.planning import build_plan
from pipeline.progress import PlainReporter
from pipeline.runner import run_plan
from pipeline.serving.launchers.local import LocalLauncher
from pipeline.serving.model.facts import model_facts
from pipeline.serving.planning.planner import plan_serving
from pipeline.serving.planning.profiles import profile
from pipeline.serving.planning.target import parse_target
from pipeline.session import open_setting
from pipeline.stage import Job, Output, Planned, Setting
from pipeline.stages.bench import read_launches
from pipeline.stages.quantize import CHECKPOINT, QuantizeStage
from pipeline.store.tree import Store
from tests.e2e.completions import greedy_logprobs
from tests.e2e.project import RECIPE, Finished, Project
from tests.e2e.remade import Remade, four_times_too_large, plan_with

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_a_run_that_was_killed_leaves_no_process_and_is_completed_by_the_same_command(finished: Finished) -> None:
    assert finished.survivors == ()
    assert finished.exit_code == 0, finished.stderr
    assert finished.result["verdict"] == "PASS", finished.result
    cached = {stage["stage"] for stage in finished.result["stages"] if stage["cached"]}
    assert {"source", "calibrate", "quantize", "inspect", "serve-baseline", "canary-baseline"} <= cached
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
    assert len(json.loads(inspected.stdout)["kv_scales"]) > 0
    verified = finished.project.run("verify", str(published), "--unsigned", "--json")
    assert verified.returncode == 0, verified.stdout


def test_each_side_was_launched_anew_and_says_what_it_ran_on(finished: Finished) -> None:
    (entry,) = finished.project.store.glob("bench/*/launches.json")
    before, after = read_launches(entry.parent)
    assert (before.side, after.side) == ("baseline", "candidate")
    assert (after.kv_cache_dtype or "").startswith("fp8")
    assert before.kv_cache_dtype != after.kv_cache_dtype
    assert (before.faults, after.faults) == ((), ())
    assert None not in (before.kv_tokens, after.kv_tokens, before.client_cpu, after.client_cpu)


def test_the_published_checkpoint_serves_by_itself_and_its_kv_scales_are_the_ones_used(
    finished: Finished, vllm: Path, tmp_path: Path
) -> None:
    published = finished.project.published
    other = tmp_path / "other-scales"
    shutil.copytree(published.resolve(), other)
    tensors = load_file(other / "model.safetensors")
    scales = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    assert scales
    for name in scales:
        tensors[name] = tensors[name] * 32
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    prompts = _prompts(finished)
    calibrated, log = _answers(vllm, published.resolve(), prompts, tmp_path / "published.log")
    assert "scaling factor 1.0" not in log
    assert log.count("fp8") > 0
    changed, _ = _answers(vllm, other, prompts, tmp_path / "other.log")
    differing = sum(before != after for before, after in zip(calibrated, changed, strict=True))
    assert differing > len(prompts) // 2, f"{differing} of {len(prompts)} answers changed with other KV scales"


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
    from pipeline.planning import plan_stages

    return plan_stages(stages, setting)


def _prompts(finished: Finished) -> list[str]:
    from pipeline.stages.evaluate import TASKS

    lines = (TASKS / "tiny_facts.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    field = next(key for key in ("question", "prompt", "text", "query") if key in json.loads(lines[0]))
    return [str(json.loads(line)[field]) for line in lines]


def _answers(vllm: Path, model: Path, prompts: Sequence[str], log: Path) -> tuple[list[tuple[float, ...]], str]:
    plan = plan_serving(
        model,
        model_facts(model),
        target=parse_target("cpu"),
        profile=profile("latency", concurrency=16, max_model_len=512),
        vllm_version="0.32.0",
        purpose="measure",
        kv_cache_dtype="fp8",
        cpu_threads=2,
    )
    with LocalLauncher(vllm).launch(plan, log, startup_timeout=600) as server:
        answers = [greedy_logprobs(server, prompt) for prompt in prompts]
    return answers, log.read_text(encoding="utf-8", errors="replace")
