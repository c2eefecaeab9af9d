"""Speculative decoding of the embedded model on vLLM's CPU build, by n-grams and by a draft model, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantmint.pipeline.serving.environment import VllmEnvironment
from tests.e2e.project import Project

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

MODEL = Path(__file__).parents[2] / "recipes" / "tiny" / "model"
RECIPE = """\
name: {name}
extends: tiny-ptpc
serve: {{knobs: {{--dtype: float32}}, speculative: {speculative}}}
gate: {{acceptance: {{margin: {margin}}}, throughput: {{min_ratio: null}}}}
"""


@pytest.fixture(scope="module")
def home(warm_vllm: VllmEnvironment, warm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("speculative"), warm_vllm.executable, warm_python)


def run(project: Project, name: str, speculative: str, margin: float, until: str, code: int = 0) -> dict[str, Any]:
    """Run a recipe up to a stage; return what the command says as JSON."""
    recipe = RECIPE.format(name=name, speculative=speculative, margin=margin)
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


def test_a_draft_model_proposes_what_its_target_accepts(home: Project) -> None:
    """The 16-bit model is its own draft: it accepts all, and the candidate nearly all."""
    run(home, "draft", f"{{method: draft_model, model: {MODEL}, tokens: 2}}", 0.1, "acceptance-candidate")
    sides = {}
    for path in home.store.glob("acceptance/*/drafts.json"):
        record = json.loads((path.parent / "record.json").read_text())
        recorded = json.loads(path.read_text())
        if recorded["method"] == "draft_model":
            sides[record["payload"]["settings"]["side"]] = record["result"]["length"]
    assert sides["baseline"] == pytest.approx(3.0, abs=0.02)
    assert 2.7 < sides["candidate"] < sides["baseline"]
