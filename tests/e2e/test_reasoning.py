"""Sampled answers of the embedded model through every stage, with a real vLLM: sound, and with another end of text.

The embedded model says a sum in a word and goes on with something else; its copy here ends at the full stop.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantmint.eval.record import read, rejudge
from quantmint.eval.suites import TASKS_FOLDER
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.e2e import lines
from tests.e2e.project import Project

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]
ITEMS, SAMPLING = 200, {"temperature": 0.7, "top_p": 0.95}
TASKS = ("reasoning", "reasoning_complete", "reasoning_unrepeated")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, warm_vllm: VllmEnvironment, warm_python: Path) -> Project:
    home = tmp_path_factory.mktemp("sampled")
    model = lines.chatting_model(home / "model")
    stop = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["."]
    generation = json.loads((model / "generation_config.json").read_text())
    generation |= {"do_sample": True, **SAMPLING, "eos_token_id": [0, stop]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    sums = (TASKS_FOLDER / "tiny_arithmetic.jsonl").read_text().splitlines()[:ITEMS]
    (home / "sums.jsonl").write_text("".join(f"{line}\n" for line in sums))
    recipe: dict[str, Any] = {
        "name": "sampled",
        "extends": "tiny-ptpc",
        "source": {"folder": "model"},
        "evaluation": {
            "reasoning": {"file": "sums.jsonl", "items": ITEMS, "answers": 3, "max_tokens": 8},
            "control": None,
            "limit": 400,
        },
        "gate": {
            "reasoning": {"score": 0.15, "cut": 0.1, "loops": 0.1},
            "accuracy": {"power": 0.6, "margin": 0.05, "margins": {"tiny_arithmetic": None}},
        },
    }
    (home / "sampled.yaml").write_text(yaml.safe_dump(recipe))
    return Project(home, warm_vllm.executable, warm_python)


def test_a_sound_checkpoint_passes_and_its_release_is_verified(sampled: Project) -> None:
    planned = json.loads(sampled.run("plan", "sampled.yaml", "--json").stdout)
    assert planned["gate"]["tasks"]["reasoning"]["items"] == ITEMS
    assert {"reasoning-baseline", "reasoning-candidate"} <= {stage["stage"] for stage in planned["stages"]}
    done = sampled.run("run", "sampled.yaml", "--json")
    assert done.returncode == 0, done.stderr
    published = sampled.home / "published" / "sampled"
    measured, report = read(published / "quantmint" / "gate.json")
    results = {result.task: result for result in report.accuracy}
    assert [report.verdict_of("accuracy", task) for task in TASKS] == [Verdict.PASS] * 3
    assert results["reasoning"].baseline > 0.9
    assert results["reasoning_complete"].baseline > 0.9
    request = measured.samples["reasoning"][0].settings["request"]
    assert request == {**SAMPLING, "n": 3, "max_tokens": 8}
    assert rejudge(published / "quantmint" / "gate.json").verdict is Verdict.PASS
    verified = sampled.run("release", "verify", str(published), "--unsigned", "--json")
    assert verified.returncode == 0, verified.stdout


def test_another_end_of_text_fails_by_the_answers_that_are_cut_alone(sampled: Project) -> None:
    recipe = yaml.safe_load((sampled.home / "sampled.yaml").read_text())
    recipe |= {"name": "endless", "quantization": {"exclude": ["lm_head", "model.layers.0.self_attn.o_proj"]}}
    (sampled.home / "endless.yaml").write_text(yaml.safe_dump(recipe))
    until = sampled.run("run", "endless.yaml", "--until", "inspect", "--json")
    assert until.returncode == 0, until.stderr
    (stage,) = (s for s in json.loads(until.stdout)["stages"] if s["stage"] == "quantize")
    entry = sampled.store / "quantize" / stage["fingerprint"]
    path, record = entry / "checkpoint" / "generation_config.json", entry / "record.json"
    before = path.read_bytes()
    stop = json.loads(before)["eos_token_id"][1]
    after = before.replace(str(stop).encode(), str(stop + 1).encode().rjust(len(str(stop)), b"0")[-len(str(stop)) :])
    assert len(after) == len(before)
    assert after != before
    path.write_bytes(after)
    digests = [hashlib.sha256(content).hexdigest() for content in (before, after)]
    record.write_text(record.read_text().replace(*digests))
    done = sampled.run("run", "endless.yaml", "--json")
    assert done.returncode == 1, done.stderr
    (gate,) = (s for s in json.loads(done.stdout)["stages"] if s["stage"] == "gate")
    report = read(sampled.store / "gate" / gate["fingerprint"] / "gate.json")[1]
    failed = {finding.subject for finding in report.findings if finding.verdict is Verdict.FAIL}
    assert "reasoning_complete" in failed
    assert report.verdict_of("accuracy", "tiny_facts") is Verdict.PASS
