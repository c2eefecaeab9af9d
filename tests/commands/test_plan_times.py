"""The times of `quantmint plan`: of which machine they are, and what they count."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.baseline_launches import baseline_launches
from quantmint.pipeline.stages.bench import BenchStage, source_of
from quantmint.pipeline.store.gc import list_runs
from quantmint.pipeline.store.tree import Store
from tests.eval.measured import make_launches

Quantmint = Callable[..., Any]


@pytest.mark.usefixtures("large_disk")
def test_what_took_an_hour_is_expected_to_take_it_again(orchestra: Any, quantmint: Quantmint) -> None:
    orchestra.run(orchestra.stage("source"), orchestra.stage("canary-baseline", "source"))
    run = list_runs(orchestra.setting.store.root)[0].path
    told = json.loads(run.read_text())
    told["facts"]["stages"]["canary-baseline"]["seconds"] = 3600.0
    run.write_text(json.dumps(told))
    stages = [orchestra.stage(key, "source", option=2) for key in ("canary-baseline", "canary-candidate")]
    orchestra.plan(orchestra.stage("source"), *stages)
    found = quantmint("plan", "r.yaml", "--for", "here", "--json").json["stages"][1:]
    assert [(stage["seconds"], stage["by"]) for stage in found] == [(3600.0, "seen"), (3600.0, "seen")]
    assert "about 2 h 00 min in all" in quantmint("plan", "r.yaml", "--for", "here").out
    elsewhere = quantmint("plan", "r.yaml", "--for", "mi300x:8", "--json").json["stages"][1:]
    assert {stage["by"] for stage in elsewhere} == {"reckoned"}, "this store's times are of another machine"


@pytest.mark.usefixtures("large_disk")
def test_a_machine_is_planned_for_by_its_name(quantmint: Quantmint, project: Path) -> None:
    plans = {
        name: quantmint("plan", "r.yaml", "--for", name, "--json").json for name in ("here", "mi300x:1", "mi300x:8")
    }
    assert [plan["machine"] for plan in plans.values()] == list(plans)
    assert plans["mi300x:8"]["costs"]["rates"]["machine"].startswith("AMD Instinct MI300X by its data sheet")
    assert plans["here"]["costs"]["rates"]["machine"] != plans["mi300x:8"]["costs"]["rates"]["machine"]
    told = quantmint("plan", "r.yaml", "--for", "mi300x:8")
    assert "in all on mi300x:8, from here to the end" in told.out
    assert "nobody has measured it" in told.out
    wrong = quantmint("plan", "r.yaml", "--for", "mi300z:8")
    assert (wrong.code, 'did you mean "mi300x"' in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cuda:1", "--for: found 'cuda:1', which has no figures, expected here, mi300x, mi325x"),
        ("her", '(did you mean "here"?)'),
        ("mi300:8", '(did you mean "mi300x"?)'),
        ("mi355x:9", '(did you mean "mi355x:8"?)'),
        ("mi300x:0", '(did you mean "mi300x:8"?)'),
    ],
)
@pytest.mark.usefixtures("large_disk", "project")
def test_a_machine_without_figures_is_refused(quantmint: Quantmint, name: str, expected: str) -> None:
    ended = quantmint("plan", "r.yaml", "--for", name)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"quantmint: --for: found {name!r}")
    assert expected in ended.err


def test_a_target_without_figures_is_planned_for_this_machine() -> None:
    from quantmint.pipeline.runs.forecast import machine_elsewhere

    assert machine_elsewhere(None, "cuda", 1) is None
    elsewhere = machine_elsewhere(None, "mi300x", 8)
    assert elsewhere is not None
    assert elsewhere.gpus == 8


def test_a_plan_says_whose_rates_it_has(quantmint: Quantmint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantmint.pipeline.runs.weights.cores", lambda: 64)
    ended = quantmint("plan", "tiny-ptpc")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "times on this machine (" in said
    assert "measured for a second" in said
    monkeypatch.setattr("quantmint.pipeline.stages.rates.measured", _fails)
    said = " ".join(quantmint("plan", "tiny-ptpc").out.split())
    assert "that is ANOTHER machine" in said


def _fails(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.usefixtures("large_disk")
def test_a_total_without_a_stage_is_at_least(quantmint: Quantmint, project: Path) -> None:
    """A library's time is nobody's to predict; sensitivities, GPTQ and further tries are ours."""
    (project / "library.yaml").write_text(
        "extends: r.yaml\nname: library\nquantization: {scheme: ptpc_fp8, kv_cache: auto, engine: llmcompressor, "
        "format: compressed-tensors}\ncalibration: null\n"
    )
    plan = quantmint("plan", "library.yaml", "--json").json
    assert plan["not_predicted"] == ["quantize"]
    told = quantmint("plan", "library.yaml").out
    assert "at least " in told
    assert "; quantize not counted" in told
    (project / "search.yaml").write_text(
        "extends: r.yaml\nname: search\nquantization: {scheme: auto, from: [mxfp4, ptpc_fp8], bits: 5, kv_cache: auto, "
        "format: quark, algorithm: gptq}\ncalibration: {set: sentences.yaml, samples: 8, sequence_length: 32}\n"
        "search: {tries: 3}\ngate: {accuracy: {margins: {tiny_arithmetic: 0.06}}}\n"
    )
    ended = quantmint("plan", "search.yaml", "--json")
    assert ended.code == 0, ended.err
    plan = ended.json
    assert plan["not_predicted"] == []
    stages = {stage["stage"]: stage["seconds"] for stage in plan["stages"]}
    assert stages["sensitivity"] > 0
    assert plan["further_tries"] == 2
    again = (
        "quantize",
        "inspect",
        "serve-candidate",
        "canary-candidate",
        "evaluate-candidate",
        "bench",
        "gate",
        "report",
    )
    one = sum(stages.get(key, 0.0) for key in again)
    assert plan["seconds_of_all_tries"] == pytest.approx(plan["seconds"] + 2 * one)
    assert "with 2 more tries of the search" in quantmint("plan", "search.yaml").out


@pytest.mark.usefixtures("large_disk")
def test_what_is_not_done_costs_nothing(quantmint: Quantmint, project: Path) -> None:
    """A recipe may say how to calibrate and use a scheme that has nothing to be calibrated."""
    for scheme, calibrated in (("fp8", True), ("ptpc_fp8", False)):
        (project / "other.yaml").write_text(
            f"extends: r.yaml\nname: other\nquantization: {{scheme: {scheme}, kv_cache: auto}}\n"
            "calibration: {set: sentences.yaml, samples: 1, sequence_length: 8}\n"
        )
        plan = quantmint("plan", "other.yaml", "--json").json
        stages = [stage["stage"] for stage in plan["stages"]]
        assert ("calibrate" in stages, "calibrate" in plan["costs"]["stages"]) == (calibrated, calibrated)


@pytest.mark.parametrize(
    ("hardware", "runtime", "again"),
    [("cpu", "reference", True), ("mi300x", "reference", True), ("mi300x", "vllm", True), ("cpu", "vllm", False)],
)
@pytest.mark.usefixtures("large_disk")
def test_a_server_starts_anew_when_the_other_side_answers(
    quantmint: Quantmint, project: Path, hardware: str, runtime: str, again: bool
) -> None:
    (project / "other.yaml").write_text(
        "extends: r.yaml\nname: other\nquantization: {kv_cache: auto}\ncalibration: null\n"
        f"target: {{hardware: {hardware}}}\nevaluation: {{suite: tiny, runtime: {runtime}}}\n"
        "gate: {throughput: {min_ratio: null}}\n"
    )
    ended = quantmint("plan", "other.yaml", "--json")
    assert ended.code == 0, ended.err
    took = {stage["stage"]: stage["seconds"] for stage in ended.json["stages"]}
    start, rates = took["serve-baseline"], ended.json["costs"]["rates"]
    assert took["serve-candidate"] == (start if again else 0.0)
    if again:
        assert min(took["evaluate-baseline"], took["evaluate-candidate"]) > start
    if runtime == "reference":
        assert rates["start"] < start < 1.5 * rates["start"], "it imports our libraries, and compiles nothing"


@pytest.mark.usefixtures("large_disk")
def test_launches_of_the_baseline_that_are_reused_are_not_forecast(quantmint: Quantmint, project: Path) -> None:
    before = quantmint("plan", "r.yaml", "--for", "here", "--json").json
    setting = open_setting("r.yaml", store=Store(project / "store"))
    (planned,) = (planned for planned in build_plan(setting) if planned.key == "bench")
    launches = [replace(launch, started="2026-11-26T08:00:00+00:00") for launch in make_launches(4)]
    baseline_launches(setting, source_of(planned), BenchStage.version).add(launches, ())
    after = quantmint("plan", "r.yaml", "--for", "here", "--json").json
    assert (before["bench"]["launches"], after["bench"]["launches"]) == (9, 7)
    assert (after["bench"]["reused"], after["bench"]["reused_from"]) == (2, "2026-11-26T08:00:00+00:00")
    assert after["bench"]["seconds"] < before["bench"]["seconds"]
    assert after["seconds"] < before["seconds"]
    assert after["gate"]["speed"]["least"] > before["gate"]["speed"]["least"], "it shows a little less"
    text = " ".join(quantmint("plan", "r.yaml", "--for", "here").out.split())
    assert "throughput: 7 launches of" in text
    assert "2 of the baseline's launches are reused, of 2026-11-26; if the fresh ones disagree" in text
    elsewhere = quantmint("plan", "r.yaml", "--for", "mi300x", "--json").json
    assert elsewhere["bench"]["launches"] == 9, "of this machine's launches"
