"""Speculative decoding of the embedded model on vLLM's CPU build, by n-grams and by drafts, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.e2e.project import Project
from tests.zoo.drafts import build_draft
from tests.zoo.models import read, write

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

MODEL = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
RECIPE = """\
name: {name}
extends: tiny-ptpc
target: {{max_model_len: {length}}}  # short answers: a fourth of it
serve: {{knobs: {{--dtype: float32}}, speculative: {speculative}}}
evaluation: {{control: null, limit: 400}}  # the suite is another test's
gate:
  acceptance: {{margin: {margin}}}
  accuracy: {{power: 0.6, margin: 0.05, margins: {{tiny_arithmetic: null}}}}
  throughput: {{min_ratio: null}}
publish: {{folder: published}}
"""


@pytest.fixture(scope="module")
def home(warm_vllm: VllmEnvironment, warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("speculative"), warm_vllm.executable, warm_python)


def run(
    project: Project,
    name: str,
    speculative: str,
    margin: float,
    until: str,
    *,
    code: int = 0,
    draft: str = "",
    length: int = 128,
) -> dict[str, Any]:
    """Run a recipe up to a stage; return what the command says as JSON."""
    recipe = RECIPE.format(name=name, speculative=speculative, margin=margin, length=length) + draft
    (project.home / f"{name}.yaml").write_text(recipe, encoding="utf-8")
    done = project.run("run", f"{name}.yaml", "--until", until, "--json")
    assert done.returncode == code, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_ngrams_are_accepted_as_often_as_the_baselines(home: Project) -> None:
    ngram = "{method: ngram, tokens: 3}"
    run(home, "ngram", ngram, 0.1, "report")
    (path,) = home.store.glob("gate/*/gate.json")
    gate = json.loads(path.read_text())
    accepted = gate["acceptance"]
    assert (accepted["method"], accepted["tokens"], accepted["prompts"]) == ("ngram", 3, 48)
    assert 1.5 < accepted["baseline"] < 4
    assert accepted["low"] < accepted["ratio"] < accepted["high"]
    assert ("acceptance", "PASS") in {(finding["kind"], finding["verdict"]) for finding in gate["findings"]}
    rows = gate["measurements"]["acceptance"]["baseline"]
    assert sum(row["drafts"] for row in rows) == accepted["drafts"][0]
    assert sum(row["accepted"] for row in rows) > 100
    (page,) = home.store.glob("report/*/report.html")
    assert 'id="acceptance"' in page.read_text()

    again = run(home, "ngram", ngram, 0.0001, "gate", code=3)  # less than any interval can show
    assert [stage["stage"] for stage in again["stages"] if not stage["cached"]] == ["gate"]
    assert again["verdict"] == "INCONCLUSIVE"


def lengths(project: Project, method: str) -> dict[str, float]:
    """Return the acceptance length of each side with a method."""
    sides = {}
    for path in project.store.glob("acceptance/*/drafts.json"):
        record = json.loads((path.parent / "record.json").read_text())
        if json.loads(path.read_text())["method"] == method:
            sides[record["payload"]["settings"]["side"]] = record["result"]["length"]
    return sides


def test_a_draft_is_served_and_published_with_its_target(home: Project) -> None:
    """The 16-bit model is its own draft, and the FP8 checkpoint's draft is that model in FP8: all is accepted."""
    draft = f"draft: {{folder: {MODEL}, scheme: ptpc_fp8}}\n"
    run(home, "drafted", "{method: draft_model, tokens: 2}", 0.1, "publish", draft=draft)
    sides = lengths(home, "draft_model")
    assert sides == {"baseline": pytest.approx(3.0, abs=0.02), "candidate": pytest.approx(3.0, abs=0.02)}
    release = home.home / "published" / "drafted"
    manifest = json.loads((release / "quantmint.json").read_text())
    assert {"draft/config.json", "draft/model.safetensors"} <= manifest["files"].keys()
    assert str(home.home) not in (release / "quantmint.json").read_text()
    assert home.run("release", "verify", str(release), "--unsigned").returncode == 0
    tensors = read(release / "draft")
    write(release / "draft", {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")})
    broken = home.run("release", "verify", str(release), "--unsigned")
    assert broken.returncode == 1
    assert "draft/model.layers.0.self_attn.q_proj.weight_scale: missing scale" in broken.stdout


def test_vllm_serves_an_eagle3_draft_that_is_quantized(home: Project) -> None:
    """The draft's weights are random, so that next to nothing is accepted: what is shown is that vLLM loads it."""
    build_draft("eagle3", MODEL, home.home / "eagle")
    draft = "draft: {folder: eagle, scheme: ptpc_fp8}\n"
    run(home, "eagle", "{method: eagle3, tokens: 2}", 0.1, "acceptance-candidate", draft=draft, length=96)
    sides = lengths(home, "eagle3")
    assert sides["baseline"] == pytest.approx(sides["candidate"], rel=0.05)
    assert 1 <= sides["candidate"] < 1.5
