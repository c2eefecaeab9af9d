"""Function calls of the embedded model through every stage with a real vLLM: sound, and with doubled scales."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from quantmint.eval.record import read, rejudge
from quantmint.eval.verdict import Verdict
from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.e2e import lines
from tests.e2e.project import Project

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]
ITEMS = 300


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, warm_vllm: VllmEnvironment, warm_python: Path) -> Project:
    home = tmp_path_factory.mktemp("calling")
    lines.chatting_model(home / "model")
    lines.calls(home / "calls.jsonl", ITEMS)
    recipe: dict[str, Any] = {
        "name": "calling",
        "extends": "tiny-ptpc",
        "source": {"folder": "model"},
        "serve": {"arguments": [*lines.ARGUMENTS, str(home / "lines_parser.py")]},
        "evaluation": {
            "tools": {"file": "calls.jsonl", "items": ITEMS, "max_tokens": 8},
            "control": 100,
        },
        "gate": {"tools": {"exact": 0.06, "valid": 0.05}, "accuracy": {"power": 0.75}},
    }
    (home / "calling.yaml").write_text(yaml.safe_dump(recipe))
    return Project(home, warm_vllm.executable, warm_python)


def test_a_sound_checkpoint_passes_and_its_release_is_verified(calling: Project) -> None:
    plan = json.loads(calling.run("plan", "calling.yaml", "--json").stdout)
    assert plan["gate"]["tasks"]["tool_calls"]["items"] == ITEMS
    done = calling.run("run", "calling.yaml", "--json")
    assert done.returncode == 0, done.stderr
    published = calling.home / "published" / "calling"
    measured, report = read(published / "quantmint" / "gate.json")
    exact, valid = (next(r for r in report.accuracy if r.task == task) for task in ("tool_calls", "tool_calls_valid"))
    assert exact.baseline > 0.8
    assert exact.mcnemar_p is not None
    assert valid.baseline == valid.candidate == 1
    assert report.verdict_of("accuracy", "tool_calls") is Verdict.PASS
    assert report.control["tool_calls"].items == 75  # the first look
    assert measured.samples["tool_calls"][0].settings["request"]["tool_choice"] == "auto"
    assert rejudge(published / "quantmint" / "gate.json").verdict is Verdict.PASS
    verified = calling.run("release", "verify", str(published), "--unsigned", "--json")
    assert verified.returncode == 0, verified.stdout
    page = (published / "quantmint" / "report.html").read_text()
    assert "tool_calls_valid" in page
    told = json.loads((published / "quantmint" / "report.json").read_text())
    assert {"tool_calls", "tool_calls_valid"} <= {row["task"] for row in told["gate"]["accuracy"]}
    again = json.loads(calling.run("run", "calling.yaml", "--json").stdout)
    assert all(stage["cached"] for stage in again["stages"])


def test_doubled_scales_of_a_layer_fail(calling: Project) -> None:
    recipe = yaml.safe_load((calling.home / "calling.yaml").read_text())
    # The canary and the suite would say so too: this is what the calls alone say.
    recipe |= {"name": "broken", "gate": {**recipe["gate"], "canary": None}}
    recipe["quantization"] = {"exclude": ["lm_head", "model.layers.0.self_attn.o_proj"]}
    (calling.home / "broken.yaml").write_text(yaml.safe_dump(recipe))
    until = calling.run("run", "broken.yaml", "--until", "inspect", "--json")
    assert until.returncode == 0, until.stderr
    (stage,) = (s for s in json.loads(until.stdout)["stages"] if s["stage"] == "quantize")
    _double(calling.store / "quantize" / stage["fingerprint"])
    done = calling.run("run", "broken.yaml", "--json")
    assert done.returncode == 1, done.stderr
    (gate,) = (s for s in json.loads(done.stdout)["stages"] if s["stage"] == "gate")
    report = read(calling.store / "gate" / gate["fingerprint"] / "gate.json")[1]
    assert report.verdict_of("accuracy", "tool_calls") is Verdict.FAIL
    assert next(r for r in report.accuracy if r.task == "tool_calls").items < ITEMS  # it was over early


def _double(entry: Path) -> None:
    """Double the scales of a layer in an entry, as a faulty engine would have written and recorded them."""
    path = entry / "checkpoint" / "model.safetensors"
    with safe_open(path, "pt") as file:
        stored = list(file.keys())
        names = [name for name in stored if ".layers.1." in name and name.endswith("weight_scale")]
        doubled = {name: file.get_tensor(name) * 2 for name in names}
    assert doubled
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in doubled.items():
        start, end = (8 + length + offset for offset in header[name]["data_offsets"])
        data[start:end] = tensor.view(torch.uint8).numpy().tobytes()
    record = (entry / "record.json").read_text()
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    assert before in record
    path.write_bytes(data)
    (entry / "record.json").write_text(record.replace(before, hashlib.sha256(data).hexdigest()))
