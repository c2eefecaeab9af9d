"""What the gate says of the embedded model, through the whole pipeline: four checkpoints against one baseline.

The reference runtime answers, because no vLLM for a CPU loads all of the formats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from quantmint.eval.verdict import Verdict
from quantmint.pipeline.base.progress import PlainReporter
from quantmint.pipeline.commands.cli import main
from quantmint.pipeline.quantize.schemes.fp8 import ptpc_fp8
from quantmint.pipeline.runs.planner import build_plan
from quantmint.pipeline.runs.runner import RunOutcome, run_plan
from quantmint.pipeline.runs.session import open_setting
from quantmint.pipeline.stages.quantize import CHECKPOINT
from quantmint.pipeline.store.tree import Store
from tests.e2e.remade import Remade, another_template, four_times_too_large, plan_with
from tests.serving.served.cases import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MARGIN = 0.03
BASE: dict[str, Any] = {
    "description": "The embedded model on the reference runtime.",
    "source": {"folder": str(MODEL)},
    "calibration": {"set": "tiny", "samples": 64, "sequence_length": 256, "batch_size": 8, "seed": 0},
    "target": {"hardware": "cpu", "gpus": 1, "workload": "tiny", "max_model_len": 512},
    "evaluation": {"suite": "tiny", "runtime": "reference", "limit": 500, "looks": 2, "control": None},
    "gate": {"accuracy": {"margin": MARGIN}, "throughput": {"min_ratio": None}},
    "publish": {"folder": "published"},
}
PTPC = {"scheme": "ptpc_fp8", "kv_cache": "fp8", "format": "compressed-tensors"}
MXFP4 = {"scheme": "mxfp4", "kv_cache": "auto", "format": "quark"}

Run = Callable[..., RunOutcome]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One for all cases: what concerns the baseline is measured once."""
    return Store(tmp_path_factory.mktemp("gate-cases") / "store")


@pytest.fixture
def run(store: Store, tmp_path: Path, warm_python: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(sys, "executable", str(warm_python))  # what answers, and who asks

    def through(
        name: str,
        quantization: dict[str, Any],
        remade: Remade | None = None,
        *,
        margins: dict[str, float] | None = None,
    ) -> RunOutcome:
        if remade is not None:
            plan_with(remade, monkeypatch)
        path = tmp_path / f"{name}.yaml"
        gate = {**BASE["gate"], "accuracy": {"margin": MARGIN, "margins": margins or {}}}
        path.write_text(yaml.safe_dump({"name": name, **BASE, "gate": gate, "quantization": quantization}))
        setting = open_setting(str(path), store=store, device="cpu", to_run=True)
        assert setting.vllm is None
        setting = replace(setting, home=tmp_path)
        return run_plan(build_plan(setting), setting, PlainReporter())

    return through


def judged(outcome: RunOutcome) -> Any:
    entry = outcome.entry("gate")
    assert entry is not None
    return json.loads((entry.path / "gate.json").read_text(encoding="utf-8"))


def ran(outcome: RunOutcome) -> dict[str, bool]:
    """The stages that were reached, and whether each was there already."""
    return {step.planned.key: step.cached for step in outcome.steps}


def test_fp8_with_an_fp8_cache_passes_and_the_verdict_names_what_answered(run: Run, tmp_path: Path) -> None:
    outcome = run("ptpc", PTPC)
    found = judged(outcome)
    assert outcome.verdict is Verdict.PASS, found["findings"]
    assert found["runtime"].startswith("transformers ")
    assert found["runtime"].endswith("dequantized weights, simulated FP8 activations, FP8 KV cache")
    assert (found["hardware"], bool(found["device"])) == ("cpu", True)
    assert {result["task"]: result["difference"] for result in found["accuracy"]}["tiny_facts"] > -MARGIN
    assert "bench" not in ran(outcome)
    assert (tmp_path / "published" / "ptpc" / "config.json").is_file()
    assert found["runtime"] in (tmp_path / "published" / "ptpc" / "quantmint" / "report.html").read_text()


def test_a_margin_that_was_widened_after_a_verdict_is_told_to_every_reader(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Page, card, gate and verify; and the second verdict asks no item again."""
    strict = run("strict", MXFP4)
    assert strict.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
    assert not (tmp_path / "published").exists()
    wide = run("wide", MXFP4, margins={"tiny_facts": 0.3, "tiny_arithmetic": 0.6})
    assert wide.verdict is Verdict.PASS
    assert "Limits were widened after the data was seen" in capsys.readouterr().err
    evaluated = wide.entry("evaluate-candidate")
    assert evaluated is not None
    assert evaluated.record.result["asked"] == {}
    artefact = judged(wide)["artefact"]
    [before] = [earlier for earlier in judged(wide)["history"] if earlier["artefact"] == artefact]
    assert (before["verdict"], before["tasks"]["tiny_facts"]["margin"]) == (strict.verdict.value, MARGIN)
    published = tmp_path / "published" / "wide"
    told = "the margin of tiny_facts was \N{MINUS SIGN}3.00 pt and is \N{MINUS SIGN}30.00 pt"
    for name in ("README.md", "quantmint/report.html", "quantmint/report.md"):
        assert told in (published / name).read_text().replace("\N{NO-BREAK SPACE}", " ").replace("\\_", "_"), name
    for command in (("gate", published), ("release", "verify", published, "--unsigned")):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, command)))
        shown = " ".join(capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ").split())
        assert (ended.value.code, told in shown) == (0, True), shown


def test_mxfp4_by_rounding_does_not_pass(run: Run, tmp_path: Path) -> None:
    outcome = run("mxfp4", MXFP4)
    found = judged(outcome)
    assert outcome.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE), found["findings"]
    assert found["runtime"].endswith("dequantized weights, simulated MXFP4 activations")
    assert not (tmp_path / "published").exists()
    assert {"serve-baseline", "canary-baseline"} <= {key for key, cached in ran(outcome).items() if cached}
    if outcome.stopped is None:  # what the data say is what the bounds say
        worst = min(found["accuracy"], key=lambda result: result["upper"])
        assert (outcome.verdict is Verdict.FAIL) == (worst["upper"] < -found["policy"]["margins"][worst["task"]])


def test_a_layer_whose_scales_are_four_times_too_large_is_stopped_by_the_canary(run: Run, tmp_path: Path) -> None:
    outcome = run("harmed", PTPC, Remade("harmed", four_times_too_large))
    assert (outcome.verdict, outcome.stopped, outcome.exit_code) == (Verdict.FAIL, "canary-candidate", 1)
    assert ran(outcome)["inspect"] is False, "inspected, and found sound"
    assert _only_scales_of_layer_1_differ_by_four(outcome)
    assert ran(outcome).keys().isdisjoint({"evaluate-baseline", "evaluate-candidate", "publish"})
    assert outcome.entry("report") is not None
    found = judged(outcome)
    assert [finding["kind"] for finding in found["findings"] if finding["verdict"] == "FAIL"] == ["canary"]
    assert found["runtime"].startswith("transformers ")
    assert not (tmp_path / "published").exists()


def test_sides_with_different_templates_are_not_compared(run: Run, tmp_path: Path) -> None:
    """The baseline answers with another chat template than the model had when the checkpoint was made."""
    outcome = run("template", PTPC, Remade("template", another_template))
    assert outcome.verdict is Verdict.INVALID
    found = judged(outcome)
    (reason,) = [finding["reason"] for finding in found["findings"] if finding["verdict"] == "INVALID"]
    assert "template" in reason
    assert found["runtime"].startswith("transformers ")
    assert not (tmp_path / "published").exists()
    assert ran(outcome)["evaluate-baseline"] is True


def _only_scales_of_layer_1_differ_by_four(outcome: RunOutcome) -> bool:
    """Whether the checkpoint is what the sound model gives, but for scales times 4: not a byte of a weight differs."""
    entry = outcome.entry("quantize")
    assert entry is not None
    stored, source = load_file(entry.path / CHECKPOINT / "model.safetensors"), load_file(MODEL / "model.safetensors")
    projections = [name for name in source if name.endswith("proj.weight")]
    assert projections
    return all(
        stored[name].view(torch.uint8).equal(sound["weight"].view(torch.uint8))
        and stored[f"{name}_scale"].flatten().equal(sound["weight_scale"] * (4 if ".layers.1." in name else 1))
        for name in projections
        for sound in (ptpc_fp8(source[name]),)
    )
